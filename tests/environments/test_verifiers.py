"""Environments of verifiers, with stand-ins for both of its interfaces; `make clients` runs the real packages."""

import re
import shutil
import sys
import venv
from pathlib import Path

import pytest
import yaml

from reinforge.config.loader import build_config
from reinforge.environments.verifiers import VerifiersConfig
from reinforge.errors import ConfigError
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.environments import playing
from tests.environments.playing import report
from tests.episodes import make_runner, run_items
from tests.generated import DOCS

HERE = Path(__file__).parent
CLASSIC, TASKS = "classic", "tasks"


@pytest.fixture(scope="module")
def interpreters(tmp_path_factory):
    """Interpreters of virtual environments with a stand-in each, and nothing else."""
    found = {}
    for name in (CLASSIC, TASKS):
        folder = tmp_path_factory.mktemp(name)
        venv.create(folder, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "standin.pth").write_text(str(HERE / "standins" / f"verifiers_{name}"))
        found[name] = str(folder / "bin" / "python")
    return found


def opened(folder, python, name="verifiers_env", workflow=None, **settings):
    for module in ("verifiers_env.py", "verifiers_taskset.py"):
        shutil.copy(HERE / module, folder)
    block = {"_type": "verifiers", "name": name, "python": python, "num_workers": 1, **settings}
    return playing.opened(folder, environment=block, **({"workflow": workflow} if workflow else {}))


async def play(folder, python, script=lambda request: "six", **settings):
    """Plays each task once, all at the same time."""
    policy = ScriptedPolicy(script)
    async with opened(folder, python, **settings) as (agent, items):
        return await run_items(make_runner(agent, policy, timeout_s=60), items), policy


async def test_the_package_plays_the_turns_of_a_game_with_the_policy(tmp_path, interpreters):
    arguments = {"questions": ["plain"], "turns_to_play": 2}
    answers = iter(["six", "no"])
    [record], policy = await play(tmp_path, interpreters[CLASSIC], lambda _: next(answers), arguments=arguments)
    assert record.outcome is Outcome.OK
    assert [call.request.messages[-1]["content"] for call in record.calls] == ["plain", "Again."]
    assert report(record) == {"reward": 2.5, "turns": 2.0, "num_steps": 1.0}, "the metric `reward` is not the reward"
    assert policy.requests[0].sampling.max_tokens == 256
    assert (record.item.expected_output_obj, record.item.output_obj) == ("six", "no")


@pytest.mark.slow
async def test_a_taskset_is_played_with_a_chat_of_ours(tmp_path, interpreters):
    settings = {"name": "verifiers_taskset", "arguments": {"taskset": {"turns": 2}}, "size": 3}
    async with opened(tmp_path, interpreters[TASKS], **settings) as (agent, items):
        records = await run_items(make_runner(agent, ScriptedPolicy(lambda _: "six"), timeout_s=60), items)
        lost = await run_items(make_runner(agent, ScriptedPolicy(lambda _: RuntimeError("lost"))), items)
    assert [report(record) for record in records] == [{"reward": 1.0, "turns": 2.0, "num_steps": 1.0}] * 3
    asked = [(message["role"], message["content"]) for message in records[0].calls[1].request.messages]
    assert asked == [("system", "Be short."), ("assistant", "six")]
    assert [record.item.input_obj for record in records] == ["Say one.", "Say two.", "Say three."]
    assert {record.outcome for record in lost} == {Outcome.TOOL_ERROR}
    assert "ProviderError" in lost[0].reason, "an error of a harness is one of the episode"


FAILURES = {
    "hang": ("six", Outcome.TOOL_ERROR, "not finished after 1.5 s (step_timeout_s)"),
    "broken": ("six", Outcome.TOOL_ERROR, "the reward function fails"),
    "quiet": ("", Outcome.POLICY_ERROR, "the reply is empty"),
    "lost": (RuntimeError("lost"), Outcome.TOOL_ERROR, "ModelError"),
    "meet": ("six", Outcome.OK, ""),
    "meet too": ("six", Outcome.OK, ""),
}


@pytest.mark.slow
async def test_rollouts_run_at_the_same_time_and_one_that_fails_costs_its_own_episode(tmp_path, interpreters):
    def script(request):
        return FAILURES[request.messages[0]["content"]][0]

    settings = {"arguments": {"questions": [*FAILURES]}, "step_timeout_s": 1.5}
    records, _ = await play(tmp_path, interpreters[CLASSIC], script, **settings)
    for record, (_, outcome, reason) in zip(records, FAILURES.values(), strict=True):
        assert (record.outcome, reason in (record.reason or "")) == (outcome, True), record.reason


@pytest.mark.slow
@pytest.mark.parametrize("end", ["die", pytest.param("block", marks=pytest.mark.slow)])
async def test_a_process_that_dies_or_is_blocked_is_replaced(tmp_path, interpreters, end):
    settings = {"arguments": {"questions": [end, "plain"]}, "step_timeout_s": 1}
    async with opened(tmp_path, interpreters[CLASSIC], **settings) as (agent, items):
        runner = make_runner(agent, ScriptedPolicy(lambda _: "six"))
        records = [(await run_items(runner, [item]))[0] for item in items]
    assert [record.outcome for record in records] == [Outcome.TOOL_ERROR, Outcome.OK]


REFUSED = [
    (
        CLASSIC,
        {"name": "nothing"},
        "environment.name: verifiers cannot load nothing: ValueError: no module nothing; ModuleNotFoundError",
    ),
    (CLASSIC, {"arguments": {"compares": True}}, "environment.name: the rubric of verifiers_env compares rollouts"),
    pytest.param(
        TASKS,
        {"name": "verifiers_taskset", "arguments": {"user": {}}},
        "the policy would play agent, user",
        marks=pytest.mark.slow,
    ),
    (None, {}, "environment.python: the package verifiers is not installed in"),
    ("nowhere/python", {}, "environment.python: there is no interpreter"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("python", "settings", "message"), REFUSED)
async def test_what_cannot_be_played_is_refused_before_work_starts(tmp_path, interpreters, python, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        await opened(tmp_path, interpreters.get(python, python), **settings).__aenter__()


@pytest.mark.slow
async def test_another_workflow_is_told_that_the_package_plays(tmp_path, interpreters):
    [record], _ = await play(tmp_path, interpreters[CLASSIC], workflow={"_type": "environment"})
    assert "it needs `workflow: {_type: verifiers}`" in record.reason


def test_the_configurations_of_the_page_are_read():
    text = (DOCS / "environments/verifiers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        assert build_config(yaml.safe_load(block)).types["workflow",] == "verifiers"
    assert len(blocks) == 2
    assert VerifiersConfig.install.splitlines()[0] in text


def test_the_interpreter_of_the_run_is_the_default(tmp_path):
    assert VerifiersConfig(name="x").find_interpreter(tmp_path) == sys.executable
