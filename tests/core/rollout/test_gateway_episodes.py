"""Two-turn episodes with a tool, of agents that reach their model through the gateway: recorded token by token."""

import json

import pytest
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI

from reinforge.errors import CaptureError
from tests.calculator import TOOLS, add, async_solve, solve
from tests.core.rollout.test_clients import check_episode, run

FUNCTION = TOOLS[0]["function"]


def solve_by_responses(client, question, *, stream):
    items = [{"role": "user", "content": question}]
    tools = [{"type": "function", **FUNCTION}]
    while True:
        if stream:
            with client.responses.stream(model="agent", input=items, tools=tools) as events:
                response = list(events)[-1].response
        else:
            response = client.responses.create(model="agent", input=items, tools=tools)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": add(call.arguments)} for call in calls
        ]


def solve_by_messages(client, question, *, stream):
    messages = [{"role": "user", "content": question}]
    tools = [{"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}]
    while True:
        asked = {"model": "agent", "max_tokens": 99, "messages": messages, "tools": tools}
        if stream:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return message.content[0].text
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": add(json.dumps(use.input))} for use in uses
        ]
        messages.append({"role": "user", "content": results})


def by_chat(access, question, stream):
    with OpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        return solve(client, question, stream=stream)


def by_responses(access, question, stream):
    with OpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        return solve_by_responses(client, question, stream=stream)


def by_messages(access, question, stream):
    environment = access.environment()
    with Anthropic(base_url=environment["ANTHROPIC_BASE_URL"], api_key=environment["ANTHROPIC_API_KEY"]) as client:
        return solve_by_messages(client, question, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", [by_chat, by_responses, by_messages])
async def test_a_client_of_each_api(answer, stream):
    def agent(item, llm, context):
        with context.gateway() as access:
            return answer(access, item.input_obj, stream)

    for record in await run(agent, count=3):
        check_episode(record)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_a_coroutine(stream):
    async def agent(item, llm, context):
        async with context.gateway() as access, AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
            return await async_solve(client, item.input_obj, stream=stream)

    for record in await run(agent, count=3):
        check_episode(record)


async def test_a_coroutine_that_would_block_the_run_is_told_so():
    async def agent(item, llm, context):
        with pytest.raises(CaptureError, match="async with"), context.gateway():
            pass
        return "told"

    (record,) = await run(agent)
    assert record.item.output_obj == "told"
