"""Tic-tac-toe with TRL's `GRPOTrainer`: whole games in its `rollout_func`, one row per move.

Every move is a separate model call that shows the board, so a game is not one row of tokens: TRL trains each move as
its own row, with the reward of its game. TRL needs the same number of rows for every prompt. The moves of 8 games,
about 28, fill 30 rows; unused rows have no reward and an empty mask, and moves beyond 30 are dropped. Games, opponents,
reward, penalty and recipe (clip, entropy, learning rate schedule, steps per epoch) are those of the bundled demo.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any

from reinforge.tasks.tic_tac_toe.evaluators import TicTacToeReward, TicTacToeRewardConfig
from reinforge.tasks.tic_tac_toe.game import (
    completing_moves,
    format_prompt,
    is_over,
    legal_moves,
    other,
    parse_move,
    side_to_move,
)
from reinforge.tasks.tic_tac_toe.workflow import Game

SIBLINGS, ROWS = 8, 30
"""Games per prompt, and rows for their moves."""
MAX_TOKENS = 4
PENALTY = -0.5

Row = dict[str, Any]
Move = tuple[list[int], list[int]]
"""Tokens of a prompt and of its reply."""


class Player:
    """Plays games with the model in training, all at once: one `generate` call per move of all games."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer = model, tokenizer
        self.render = cache(self._render)

    def _render(self, text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]

    def play(self, rows: Sequence[Row]) -> tuple[list[Game], list[list[Move]]]:
        """Returns each game and the moves that the model made in it."""
        games = [Game(side=row["side"]) for row in rows]
        rngs = [random.Random(row["world_seed"]) for row in rows]
        moves: list[list[Move]] = [[] for _ in rows]
        while True:
            for game, row, rng in zip(games, rows, rngs, strict=True):
                _let_opponent_move(game, rng, is_sharp=row["opponent"] == "sharp")
            live = [i for i, game in enumerate(games) if not game.failed and not is_over(game.board)]
            if not live:
                return games, moves
            prompts = [self.render(format_prompt(games[i].board, games[i].side)) for i in live]
            for i, prompt, reply in zip(live, prompts, self._sample(prompts), strict=True):
                moves[i].append((prompt, reply))
                _play_square(games[i], parse_move(self.tokenizer.decode(reply, skip_special_tokens=True)))

    def _sample(self, prompts: list[list[int]]) -> list[list[int]]:
        """Returns replies including their end token; all board prompts have the same length."""
        import torch

        inputs = torch.tensor(prompts)
        with torch.no_grad():
            sampled = self.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=MAX_TOKENS,
                pad_token_id=self.tokenizer.pad_token_id,
            )[:, inputs.shape[1] :].tolist()
        end = self.tokenizer.eos_token_id
        return [reply[: reply.index(end) + 1] if end in reply else reply for reply in sampled]


def _let_opponent_move(game: Game, rng: random.Random, *, is_sharp: bool) -> None:
    while not game.failed and not is_over(game.board) and side_to_move(game.board) == other(game.side):
        completing = completing_moves(game.board, side_to_move(game.board)) if is_sharp else []
        game.play(rng.choice(completing or legal_moves(game.board)))


def _play_square(game: Game, square: int | None) -> None:
    game.num_moves += 1
    if square is None or game.board[square] is not None:
        game.failed = True
    else:
        game.num_legal += 1
        game.play(square)


def compute_reward(game: Game, reward: TicTacToeReward) -> float:
    """Returns a game's training reward, or the penalty for an illegal move."""
    return PENALTY if game.failed else reward.score(game.as_output())


def train(
    folder: Path,
    rows: Sequence[Row],
    select: Sequence[Row],
    settings: dict[str, Any],
    report: Callable[[float, int, float], None],
) -> None:
    """Trains, and reports (seconds without evaluations, epochs done, win rate on `select`) at every evaluation.

    Args:
        folder: The model.
        rows: Training games.
        select: Games of the evaluations.
        settings: `seed`, `epochs`, `examples` per epoch, `steps` per epoch, their `generations`, `interval` of epochs
            between evaluations, `learning_rate`, `warmup`, `final`.
        report: Receives each evaluation; it may end the process.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    from reinforge.config.policy import ScheduleConfig
    from reinforge.engine.training.scheduled_optimizer import learning_rate_factor

    logging.set_verbosity_error()
    getLogger("trl").setLevel("ERROR")  # it warns about rows without reward
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    player, reward = Player(model, tokenizer), TicTacToeReward(TicTacToeRewardConfig(draw=0.3, per_move=0.1))
    by_id = {row["id"]: row for row in rows}
    rng = random.Random(settings["seed"])
    steps, total = settings["steps"] // settings["generations"], settings["epochs"] * settings["steps"]
    groups = settings["examples"] // settings["generations"]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        examples = [by_id[id_] for id_ in prompts[::ROWS]]
        games, moves = player.play([row for row in examples for _ in range(SIBLINGS)])
        out: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "score": []}
        for first in range(0, len(games), SIBLINGS):
            rows_of_group = [
                (*move, compute_reward(games[i], reward)) for i in range(first, first + SIBLINGS) for move in moves[i]
            ]
            rng.shuffle(rows_of_group)
            for prompt, reply, score in rows_of_group[:ROWS]:
                for key, value in zip(out, (prompt, reply, [1] * len(reply), score), strict=True):
                    out[key].append(value)
            for _ in range(ROWS - len(rows_of_group)):
                for key, value in zip(out, (rows_of_group[0][0], [tokenizer.eos_token_id], [0], None), strict=True):
                    out[key].append(value)
        return {**out, "logprobs": None}

    class Clock(TrainerCallback):
        """Times everything except evaluations."""

        spent_s, since_s = 0.0, 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.since_s = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % (settings["steps"] * settings["interval"]):
                return
            self.spent_s += time.perf_counter() - self.since_s
            games, _ = player.play(select)
            wins = sum(game.result == "win" for game in games) / len(games)
            report(self.spent_s, state.global_step // settings["steps"], wins)
            self.since_s = time.perf_counter()

    schedule = ScheduleConfig(name="linear", warmup_steps=settings["warmup"], final_fraction=settings["final"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    factor = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(schedule, step, step / total)
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, score, **_: score,
        rollout_func=rollout,
        train_dataset=Dataset.from_dict({"prompt": [row["id"] for row in rows]}),
        callbacks=[Clock()],
        optimizers=(optimizer, factor),
        args=GRPOConfig(
            output_dir="trl",
            seed=settings["seed"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            beta=0.0,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            entropy_coef=0.03,
            num_generations=ROWS,
            per_device_train_batch_size=groups * ROWS // steps,
            gradient_accumulation_steps=1,
            steps_per_generation=steps,
            max_completion_length=MAX_TOKENS,
            max_grad_norm=1.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            max_steps=total,
        ),
    )
    trainer.train()
