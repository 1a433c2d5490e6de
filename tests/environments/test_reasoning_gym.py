"""reasoning-gym by name, on a stand-in with the package's layout; `make clients` has the package itself."""

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest

from reinforge.config.loader import load_config
from reinforge.environments import reasoning_gym
from reinforge.environments.reasoning_gym import find_answer
from reinforge.errors import BudgetReached, ConfigError
from reinforge.evaluation.splits import take_transfer
from reinforge.evaluation.statistics import t_quantile
from reinforge.registry import REGISTRY
from reinforge.runs.journal.reader import JournalReader
from reinforge.trainer.setup.further_sets import compare_tasks
from reinforge.types.environment import Reply
from reinforge.types.evaluation import EvaluationReport
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.environments.playing import loaded_source, opened, report
from tests.episodes import make_runner, run_items
from tests.generated import ROOT
from tests.scripted_run import ScriptedRun

STANDINS = str(Path(__file__).with_name("standins"))


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """The stand-in is the package, here and in the workers, which get this process's path."""
    monkeypatch.syspath_prepend(STANDINS)
    forget()
    yield
    forget()


def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        del sys.modules[name]
    reasoning_gym.find_datasets.cache_clear()


async def load(folder, block):
    async with loaded_source(folder, environment=block) as (_, source):
        return source.load()


def gym(**settings):
    return {"_type": "reasoning_gym", "name": "sums", "num_workers": 1, **settings}


async def test_the_tasks_are_rows_with_their_template_and_no_question_twice(tmp_path):
    items = await load(tmp_path, gym(size=6))
    assert [item.input_obj for item in items] == [f"{left} + 1?" for left in range(6)]
    row = items[4].full_dataset_entry
    assert row["id"] == "sums-00004"
    assert row["answer"] == "5"
    assert row["template"] == "sums-1"
    assert row["metadata"] == {"pair": [4, 1]}
    assert len(await load(tmp_path, gym(size=50))) == 9


async def test_a_dataset_in_a_folder_of_its_own_is_found(tmp_path):
    items = await load(tmp_path, gym(name="doubles", size=3))
    assert [item.expected_output_obj for item in items] == ["0", "2", "4"]
    assert reasoning_gym.find_datasets()["doubles"] == "reasoning_gym.arithmetic.deep.doubles"


async def test_where_several_answers_are_right_the_example_is_expected_and_the_package_still_decides(tmp_path):
    policy = ScriptedPolicy(lambda request: "ba0" if "ab0" in request.messages[0]["content"] else "ab1")
    async with opened(tmp_path, environment=gym(name="anagrams", size=3)) as (agent, items):
        records = await run_items(make_runner(agent, policy), items)
    assert [item.expected_output_obj for item in items] == ["0ba", "1ba", "2ba"]
    assert [report(record)["reward"] for record in records] == [1.0, 0.0, 0.0]


async def test_the_packages_own_score_is_the_reward(tmp_path):
    replies = {"0 + 1?": "It is 0 + 1 = 1.", "1 + 1?": "3", "2 + 1?": "<answer>3</answer> not 4"}
    policy = ScriptedPolicy(lambda request: replies[request.messages[0]["content"].partition("\n")[0]])
    async with opened(tmp_path, environment=gym(size=3)) as (agent, items):
        records = await run_items(make_runner(agent, policy), items)
    found = [(report(record)["reward"], report(record)["solved"]) for record in records]
    assert found == [(1.0, 1.0), (0.01, 0.0), (1.0, 1.0)]


async def play_orders(folder):
    """Returns the questions and how their episodes end where the first word is replied, with two workers."""
    policy = ScriptedPolicy(lambda request: request.messages[0]["content"].split()[0])
    block = gym(name="orders", size=6, num_workers=2, answer="reply")
    async with opened(folder, environment=block) as (agent, items):
        records = await run_items(make_runner(agent, policy), items)
    return [item.input_obj for item in items], [(each.outcome, (report(each) or {}).get("reward")) for each in records]


@pytest.mark.slow
async def test_a_task_in_the_order_of_a_set_is_the_same_in_every_process(tmp_path):
    questions, found = await play_orders(tmp_path)
    assert found == [(Outcome.OK, 1.0)] * 6
    assert (await play_orders(tmp_path))[0] == questions


@pytest.mark.slow
async def test_without_one_order_of_sets_no_episode_is_scored_by_another_task(tmp_path, monkeypatch, caplog):
    """Mutation check; an episode is played again, perhaps by the worker that knows its task."""
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    questions, found = await play_orders(tmp_path)
    assert {each for each in found if each[0] is Outcome.OK} == {(Outcome.OK, 1.0)}
    assert re.search(
        r"orders-0000\d is not the task that was shown: its dataset depends on more than the seed", caplog.text
    )
    assert (await play_orders(tmp_path))[0] != questions


async def test_an_answer_that_the_scorer_cannot_read_is_wrong_and_a_scorer_that_never_works_is_reported(tmp_path):
    async def answer(item):
        task = source.create()
        await task.reset(item, 0)
        return (await task.step(Reply("<answer>unreadable</answer>"))).reward

    async with loaded_source(tmp_path, environment=gym(size=5)) as (_, source):
        *readable, broken = source.load()
        assert [await answer(item) for item in readable] == [0.0] * 4
        with pytest.raises(ValueError, match="not a number"):
            await answer(broken)


async def test_a_level_has_the_settings_of_the_packages_curriculum(tmp_path):
    items = await load(tmp_path, gym(size=60, levels=3, transfer=["differences"], transfer_size=2))
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


def climb(folder, num_epochs, **limits):
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
        "num_epochs": num_epochs,
    }
    return run


def read_levels(folder):
    history = json.loads((folder / "r" / "reward_history.json").read_text())
    state = json.loads((folder / "r" / "curriculum_state.json").read_text())
    return [(row["level"], row["avg_reward"]) for row in history], state["level"], state["level_rewards"]


def played_levels(folder):
    """Returns the epochs in which each level was trained on."""
    played = [key.split("/") for key in JournalReader(folder / "r").episode_keys(1000, None, None)]
    return {(int(epoch), example.split("-")[1]) for phase, epoch, _, example, _ in played if phase == "collect"}


@pytest.mark.slow
async def test_the_level_rises_with_the_training_reward(tmp_path):
    await climb(tmp_path, 3).run()
    history, level, _ = read_levels(tmp_path)
    assert [level for level, _ in history] == [0, 0, 1], "two epochs are a window"
    assert (level, history[0][1] > 0.6 > history[2][1]) == (1, True)
    assert played_levels(tmp_path) == {(0, "0"), (1, "0"), (2, "0"), (2, "1")}


@pytest.mark.slow
async def test_a_resumed_run_has_the_same_levels(tmp_path):
    await climb(tmp_path / "whole", 6).run()
    history, level, rewards = read_levels(tmp_path / "whole")
    assert [level for level, _ in history] == [0, 0, 1, 1, 1, 1]
    assert (level, len(rewards)) == (1, 2)
    assert sum(rewards) / 2 < 0.6
    run, summary, options, num_calls = climb(tmp_path / "parts", 6, max_tokens=150), None, {}, 0
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
        (gym(levels=4), "levels: the dataset sums of reasoning-gym has 3 levels"),
        (gym(name="differences", levels=2), "levels: the dataset differences of reasoning-gym has no levels"),
    ],
)
async def test_what_cannot_be_loaded_is_named_before_any_work(tmp_path, block, message):
    with pytest.raises(ConfigError, match=message):
        await load(tmp_path, block)


def test_its_names_are_listed_without_importing_it():
    assert REGISTRY.get("environment", "reasoning_gym").config_type.list_names() == [
        "anagrams",
        "differences",
        "doubles",
        "needs",
        "orders",
        "sums",
    ]
    assert "reasoning_gym" not in sys.modules


async def test_tasks_for_transfer_are_in_no_split_that_trains_or_selects(tmp_path):
    items = await load(tmp_path, gym(size=9, transfer=["differences"], transfer_size=4))
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
    before = make_report({"a1": 0.0, "a2": 0.0, "a3": 2.0, "b1": 1.0, "b2": 0.5})
    after = make_report({"a1": 1.0, "a2": 0.0, "a3": 2.0, "b1": 0.5, "b2": 0.0})
    found = compare_tasks("solved", before, after, tasks)
    assert list(found) == ["a", "b"]
    assert found["a"].mean_difference == pytest.approx(1 / 3)
    assert found["b"].mean_difference == -0.5
    half = 1 / 3 * t_quantile(2, 0.975)  # differences 1, 0, 0: s / sqrt(n) = 1 / 3; two tasks share the 5 %
    assert found["a"].ci_high == pytest.approx(1 / 3 + half)


def make_report(scores):
    return EvaluationReport("transfer", 0, {"solved": scores}, len(scores), {"ok": len(scores)}, "solved")
