"""The `openai` package's Responses API, async."""

import json

import openai

from tests.clients.tools import LOOKUP, lookup

TOOL = {"type": "function", **LOOKUP["function"]}


async def answer(question, connection, *, stream):
    client = openai.AsyncOpenAI(**connection.async_openai)
    items = [{"role": "user", "content": question}]
    while True:
        response = await ask(client, items, stream)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            result = lookup(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


async def ask(client, items, stream):
    if not stream:
        return await client.responses.create(model="agent", input=items, tools=[TOOL])
    async with client.responses.stream(model="agent", input=items, tools=[TOOL]) as events:
        return await events.get_final_response()
