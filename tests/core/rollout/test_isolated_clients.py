"""Clients of agents in worker processes: the same episodes as in this process."""

import textwrap

import pytest

from reinforge.errors import BackendUnavailable, ContextOverflow
from reinforge.rollout.isolation.isolated_agent import open_isolated
from reinforge.types.trajectory import Outcome
from tests.calculator import ANSWER_IDS, CALL_IDS, CalculatorPolicy
from tests.doubles import ScriptedPolicy, examples
from tests.episodes import collect, make_evaluation, make_runner

AGENTS = """
import asyncio
import openai
import reinforge
from tests.calculator import async_solve, solve

current = reinforge.current_openai()
kept = []

def plain(item, llm, context):
    return [solve(context.openai(), item.input_obj, stream=stream) for stream in (False, True)]

async def coroutine(item, llm, context):
    client = reinforge.current_async_openai()
    return [await async_solve(client, item.input_obj, stream=stream) for stream in (False, True)]

def loop(item, llm, context):
    return [asyncio.run(async_solve(context.async_openai(), item.input_obj)), solve(current, item.input_obj)]

def fail(item, llm, context):
    try:
        return solve(current, item.input_obj, temperature="hot" if item.id == "1" else 1)
    except openai.APIStatusError as error:
        if item.id == "2":
            raise
        return [error.status_code, error.body["message"], error.param]

def outlive(item, llm, context):
    kept.append(context.openai())
    try:
        return solve(kept[0], item.input_obj)
    except openai.APIStatusError as error:
        return [error.status_code, error.code]
"""


@pytest.fixture
def agents(tmp_path):
    (tmp_path / "agents.py").write_text(textwrap.dedent(AGENTS))
    return tmp_path


async def run(folder, agent, policy, count=1):
    async with open_isolated(f"agents:{agent}", folder, None, share_environment_seed=True) as workflow:
        return await collect(make_evaluation(make_runner(workflow, policy, concurrency=1), examples(count)))


@pytest.mark.parametrize("agent", ["plain", "coroutine", "loop"])
async def test_an_agent_in_a_process_is_recorded_token_by_token(agents, agent):
    [record] = await run(agents, agent, CalculatorPolicy())
    assert (record.outcome, record.item.output_obj) == (Outcome.OK, ["The sum is 5."] * 2), record.reason
    assert [call.reply.tokens.token_ids for call in record.calls] == [CALL_IDS, ANSWER_IDS] * 2


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (ContextOverflow("too long"), 400, Outcome.CONTEXT_OVERFLOW),
        (BackendUnavailable("no answer"), 503, Outcome.BACKEND_ERROR),
    ],
)
async def test_failures_have_the_status_and_the_outcome_of_this_process(agents, error, status, outcome):
    policy = ScriptedPolicy(lambda request: error)
    caught, invalid, raised = await run(agents, "fail", policy, 3)
    assert caught.item.output_obj[:2] == [status, str(error)]
    assert (invalid.item.output_obj[0], invalid.item.output_obj[2]) == (400, "temperature")
    assert (invalid.outcome, "a model call was refused" in invalid.reason) == (Outcome.TOOL_ERROR, True)
    assert raised.outcome is outcome


async def test_a_client_of_an_earlier_episode_of_the_process_reaches_no_later_one(agents):
    first, second = await run(agents, "outlive", CalculatorPolicy(), 2)
    assert first.item.output_obj == "The sum is 5."
    assert second.item.output_obj == [410, "episode_ended"]
    assert second.calls == []
