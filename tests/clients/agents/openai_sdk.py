"""The `openai` package alone: chat completions, sync; streamed by its helper that joins the chunks."""

import json

import openai

from tests.clients.tools import LOOKUP, lookup


def answer(question, connection, *, stream):
    client = openai.OpenAI(**connection.openai)
    messages = [{"role": "user", "content": question}]
    while True:
        message = ask(client, messages, stream)
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = lookup(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def ask(client, messages, stream):
    if not stream:
        return client.chat.completions.create(model="agent", messages=messages, tools=[LOOKUP]).choices[0].message
    opened = (
        client.chat.completions.stream
        if hasattr(client.chat.completions, "stream")
        else client.beta.chat.completions.stream
    )
    with opened(model="agent", messages=messages, tools=[LOOKUP]) as events:
        return events.get_final_completion().choices[0].message
