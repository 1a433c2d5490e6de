"""What every HTTP dialect becomes: the arguments of one call of `llm.chat.completions.create`.

A dialect is a module with three functions from data to data, each without input or output of its own:

    read_request(body)              -> ChatCall       what the client asked for
    write_answer(completion, call)  -> dict           the JSON body of the response
    open_events(call, head)         -> EventWriter    the server-sent events: .write(delta) for each piece of a reply
                                                      that is being sampled, .finish(completion) for the rest
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from reinforge.types.request import ReplyDelta


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One model call that a client asked for."""

    arguments: dict[str, Any]  # arguments of `llm.chat.completions.create`, without `model` and `stream`
    model: str
    stream: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # for writing the response, such as `include_usage`
    ignored: tuple[str, ...] = ()  # fields that change no token, or that nothing here can use
    dropped: tuple[str, ...] = ()  # types of tools that only a vendor's server could run


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What is known of a completion before its reply is finished."""

    call_id: str
    model: str
    created: int
    prompt_token_ids: Sequence[int] = ()
    model_version: int | None = None

    def build_completion(self) -> dict[str, Any]:
        """Returns the completion as far as it is known: without text and tokens of its reply."""
        choice = {"message": {"role": "assistant", "content": None}, "finish_reason": "stop", "logprobs": None}
        count = len(self.prompt_token_ids)
        usage = {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
        head = {"id": self.call_id, "created": self.created, "model": self.model, "model_version": self.model_version}
        return {**head, "choices": [{"index": 0, **choice}], "usage": usage}


class EventWriter(Protocol):
    """Writes the server-sent events of one response while its replies are sampled."""

    def write(self, delta: ReplyDelta) -> bytes:
        """Returns the events of one piece; no bytes if there is nothing to send yet."""

    def finish(self, completion: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the remaining events, of what no piece had yet."""


class BadRequest(Exception):
    """A request that cannot be answered, and why.

    Attributes:
        code: A machine-readable name of the error, as OpenAI's.
    """

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


DONE = b"data: [DONE]\n\n"  # the last event of OpenAI's chat and text completions
_PIECE = re.compile(r"\s*\S{1,24}|\s+")


def encode_event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    r"""Returns one server-sent event.

    Example: `encode_event({"a": 1}, "ping")` -> `b'event: ping\ndata: {"a":1}\n\n'`.
    """
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def split_text(text: str) -> Iterator[str]:
    """Yields a text in pieces of about a word each, which joined are the text.

    Example: "a reply of five words" -> "a", " reply", " of", " five", " words".
    """
    return (found[0] for found in _PIECE.finditer(text))


def find_rest(whole: str | None, sent: str) -> str:
    """Returns the part of a finished text that was not sent yet.

    White space at the beginning counts for nothing, since a reply with calls is sent without it.

    Example: `find_rest("Hello", "Hel")` -> "lo"; `find_rest("Hello", " Hel")` -> "lo".
    """
    whole = whole or ""
    if whole.startswith(sent):
        return whole[len(sent) :]
    whole, sent = whole.lstrip(), sent.lstrip()
    return whole[len(sent) :] if whole.startswith(sent) else ""
