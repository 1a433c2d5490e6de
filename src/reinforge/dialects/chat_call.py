"""What every HTTP dialect becomes: the arguments of one call of `llm.chat.completions.create`.

A dialect is three functions from data to data, each without input or output of its own:

    read_request(body)              -> ChatCall          what the client asked for
    write_answer(completion, call)  -> dict              the JSON body of the response
    write_events(completion, call)  -> Iterator[bytes]   the server-sent events of a streamed response
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One model call that a client asked for.

    Attributes:
        arguments: Arguments of `llm.chat.completions.create`, without `model` and `stream`.
        model: The name of the model as the client wrote it.
        stream: True if the response is a stream of events.
        options: What only the dialect needs to write the response, such as `include_usage`.
    """

    arguments: dict[str, Any]
    model: str
    stream: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class BadRequest(Exception):
    """A request that cannot be answered, and why.

    Attributes:
        message: What is wrong and what is allowed.
        param: The field of the body.
        status: The HTTP status.
        code: A machine-readable name of the error, as OpenAI's.
    """

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code
