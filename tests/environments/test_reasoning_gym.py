"""reasoning-gym by name, on a stand-in with the package's layout; `make clients` has the package itself."""

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest

from reinforge.config.loader import build_config, load_config
from reinforge.environments import reasoning_gym
from reinforge.environments.reasoning_gym import find_answer
from reinforge.errors import BudgetReached, ConfigError
from reinforge.evaluation.splits import take_transfer
from reinforge.evaluation.statistics import t_quantile
from reinforge.registry import REGISTRY
from reinforge.runs.journal.reader import JournalReader
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.trainer.setup.further_sets import compare_tasks
from reinforge.types.evaluation import EvaluationReport
from tests.doubles import ScriptedPolicy
from tests.episodes import make_runner, run_items
from tests.generated import ROOT
from tests.scripted_run import ScriptedRun

STANDINS = str(Path(__file__).with_name("standins"))


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """The stand-in is the package, here and in the workers, which get this process's path."""
    monkeypatch.syspath_prepend(STANDINS)
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    reasoning_gym.find_datasets.cache_clear()
    yield
    reasoning_gym.find_datasets.cache_clear()


async def load(block):
    async with ComponentBuilder(build_config({"environment": block})) as builder:
        return await builder.get_workflow(), (await builder.get_dataset()).load()


def gym(**settings):
    return {"_type": "reasoning_gym", "name": "sums", **settings}


async def test_the_tasks_are_rows_with_their_template_and_no_question_twice():
    _, items = await load(gym(size=6))
    assert [item.input_obj for item in items] == [f"{left} + 1?" for left in range(6)]
    row = items[4].full_dataset_entry
    assert row["id"] == "sums-00004"
    assert row["answer"] == "5"
    assert row["template"] == "sums-1"
    assert row["metadata"] == {"pair": [4, 1]}
    assert len((await load(gym(size=50)))[1]) == 9


async def test_a_dataset_in_a_folder_of_its_own_is_found():
    _, items = await load(gym(name="doubles", size=3))
    assert [item.expected_output_obj for item in items] == ["0", "2", "4"]
    assert reasoning_gym.find_datasets()["doubles"] == "reasoning_gym.arithmetic.deep.doubles"


async def test_the_packages_own_score_is_the_reward():
    replies = {"0 + 1?": "It is 0 + 1 = 1.", "1 + 1?": "3", "2 + 1?": "<answer>3</answer> not 4"}
    async with ComponentBuilder(build_config({"environment": gym(size=3)})) as builder:
        items = (await builder.get_dataset()).load()
        policy = ScriptedPolicy(lambda request: replies[request.messages[0]["content"].partition("\n")[0]])
        records = await run_items(make_runner(await builder.get_workflow(), policy), items)
    rewards = [next(m.data["reported_reward"] for m in record.marks if m.data) for record in records]
    assert [(each["reward"], each["solved"]) for each in rewards] == [(1.0, 1.0), (0.01, 0.0), (1.0, 1.0)]


async def test_an_answer_that_the_scorer_cannot_read_is_wrong_and_a_scorer_that_never_works_is_reported():
    async with ComponentBuilder(build_config({"environment": gym(size=5)})) as builder:
        items = (await builder.get_dataset()).load()
        policy = ScriptedPolicy(lambda request: "<answer>unreadable</answer>")
        records = await run_items(make_runner(await builder.get_workflow(), policy), items)
    rewards = [next((m.data["reported_reward"] for m in record.marks if m.data), None) for record in records]
    assert [each and each["reward"] for each in rewards] == [0.0] * 4 + [None]
    assert "not a number" in records[4].reason


async def test_a_level_has_the_settings_of_the_packages_curriculum():
    _, items = await load(gym(size=60, levels=3, transfer=["differences"], transfer_size=2))
    rows = [item.full_dataset_entry for item in items]
    assert [row["id"] for row in rows[19:21]] == ["sums-0-00019", "sums-1-00020"]  # no question twice
    assert [(row.get("level"), row["answer"]) for row in rows[::20]] == [(0, "1"), (1, "21"), (2, "41"), (None, "0")]


def test_the_files_of_the_page_are_valid_and_levels_are_a_curriculum_by_default(tmp_path):
    text = (ROOT / "docs/environments/reasoning_gym.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    curricula = []
    for block in [*blocks, "environment: {_type: reasoning_gym, name: gcd, levels: 2}"]:
        (tmp_path / "run.yml").write_text(block)
        curricula.append(load_config(tmp_path / "run.yml").config.finetuning.curriculum_learning)
    assert [each.levels and each.levels.threshold for each in curricula] == [None, 0.7, 0.7]


@pytest.mark.parametrize(
    ("finetuning", "message"),
    [
        ({}, "no training row has a `level`"),
        ({"limits": {"max_staleness": 1}}, "an epoch that is collected early"),
    ],
)
async def test_levels_that_cannot_be_a_curriculum_are_refused(tmp_path, finetuning, message):
    run = ScriptedRun(tmp_path)
    run.settings["finetuning"] |= {"curriculum_learning": {"levels": {}}, **finetuning}
    with pytest.raises(ConfigError, match=message):
        await run.run()


def climb(folder, **limits):
    """A run whose policy gives the right answer to three of four sums of level 0, and to one of four of the others."""

    def answer(request):
        left = int(request.messages[0]["content"].split()[0])
        rights = 3 if left < 20 else 1
        return str(left + (1 if request.sampling.seed % 4 < rights else 0))

    run = ScriptedRun(folder, script=answer)
    run.settings["environment"] = gym(size=60, levels=3)
    del run.settings["workflow"], run.settings["eval"]
    run.settings["trajectory_builders"]["builder"] |= {"examples_per_epoch": 8}
    run.settings["finetuning"] |= {
        "curriculum_learning": {"levels": {"threshold": 0.6}},
        "gate": {"allow_no_verdict": True, "metric": "reward"},
        "limits": {"max_refills": 0, **limits},
        "num_epochs": 6,
    }
    return run


def read_levels(folder):
    history = json.loads((folder / "r" / "reward_history.json").read_text())
    state = json.loads((folder / "r" / "curriculum_state.json").read_text())
    return [(row["level"], row["avg_reward"]) for row in history], state["level"], state["level_rewards"]


async def test_the_level_rises_with_the_training_reward_and_a_resumed_run_gives_the_same(tmp_path):
    await climb(tmp_path / "whole").run()
    history, level, rewards = read_levels(tmp_path / "whole")
    assert [level for level, _ in history] == [0, 0, 1, 1, 1, 1]  # two epochs are a window
    assert (level, len(rewards)) == (1, 2)
    assert sum(rewards) / 2 < 0.6 < history[0][1]
    played = [key.split("/") for key in JournalReader(tmp_path / "whole" / "r").episode_keys(1000, None, None)]
    levels = {(int(epoch), example.split("-")[1]) for phase, epoch, _, example, _ in played if phase == "collect"}
    assert levels == {(epoch, "0") for epoch in range(6)} | {(epoch, "1") for epoch in range(2, 6)}
    run, summary, options, num_calls = climb(tmp_path / "parts", max_tokens=150), None, {}, 0
    while summary is None:
        num_calls += 1
        with contextlib.suppress(BudgetReached):
            summary = await run.run(**options)
        options = {"resume": tmp_path / "parts" / "r"}
    assert 2 < num_calls < 9
    assert read_levels(tmp_path / "parts") == (history, level, rewards)


@pytest.mark.parametrize(
    ("text", "expected", "kind", "answer"),
    [
        ("3 + 4 = 7, so 7.", "7", "auto", "7"),
        ("Sure!\n\nAnswer: nus.", "nus", "auto", "nus"),
        ("The answer is nus", "sun", "auto", "nus"),
        ("<answer> nus </answer> I hope", "nus", "auto", "nus"),
        ("1,024 or 7", "5", "auto", "7"),
        ("nothing", "5", "auto", None),
        ("nothing", "x", "tag", None),
        ("two\nlines", "x", "reply", "two\nlines"),
    ],
)
def test_the_answer_is_found_in_a_reply(text, expected, kind, answer):
    assert find_answer(text, expected, kind) == answer


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (gym(name="sumz"), 'no dataset "sumz", did you mean "sums"'),
        (gym(name="needs"), "needs the package a_package_that_is_not_here"),
        (gym(config={"largst": 3}), "sums refuses its settings"),
        (gym(levels=4), "environment.levels: the dataset sums of reasoning-gym has 3 levels"),
        (
            gym(name="differences", levels=2),
            "environment.levels: the dataset differences of reasoning-gym has no levels",
        ),
    ],
)
async def test_what_cannot_be_loaded_is_named_before_any_work(block, message):
    with pytest.raises(ConfigError, match=message) as caught:
        await load(block)
    assert all(problem.path.startswith("environment.") for problem in caught.value.problems)


def test_its_names_are_listed_without_importing_it():
    assert REGISTRY.get("environment", "reasoning_gym").config_type.list_names() == [
        "differences",
        "doubles",
        "needs",
        "sums",
    ]
    assert "reasoning_gym" not in sys.modules


async def test_tasks_for_transfer_are_in_no_split_that_trains_or_selects(tmp_path):
    _, items = await load(gym(size=9, transfer=["differences"], transfer_size=4))
    rest, transfer = take_transfer(items)
    assert [item.full_dataset_entry["task"] for item in transfer] == ["differences"] * 4
    run = ScriptedRun(tmp_path, script=lambda request: f"{request.sampling.seed % 4}")
    run.settings["environment"] = gym(size=9, transfer=["differences"], transfer_size=4)
    del run.settings["workflow"], run.settings["eval"]
    run.settings["finetuning"] |= {"gate": {"allow_no_verdict": True, "metric": "reward"}, "num_epochs": 1}
    await run.run()
    played = JournalReader(tmp_path / "r").episode_keys(1000, None, None)
    assert len(played) > 20
    assert not [key for key in played if "differences" in key]
    assert len(rest) == 9


def test_the_change_of_each_task_has_an_interval_for_all_of_them_together():
    tasks = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "b2": "b"}
    before = report({"a1": 0.0, "a2": 0.0, "a3": 1.0, "b1": 1.0, "b2": 0.5})
    after = report({"a1": 1.0, "a2": 0.0, "a3": 1.0, "b1": 0.5, "b2": 0.0})
    found = compare_tasks("solved", before, after, tasks)
    assert list(found) == ["a", "b"]
    assert found["a"].mean_difference == pytest.approx(1 / 3)
    assert found["b"].mean_difference == -0.5
    half = 1 / 3 * t_quantile(2, 0.975)  # differences 1, 0, 0: s / sqrt(n) = 1 / 3; two tasks share the 5 %
    assert found["a"].ci_high == pytest.approx(1 / 3 + half)


def report(scores):
    return EvaluationReport("transfer", 0, {"solved": scores}, len(scores), {"ok": len(scores)}, "solved")
