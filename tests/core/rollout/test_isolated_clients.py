"""Clients of agents in worker processes: the same episodes as in this process."""

import textwrap

import pytest

from reinforge.errors import BackendUnavailable, ContextOverflow
from reinforge.rollout.isolation.isolated_agent import open_isolated
from reinforge.types.trajectory import Outcome
from tests.calculator import ANSWER_IDS, CALL_IDS, CalculatorPolicy
from tests.doubles import examples
from tests.episodes import collect, make_evaluation, make_runner

AGENTS = """
import asyncio
import openai
import reinforge
from tests.calculator import async_solve, solve

current = reinforge.current_openai()
kept = []

def agent(item, llm, context):
    if item.input_obj == "streams":
        return [solve(context.openai(), "2+3?", stream=stream) for stream in (False, True)]
    if item.input_obj == "loop":
        return [asyncio.run(async_solve(context.async_openai(), "2+3?")), solve(current, "2+3?")]
    if item.input_obj == "keep":
        kept.append(context.openai())
    client = kept[0] if item.input_obj == "outlive" else current
    try:
        return solve(client, item.input_obj, temperature="hot" if item.input_obj == "hot" else 1)
    except openai.APIStatusError as error:
        if item.input_obj.startswith("raise"):
            raise
        return [error.status_code, error.body["message"], error.param, error.code]

async def coroutine(item, llm, context):
    client = reinforge.current_async_openai()
    return [await async_solve(client, item.input_obj, stream=stream) for stream in (False, True)]
"""

LONG, LOST = ContextOverflow("too long"), BackendUnavailable("no answer")
ERRORS = {"overflow": LONG, "lost": LOST, "raise overflow": LONG, "raise lost": LOST}


class FailingCalculator(CalculatorPolicy):
    """Fails in the episodes whose question has an error."""

    async def sample(self, request):
        if (error := ERRORS.get(request.messages[0]["content"])) is not None:
            raise error
        return await super().sample(request)


async def run(folder, agent, *kinds):
    """Runs an episode for each kind, one after the other, in one process."""
    (folder / "agents.py").write_text(textwrap.dedent(AGENTS))
    items = examples(len(kinds))
    for item, kind in zip(items, kinds, strict=True):
        item.input_obj = kind
    async with open_isolated(f"agents:{agent}", folder, None, share_environment_seed=True) as workflow:
        records = await collect(make_evaluation(make_runner(workflow, FailingCalculator(), concurrency=1), items))
        assert len(workflow.pool.workers) == 1
    return records


@pytest.mark.slow
async def test_an_agent_in_a_process_is_recorded_token_by_token_and_its_calls_fail_as_in_this_one(tmp_path):
    kinds = ["streams", "loop", "overflow", "lost", "hot", "raise overflow", "raise lost", "keep", "outlive"]
    streams, loop, overflow, lost, hot, *raised, keep, outlive = await run(tmp_path, "agent", *kinds)
    for record in (streams, loop):
        assert (record.outcome, record.item.output_obj) == (Outcome.OK, ["The sum is 5."] * 2), record.reason
        assert [call.reply.tokens.token_ids for call in record.calls] == [CALL_IDS, ANSWER_IDS] * 2
    assert overflow.item.output_obj[:2] == [400, "too long"]
    assert lost.item.output_obj[:2] == [503, "no answer"]
    assert (hot.item.output_obj[0], hot.item.output_obj[2]) == (400, "temperature")
    assert (hot.outcome, "a model call was refused" in hot.reason) == (Outcome.TOOL_ERROR, True)
    assert [record.outcome for record in raised] == [Outcome.CONTEXT_OVERFLOW, Outcome.BACKEND_ERROR]
    assert keep.item.output_obj == "The sum is 5."
    assert (outlive.item.output_obj[0], outlive.item.output_obj[3]) == (410, "episode_ended"), "of an earlier episode"
    assert outlive.calls == []


@pytest.mark.slow
async def test_a_coroutine_in_a_process_is_recorded_token_by_token(tmp_path):
    [record] = await run(tmp_path, "coroutine", "2+3?")
    assert (record.outcome, record.item.output_obj) == (Outcome.OK, ["The sum is 5."] * 2), record.reason
    assert [call.reply.tokens.token_ids for call in record.calls] == [CALL_IDS, ANSWER_IDS] * 2
