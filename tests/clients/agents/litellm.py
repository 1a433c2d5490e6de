"""LiteLLM's function calling, as its documentation has it; its `openai` provider reads the environment."""

import json
import os
import sys

import litellm

STREAM = os.environ["REINFORGE_EXAMPLE_ID"].endswith("streamed")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Returns the price of an article.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
]


def lookup(item):
    return f"The {item} costs 24 coins."


def ask(messages):
    response = litellm.completion("openai/gpt-4o", messages, tools=TOOLS, tool_choice="auto", stream=STREAM)
    return (litellm.stream_chunk_builder(list(response), messages) if STREAM else response).choices[0].message


messages = [{"role": "user", "content": sys.stdin.read()}]
while (message := ask(messages)).tool_calls:
    messages.append(message)
    for call in message.tool_calls:
        result = lookup(**json.loads(call.function.arguments))
        messages.append({"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": result})
sys.stdout.write(message.content)
