"""Whole games with a scripted model."""

import json

import pytest

from reinforge.rollout.workflow import PolicyFailure
from reinforge.tasks.tic_tac_toe.dataset import TicTacToeDataset, TicTacToeDatasetConfig
from reinforge.tasks.tic_tac_toe.evaluators import TicTacToeLegal, TicTacToeReward, TicTacToeRewardConfig, TicTacToeWin
from reinforge.tasks.tic_tac_toe.game import EMPTY_BOARD, LINES, completing_moves, place
from reinforge.tasks.tic_tac_toe.workflow import play
from reinforge.types.evaluation import EvalInputItem
from tests.doubles import ScriptedChat


def squares(prompt):
    return prompt.removeprefix("Play +: ").split(" ")


def first_empty(prompt):
    return f" {next(word for word in squares(prompt) if len(word) == 1)}"


def attack(prompt):
    shown = squares(prompt)
    for line in LINES:
        words = sorted(shown[square] for square in line)
        if words[0][0] == words[1][0] == "+" and len(words[2]) == 1:
            return words[2]
    return first_empty(prompt)


def example(side="X", world_seed=1, opponent="random"):
    question = {"side": side, "opponent": opponent, "world_seed": world_seed}
    return EvalInputItem(id="t", input_obj=question, expected_output_obj=None, full_dataset_entry=question)


async def score(evaluator, game):
    return (await evaluator.evaluate(example().copy_with_updates(output_obj=game))).score


async def games(answer, count=60, opponent="random"):
    return [await play(example("XO"[seed % 2], seed, opponent), ScriptedChat(answer), None) for seed in range(count)]


async def test_a_game_is_played_to_its_end_on_both_sides():
    finished = await games(attack)
    assert {game["result"] for game in finished} == {"win", "draw", "loss"}
    for game in finished:
        json.dumps(game)
        assert game["num_legal"] == game["num_moves"] == sum(m["side"] == game["side"] for m in game["moves"])
        assert [m["side"] for m in game["moves"]] == list("XOXOXOXOX")[: len(game["moves"])]
        assert len({m["square"] for m in game["moves"]}) == len(game["moves"])
        assert game["board"].count("\n") == 2
    wins = [game for game in finished if game["result"] == "win"]
    assert len(wins) > 30
    assert all(game["moves"][-1]["side"] == game["side"] for game in wins)


async def test_a_sharp_opponent_completes_its_line_wherever_it_can():
    def left_open(game):
        board, seen = EMPTY_BOARD, 0
        for move in game["moves"]:
            if move["side"] != game["side"] and (ways := completing_moves(board, move["side"])):
                seen += move["square"] - 1 not in ways
            board = place(board, move["square"] - 1, move["side"])
        return seen

    assert sum(left_open(game) for game in await games(attack, opponent="sharp")) == 0
    assert sum(left_open(game) for game in await games(attack)) > 0


async def test_each_move_is_a_fresh_call_that_shows_the_board():
    llm = ScriptedChat(first_empty)
    game = await play(example("O", 3), llm, None)
    assert len(llm.prompts) == game["num_moves"]
    assert {(len(request["messages"]), request["max_tokens"]) for request in llm.requests} == {(1, 4)}
    assert sum(word.startswith("-") for word in squares(llm.prompts[0])) == 1
    assert sum(word.startswith("+") for word in squares(llm.prompts[1])) == 1


async def test_siblings_meet_the_same_opponent():
    assert await play(example(), ScriptedChat(attack), None) == await play(example(), ScriptedChat(attack), None)
    openings = {
        (await play(example("O", seed), ScriptedChat(attack), None))["moves"][0]["square"] for seed in range(40)
    }
    assert openings == set(range(1, 10))


@pytest.mark.parametrize("answer", ["", None, "12", "five", "½", "\ud83c", "0", "<|end|>"])
async def test_an_answer_that_is_not_a_digit_is_a_policy_failure(answer):
    with pytest.raises(PolicyFailure, match="not one digit") as failure:
        await play(example(), ScriptedChat(lambda prompt: answer), None)
    game = failure.value.output
    json.dumps(game)
    assert (game["result"], game["num_legal"], game["num_moves"]) == ("illegal", 0, 1)
    assert await score(TicTacToeLegal(), game) == 0.0
    assert await score(TicTacToeWin(), game) == 0.0


async def test_a_taken_square_ends_the_game_and_legality_counts_the_moves_before():
    with pytest.raises(PolicyFailure, match="taken") as failure:
        await play(example("X", 5), ScriptedChat(lambda prompt: "9"), None)
    game = failure.value.output
    assert (game["num_legal"], game["num_moves"], game["result"]) == (1, 2, "illegal")
    assert await score(TicTacToeLegal(), game) == 0.5


async def test_scores_by_hand():
    reward = TicTacToeReward(TicTacToeRewardConfig(win=1.0, draw=0.3, loss=0.0, per_move=0.1))

    def game(result, num_moves):
        return {"result": result, "side": "X", "num_moves": num_moves, "num_legal": num_moves}

    assert await score(TicTacToeWin(), game("win", 3)) == 1.0
    assert await score(TicTacToeWin(), game("draw", 5)) == 0.0
    assert await score(reward, game("win", 3)) == 1.0
    assert await score(reward, game("win", 5)) == pytest.approx(0.8)
    assert await score(reward, game("draw", 5)) == 0.3
    assert await score(reward, game("loss", 2)) == 0.0
    assert await score(reward, game("loss", 4)) == pytest.approx(0.2)
    assert await score(TicTacToeLegal(), game("win", 3)) == 1.0


async def test_without_a_game_the_score_is_missing():
    found = await TicTacToeWin().evaluate(example())
    assert found.score is None
    assert found.error == "the agent returned no game"


def test_sides_alternate():
    rows = TicTacToeDataset(TicTacToeDatasetConfig(num_train=50, num_select=20, num_confirm=30)).rows()
    assert sum(row["side"] == "X" for row in rows) == 50


def test_only_training_games_may_meet_a_sharp_opponent():
    config = TicTacToeDatasetConfig(num_train=1000, num_select=50, num_confirm=50, sharp_train=0.7)
    rows = TicTacToeDataset(config).rows()
    assert {row["opponent"] for row in rows if row["split"] != "train"} == {"random"}
    assert sum(row["opponent"] == "sharp" for row in rows) == pytest.approx(700, abs=50)
