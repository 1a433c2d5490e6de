"""Whose failure it is when an agent fails on a tool call that cannot be parsed."""

import json

import pytest

from reinforge.types.request import ModelReply
from reinforge.types.trajectory import Outcome
from tests.episodes import collect, make_evaluation, make_runner

BAD = '{"a": ' + "[" * 2000 + "]" * 2000 + "}"


class Caller:
    """A model that comes with parsed tool calls, like a hosted one: each reply calls `add` with the next arguments."""

    model_name = "caller"

    def __init__(self, *arguments, is_policy=True):
        self.arguments, self.is_policy = list(arguments), is_policy

    async def sample(self, request):
        function = {"name": "add", "arguments": self.arguments.pop(0)}
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
        return ModelReply(message, "tool_calls", None, 1, 1, 0 if self.is_policy else None)


async def ask(llm, n=1):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": "go"}], n=n)
    return [json.loads(choice.message.tool_calls[0].function.arguments)["a"] for choice in reply.choices]


async def outcome_of(workflow, model):
    [record] = await collect(make_evaluation(make_runner(workflow, llms={"agent": model})))
    return record.outcome, record.reason, len(record.calls)


async def once(item, llm, context):
    return await ask(llm)


async def test_an_agent_that_fails_on_a_bad_call_of_the_policy_is_the_policys_failure():
    outcome, reason, num_calls = await outcome_of(once, Caller(BAD))
    assert (outcome, num_calls) == (Outcome.POLICY_ERROR, 1), "the call is recorded, so it can be trained against"
    assert reason.startswith(
        "the model wrote arguments of the tool 'add' that cannot be parsed: nested deeper than 64 levels; the agent "
        "then failed: "
    )


async def test_a_model_that_is_not_trained_is_the_environment():
    outcome, reason, _ = await outcome_of(once, Caller(BAD, is_policy=False))
    assert outcome is Outcome.TOOL_ERROR
    assert "the agent then failed" not in reason


async def test_one_bad_choice_of_several_is_enough():
    async def several(item, llm, context):
        return await ask(llm, n=3)

    assert (await outcome_of(several, Caller('{"a": 1}', BAD, '{"a": 2}')))[0] is Outcome.POLICY_ERROR


async def test_an_agent_that_asks_again_has_moved_on():
    async def asks_again(item, llm, context):
        try:
            return await ask(llm)
        except (ValueError, RecursionError):
            await ask(llm)
        raise RuntimeError("the database is down")

    outcome, reason, _ = await outcome_of(asks_again, Caller(BAD, '{"a": 1}'))
    assert (outcome, "the database is down" in reason) == (Outcome.TOOL_ERROR, True)


async def test_an_agent_that_copes_is_no_failure():
    async def copes(item, llm, context):
        try:
            return await ask(llm)
        except (ValueError, RecursionError):
            return "no answer"

    assert (await outcome_of(copes, Caller(BAD)))[0] is Outcome.OK


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a": [[1]]}'])
async def test_an_agents_own_bug_after_a_good_call_is_its_own(arguments):
    async def broken(item, llm, context):
        await ask(llm)
        raise KeyError("its own bug")

    assert (await outcome_of(broken, Caller(arguments)))[0] is Outcome.TOOL_ERROR
