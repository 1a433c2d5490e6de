"""`workflow.placement`: which agents can be placed, and that a worker builds the same agent from the configuration."""

import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from reinforge.config.loader import build_config, load_config
from reinforge.errors import ConfigError
from reinforge.rollout.isolation.isolated_agent import PlacedWorkflow
from reinforge.tasks.tic_tac_toe import DEMO
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.trainer.setup.placement import dump_settings, find_address
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.episodes import make_runner, run_items
from tests.project import settings

AGENT = """
async def agent(item, llm, context):
    return item.input_obj
"""


FIRST_ONLY = """
import pathlib
if pathlib.Path("imported").exists():
    raise RuntimeError("only once")
pathlib.Path("imported").touch()
"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "placed_task", raising=False)
    Path("placed_task.py").write_text(AGENT)
    found = settings("model")
    found["workflow"] = {"_type": "python", "function": "placed_task:agent", "placement": "processes"}
    return found


def play_legally(request):
    """Answers with one of the squares, chosen by the seed, legal or not."""
    return str(request.sampling.seed % 9 + 1)


async def play(workflow, items):
    return await run_items(make_runner(workflow, ScriptedPolicy(play_legally), seed=3), items, generations=4)


def list_replies(record):
    return [call.reply.message for call in record.calls]


async def test_a_worker_builds_a_registered_agent_from_the_configuration():
    """The demo's agent has no function of the project: the worker finds it by its `_type`, as the run does."""
    items = None
    outcomes = []
    for changes in ([], [("workflow.placement", "processes"), ("workflow.num_processes", "1")]):
        loaded = load_config(DEMO, overrides=changes)
        async with ComponentBuilder(loaded) as builder:
            workflow = await builder.get_workflow()
            items = items or (await builder.get_dataset()).load()[:3]
            records = await play(workflow, items)
            assert isinstance(workflow, PlacedWorkflow) == bool(changes)
            assert workflow is await builder.get_workflow()
        outcomes.append([(each.outcome, each.reason, each.item.output_obj, list_replies(each)) for each in records])
    assert outcomes[0] == outcomes[1]
    assert {Outcome.POLICY_ERROR} <= {outcome for outcome, *_ in outcomes[0]}


async def test_a_configuration_that_is_only_checked_starts_no_process(data):
    async with ComponentBuilder(build_config(data), makes_models=False) as builder:
        workflow = await builder.get_workflow()
        assert (workflow.pool.workers, workflow.source) == ([], "agent (placed_task.py:2)")


@pytest.mark.slow
async def test_an_agent_that_a_worker_cannot_build_is_refused_before_the_run(data):
    """This process is the first in which the module is imported, which it says in a file."""
    Path("placed_task.py").write_text(AGENT + FIRST_ONLY)
    async with ComponentBuilder(build_config(data)) as builder:
        with pytest.raises(ConfigError, match="RuntimeError: only once"):
            await builder.get_workflow()


async def agent(item, llm, context):
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"function": agent}, "workflow.function", "agent is a Python object of this process"),
        ({"isolation": "process"}, "workflow.placement", "cannot be combined"),
    ],
)
async def test_agents_that_cannot_be_placed_are_refused(data, changes, path, message):
    data["workflow"] |= changes
    async with ComponentBuilder(build_config(data), makes_models=False) as builder:
        with pytest.raises(ConfigError, match=message) as raised:
            await builder.get_workflow()
    assert [problem.path for problem in raised.value.problems] == [path]


async def test_a_part_of_an_agent_has_no_placement_of_its_own(data):
    data["functions"] = {"part": {"_type": "python", "function": "placed_task:agent", "placement": "ray"}}
    async with ComponentBuilder(build_config(data), makes_models=False) as builder:
        with pytest.raises(ConfigError, match="a function runs where the agent runs"):
            await builder.get_function("part")


def test_what_other_components_hold_as_objects_is_left_out(data):
    """A reward that is a function of this process is called in this process."""
    data["eval"]["evaluators"]["vowels"]["function"] = lambda output, expected: 1.0
    data["llms"]["judge"] = {"_type": "openai", "model_name": "m", "base_url": "http://j/v1", "api_key": SecretStr("k")}
    dumped = dump_settings(build_config(data))
    assert dumped["eval"]["evaluators"] == {"vowels": {"_type": "python"}}
    assert dumped["llms"]["judge"]["api_key"] == "k"
    assert dumped["workflow"] == {"_type": "python", "function": "placed_task:agent"}


def test_agents_go_to_the_cluster_of_the_trainer_adapter(data):
    assert find_address(build_config(data)) is None
    data["trainer_adapters"]["adapter"] = {"_type": "ray", "address": "127.0.0.1:6379"}
    assert find_address(build_config(data)) == "127.0.0.1:6379"
