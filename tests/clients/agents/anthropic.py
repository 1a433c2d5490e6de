"""The `anthropic` package: /v1/messages."""

import anthropic

from tests.clients.tools import LOOKUP, lookup

TOOL = {"name": "lookup", "input_schema": LOOKUP["function"]["parameters"]}


def answer(question, connection, *, stream):
    url = connection.base_url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=url, api_key=connection.api_key, http_client=connection.http_client)
    messages = [{"role": "user", "content": question}]
    while True:
        reply = ask(client, messages, stream)
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return reply.content[0].text
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": lookup(**call.input)} for call in calls]
        messages.append({"role": "user", "content": results})


def ask(client, messages, stream):
    request = {"model": "agent", "max_tokens": 100, "messages": messages, "tools": [TOOL]}
    if not stream:
        return client.messages.create(**request)
    with client.messages.stream(**request) as events:
        return events.get_final_message()
