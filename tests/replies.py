"""Chat completions written by hand, for the dialects that write them in other forms."""

import json

from reinforge.types.request import TokenLogprobs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"id": "call-7-0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOKENS = TokenLogprobs((5, 6, 7), (1, 2), (-0.5, -0.25), texts=("Let me ", "add."))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def completes(content="Let me add.", *, reason="stop", logprobs=TOKENS, **message):
    """Returns a completion with one choice; keywords add to its message."""
    return {
        "id": "call-7",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **message},
                "finish_reason": reason,
                "logprobs": logprobs,
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


CALLING = completes(reason="tool_calls", reasoning_content="Hm, two.", tool_calls=[ADD])
"""A reply that thinks, says something and calls a function."""


REPLIES = [
    {"content": "a"},
    {"content": "", "reasoning_content": "b"},
    {"content": None, "tool_calls": [ADD, {**ADD, "id": "call-7-1"}]},
    {"content": " c ", "tool_calls": [ADD]},
    {"content": "d", "reasoning_content": " e\n"},
]
"""Messages that a client sends back as it got them."""


def read_events(stream):
    texts = [event.partition("data: ")[2] for event in b"".join(stream).decode().split("\n\n") if event]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]
