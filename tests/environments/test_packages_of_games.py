"""TextArena's and gymnasium's games, with stand-ins for the packages where they are not installed.

`make clients` runs these tests with the packages themselves.
"""

import re
import sys
from pathlib import Path

import pytest
import yaml

from reinforge.config.loader import load_config
from reinforge.environments.gymnasium import GymnasiumConfig
from reinforge.environments.textarena import TextArenaConfig
from reinforge.errors import ConfigError
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.environments import playing
from tests.environments.playing import loaded_source, opened_here, report, rewards, transcript
from tests.generated import ROOT

STAND_INS = Path(__file__).with_name("standins")


@pytest.fixture(autouse=True)
def _find_games(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(STAND_INS)])  # behind a package that is installed
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(STAND_INS)):
            del sys.modules[name]


def take_first(request):
    """Takes all of the first pile in Nim that is not empty."""
    piles = re.findall(r"pile (\d): (\d)", request.messages[-1]["content"])[-3:]
    return next(f"[{pile} {size}]" for pile, size in piles if size != "0")


def take_one(request):
    return take_first(request)[:3] + "1]"


def play(folder, environment, script, **settings):
    """Plays in this process: workers are needed by the test of them alone."""
    return playing.play(folder, environment, script, open_=opened_here, **settings)


@pytest.mark.slow
async def test_64_games_at_a_time_with_equal_seeds_replay_bit_for_bit(tmp_path):
    """First in two workers, then in this process."""
    nim = {"_type": "textarena", "name": "Nim-v0", "size": 32}
    first = await playing.play(tmp_path, nim, take_first, generations=2, concurrency=64)
    again = await play(tmp_path, nim, take_first, generations=2, concurrency=64)
    assert all(record.outcome is Outcome.OK for record in first)
    assert list(map(transcript, first)) == list(map(transcript, again))
    games = {record.key.example_id: transcript(record)[0] for record in first}
    assert all(games[record.key.example_id] == transcript(record)[0] for record in first)  # siblings
    assert len({str(game) for game in games.values()}) > 16
    assert {report(record)["reward"] for record in first} == {-1.0, 1.0}


async def test_the_policy_sits_at_each_seat_and_hears_what_is_new_to_it(tmp_path):
    records = await play(tmp_path, {"_type": "textarena", "name": "Nim-v0"}, take_first)
    for record in records:
        first, second = (call.request.messages for call in record.calls[:2])
        moved = "[Player 0] [" in first[0]["content"]
        assert moved == (record.item.full_dataset_entry["seat"] == 1)
        assert [message["role"] for message in second] == ["user", "assistant", "user"]
        own = f"[Player {record.item.full_dataset_entry['seat']}] ["
        assert own not in second[2]["content"]


async def test_a_second_illegal_move_loses(tmp_path):
    [record, *_] = await play(tmp_path, {"_type": "textarena", "name": "Nim-v0"}, lambda request: "I pass")
    assert len(record.calls) == 2
    assert report(record) == {"reward": -1.0, "solved": 0.0, "invalid_move": 1.0, "num_steps": 2.0}


async def test_an_entry_of_llms_is_the_opponent_and_is_not_trained(tmp_path):
    rival = ScriptedPolicy(take_first)
    sections = {"llms": {"agent": {"_type": "policy"}, "rival": {"_type": "policy", "train": False}}}
    sections["workflow"] = {"_type": "environment", "llm": "agent"}
    nim = {"_type": "textarena", "name": "Nim-v0", "opponent": "rival"}
    records = await play(tmp_path, nim, take_one, rival=rival, **sections)
    for record in records:
        seat, own = record.item.full_dataset_entry["seat"], [call for call in record.calls if call.llm == "agent"]
        assert [call.llm for call in record.calls] == [
            ("agent", "rival")[(turn + seat) % 2] for turn in range(6 - seat)
        ]
        [end] = [mark for mark in record.marks if mark.step_reward is not None]
        assert (end.step_reward, end.call_id) == (-1.0, own[-1].call_id)
        assert report(record)["num_steps"] == len(own)
    heard = rival.requests[-1].messages
    assert [message["role"] for message in heard] == ["user", "assistant"] * 2 + ["user"]


def test_self_is_the_policy_untrained_and_another_opponent_must_be_there(tmp_path):
    def load(opponent):
        block = {"_type": "textarena", "name": "Nim-v0", "opponent": opponent}
        (tmp_path / "run.yml").write_text(yaml.safe_dump({"environment": block}))
        return load_config(tmp_path / "run.yml")

    llms = load("self").config.llms
    assert {name: llm.train for name, llm in llms.items()} == {"agent": True, "self": False}
    with pytest.raises(ConfigError, match='llms has no entry "agend", did you mean "agent"'):
        load("agend")


@pytest.mark.parametrize(
    ("environment", "given", "penalty"),
    [
        ("textarena:Nim-v0", {}, -1.0),
        ("gymnasium:Blackjack-v1", {}, -1.0),
        ("gymnasium:CliffWalking-v1", {}, -100.0),
        ("gymnasium:FrozenLake-v1", {}, 0.0),
        ("gymnasium:Taxi-v4", {"overlong": -7.0}, -7.0),
    ],
)
def test_to_fail_is_worse_than_to_lose(tmp_path, environment, given, penalty):
    sections = {"environment": environment, "finetuning": {"outcomes": given}}
    (tmp_path / "run.yml").write_text(yaml.safe_dump(sections))
    config = load_config(tmp_path / "run.yml").config
    assert config.finetuning.outcomes.overlong == penalty
    assert all(each.failed == 0.0 for name, each in config.eval.evaluators.items() if name != "reward")


async def test_a_game_for_one_player(tmp_path):
    guess = {"_type": "textarena", "name": "GuessTheNumber-v0"}
    records = await play(tmp_path, guess, lambda request: f"[{len(request.messages) // 2 + 6}]")
    assert all(record.outcome is Outcome.OK for record in records)
    assert len({str(transcript(record)[0]) for record in records}) > 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("textarena:Wordle-v0", r"python -m nltk.downloader \w+"),
        ("textarena:Nym-v0", 'no game "Nym-v0", did you mean "Nim-v0"'),
        ("gymnasium:FrozenLak-v1", "FrozenLake-v1"),
        ("gymnasium:CartPole-v1", "functions of yours: observe and act"),
    ],
)
async def test_what_cannot_be_played_is_refused_with_the_fix(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        async with loaded_source(tmp_path, environment=name) as (_, source):
            source.load()


@pytest.mark.parametrize("page", ["textarena", "gymnasium"])
def test_the_files_of_the_pages_are_valid(tmp_path, page):
    text = (ROOT / f"docs/environments/{page}.md").read_text()
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / "run.yml").write_text(block)
        load_config(tmp_path / "run.yml")


def test_names_are_listed():
    assert {"Nim-v0", "Wordle-v0"} <= set(TextArenaConfig.list_names())
    assert "FrozenLake-v1" in GymnasiumConfig.list_names()


async def test_a_frozen_lake_is_shown_and_crossed(tmp_path):
    way = ["I go down.", "Down", "RIGHT", "right", "Not left but down", "right"]
    lake = {"_type": "gymnasium", "name": "FrozenLake-v1", "size": 3, "arguments": {"is_slippery": False}}
    [record, *_] = await play(tmp_path, lake, lambda request: way[len(request.messages) // 2])
    assert record.outcome is Outcome.OK
    first, second = (call.request.messages[-1]["content"] for call in record.calls[:2])
    assert first.endswith("Reply with one word: left, down, right, up.\n\nPFFF\nFHFH\nFFFH\nHFFG")
    assert second == "SFFF\nPHFH\nFFFH\nHFFG"
    assert rewards(record) == [0.0] * 5 + [1.0]


async def test_a_reply_without_an_action_is_the_policys_failure(tmp_path):
    lake = {"_type": "gymnasium", "name": "FrozenLake-v1"}
    [record, *_] = await play(tmp_path, lake, lambda request: "forward")
    assert record.outcome is Outcome.POLICY_ERROR
    assert "names none of left, down, right, up" in record.reason


async def test_functions_of_the_user_play_any_other_environment(tmp_path):
    functions = "def observe(state):\n    return f'{len(state)} numbers'\n\n\ndef act(text):\n    return int(text)\n"
    (tmp_path / "poles.py").write_text(functions)
    poles = {"_type": "gymnasium", "name": "CartPole-v1", "observe": "poles:observe", "act": "poles:act"}
    good, *_ = await play(tmp_path, poles, lambda request: "1")
    assert good.calls[0].request.messages[0]["content"] == "4 numbers"
    assert sum(rewards(good)) == len(good.calls) > 7
    for reply in ("one", "2"):
        bad, *_ = await play(tmp_path, poles, lambda request, reply=reply: reply)
        assert bad.outcome is Outcome.POLICY_ERROR
