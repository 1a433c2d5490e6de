"""How much one server takes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server.

    Attributes:
        max_body_bytes: Longest JSON body of a request.
        body_timeout_s: Seconds in which a request's body must have arrived.
        idle_timeout_s: Seconds after which a connection without a whole request line and headers is closed.
        write_timeout_s: Seconds after which a client that does not read its stream is given up.
        max_in_flight: Most model calls that are answered or wait at a time; further ones get 429.
        max_choices: Most choices (`n`) of one call.
        max_tokens: Most tokens of one reply, whatever the request says; None: up to the context limit.
        retry_after_s: What a refused client is told to wait.
    """

    max_body_bytes: int = 1 << 25
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    max_in_flight: int = 512
    max_choices: int = 128
    max_tokens: int | None = None
    retry_after_s: int = 1
