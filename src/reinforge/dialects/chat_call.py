"""What every HTTP dialect becomes: the arguments of one call of `llm.chat.completions.create`.

A dialect is three functions from data to data, each without input or output of its own:

    read_request(body)              -> ChatCall          what the client asked for
    write_answer(completion, call)  -> dict              the JSON body of the response
    write_events(completion, call)  -> Iterator[bytes]   the server-sent events of a finished reply

and one for a reply that is still being sampled:

    open_events(call, head)         -> EventWriter       .write(delta) for each piece, .finish(completion) at the end
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from reinforge.types.request import ReplyDelta


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One model call that a client asked for.

    Attributes:
        arguments: Arguments of `llm.chat.completions.create`, without `model` and `stream`.
        options: What only the dialect needs to write the response, such as `include_usage`.
    """

    arguments: dict[str, Any]
    model: str
    stream: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplyHead:
    call_id: str
    model: str
    created: int
    prompt_token_ids: tuple[int, ...] = ()
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
        """Returns the events of one piece; no bytes if it adds nothing that can be sent yet."""

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
