"""The replies that one episode's clients were sent, so that a request that is sent again is not sampled again.

A client sends a request again when the response did not reach it in time: `x-stainless-retry-count` (of the official
clients of OpenAI and Anthropic) or an `idempotency-key` says so. An agent may also ask the same thing twice on purpose,
which is two calls; so a request that is no retry is always sampled.

    "2 + 2?"               sampled, reply A
    "2 + 2?"               sampled, reply B (the agent asks twice)
    "2 + 2?", retry 1      the reply that did not reach its client, A or B; it is not sampled
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from reinforge.dialects.chat_call import BadRequest
from reinforge.rollout.http.exchange import EndpointRequest, EndpointResponse

RETRY_COUNT, IDEMPOTENCY_KEY = "x-stainless-retry-count", "idempotency-key"
MAX_REPLIES = 256
"""Most replies of one episode that are kept for retries."""
MAX_REPLY_BYTES = 1 << 22
"""Most bytes of them; the latest one is kept in any case."""


@dataclass(slots=True, eq=False)
class SentReply:
    """A request that is being answered, or was.

    Attributes:
        key: The idempotency key, or an empty text.
        num_retries: The highest retry count that was answered with it.
        is_delivered: True once the response was written to a client that still listened.
    """

    digest: bytes
    response: asyncio.Future[EndpointResponse]
    key: str = ""
    num_retries: int = 0
    is_delivered: bool = False

    @property
    def num_bytes(self) -> int:
        response = self.response
        if not response.done() or response.cancelled() or response.exception() is not None:
            return 0
        body = response.result().body
        return len(body) if isinstance(body, bytes) else 0

    @property
    def has_failed(self) -> bool:
        """True if it was answered with an error, so that nothing was sampled."""
        response = self.response
        if not response.done():
            return False
        return response.cancelled() or response.exception() is not None or response.result().status >= 400


@dataclass(slots=True)
class SentReplies:
    """The latest replies of one episode, and the requests that are being answered."""

    _replies: deque[SentReply] = field(default_factory=deque)
    _num_bytes: int = 0

    def add(self, reply: SentReply) -> None:
        """Keeps a reply; once it is there, the oldest ones are dropped if there are too many."""
        self._replies.append(reply)
        reply.response.add_done_callback(lambda _: self._trim(reply))

    def _trim(self, reply: SentReply) -> None:
        self._num_bytes += reply.num_bytes
        while len(self._replies) > 1 and (len(self._replies) > MAX_REPLIES or self._num_bytes > MAX_REPLY_BYTES):
            oldest = next(each for each in self._replies if each.response.done())
            if oldest is reply:
                return
            self._replies.remove(oldest)
            self._num_bytes -= oldest.num_bytes

    def find(self, digest: bytes, headers: Mapping[str, str]) -> SentReply | None:
        """Returns the reply to the request that this one repeats; None: it repeats none.

        Raises:
            BadRequest: Its idempotency key belongs to another request.
        """
        if key := headers.get(IDEMPOTENCY_KEY, ""):
            found = next((each for each in self._replies if each.key == key and not each.has_failed), None)
            if found is not None and found.digest != digest:
                message = f"the {IDEMPOTENCY_KEY} of this request belongs to another request; use a new one"
                raise BadRequest(message, status=409, code="idempotency_key_reused")
            return found
        count = read_retry_count(headers)
        if not count:
            return None
        same = [each for each in self._replies if each.digest == digest and not each.key and not each.has_failed]
        unclaimed = [each for each in reversed(same) if each.num_retries < count]  # the latest first
        found = next((each for each in unclaimed if not each.is_delivered), next(iter(unclaimed), None))
        if found is not None:
            found.num_retries = count
        return found


def read_retry_count(headers: Mapping[str, str]) -> int:
    text = headers.get(RETRY_COUNT, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0


def hash_request(request: EndpointRequest) -> bytes:
    return hashlib.blake2b(request.body, digest_size=16, key=request.path.encode()[:64]).digest()
