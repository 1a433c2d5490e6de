"""A policy that calls a calculator, then answers; and agents that know nothing but OpenAI's client."""

import asyncio
import json

from reinforge.types.request import ModelReply, TokenLogprobs
from tests.doubles import ScriptedPolicy, ids_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


class CalculatorPolicy(ScriptedPolicy):
    """Calls `add(a=2, b=3)` once, then answers "The sum is 5." with what the tool returned."""

    async def sample(self, request):
        results = [each["content"] for each in request.messages if each["role"] == "tool"]
        self.script = lambda request: f"The sum is {results[0]}." if results else '<call>{"a": 2, "b": 3}</call>'
        reply = await super().sample(request)
        if results:
            return reply
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        text = tuple(chr(each) for each in reply.tokens.token_ids)
        tokens = TokenLogprobs(reply.tokens.prompt_token_ids, reply.tokens.token_ids, reply.tokens.logprobs, texts=text)
        return ModelReply(message, "tool_calls", tokens, reply.num_prompt_tokens, reply.num_completion_tokens)


CALL_IDS, ANSWER_IDS = ids_of('<call>{"a": 2, "b": 3}</call>'), ids_of("The sum is 5.")


def add(arguments):
    given = json.loads(arguments)
    return str(given["a"] + given["b"])


def solve(client, question, **options):
    messages = [{"role": "user", "content": question}]
    while True:
        reply = client.chat.completions.create(model="agent", messages=messages, tools=TOOLS, **options)
        message = join_chunks(list(reply)) if options.get("stream") else reply.choices[0].message
        messages.append(message)
        if not (calls := read(message, "tool_calls")):
            return read(message, "content")
        messages += [answer(call) for call in calls]


async def async_solve(client, question, **options):
    messages = [{"role": "user", "content": question}]
    while True:
        reply = await client.chat.completions.create(model="agent", messages=messages, tools=TOOLS, **options)
        message = join_chunks([chunk async for chunk in reply]) if options.get("stream") else reply.choices[0].message
        messages.append(message)
        if not (calls := read(message, "tool_calls")):
            return read(message, "content")
        messages += [answer(call) for call in calls]
        await asyncio.sleep(0)


def read(value, name):
    """Returns a field of an object of the client or of a dict."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name)


def answer(call):
    function = read(call, "function")
    return {"role": "tool", "tool_call_id": read(call, "id"), "content": add(read(function, "arguments"))}


def join_chunks(chunks):
    """Returns the message that a stream's chunks make, as an agent joins them."""
    message = {"role": "assistant", "content": None}
    calls = {}
    for delta in (choice.delta for chunk in chunks for choice in chunk.choices):
        if delta.content:
            message["content"] = (message["content"] or "") + delta.content
        for part in delta.tool_calls or ():
            call = calls.setdefault(
                part.index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = part.id or call["id"]
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message
