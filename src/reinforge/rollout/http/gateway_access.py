"""One episode's way through the gateway: its address, its key, its calls in flight, and the replies it was sent."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from reinforge.bounded import encode_any
from reinforge.dialects.chat_call import BadRequest
from reinforge.limits import get_limits
from reinforge.rollout.http.endpoint import EpisodeEndpoint, build_ended
from reinforge.rollout.http.exchange import EndpointRequest, EndpointResponse

KEY_PREFIX = "sk-episode-"
PIECES_AT_ONCE = 256  # events of a stream that are written before other requests get their turn


class GatewayAccess:
    """The base URL and the key with which an episode's programs reach its models; valid inside its `with` block.

    with gateway.attach(context.endpoint) as access:
        subprocess.run(["node", "agent.mjs"], env={**os.environ, **access.environment()})
    """

    def __init__(self, endpoint: EpisodeEndpoint, origin: str, detach: Callable[[GatewayAccess], None]):
        self._endpoint, self._detach = endpoint, detach
        self.episode_id = secrets.token_hex(8)
        self.api_key = KEY_PREFIX + secrets.token_urlsafe(24)
        self.base_url = f"{origin}/episodes/{self.episode_id}/v1"
        self.environment_url = None if endpoint.answer_environment is None else f"{self.base_url[:-3]}/mcp"
        self.slots = asyncio.Semaphore(get_limits().calls_in_flight)
        self.is_closed = False
        self._replies = SentReplies()
        self._tasks: set[asyncio.Task[EndpointResponse]] = set()

    def __enter__(self) -> GatewayAccess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_in_flight(self) -> int:
        return len(self._tasks)

    def environment(self) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "GOOGLE_GEMINI_BASE_URL": self.base_url.removesuffix("/v1"),
            "GEMINI_API_KEY": self.api_key,
            **({} if self.environment_url is None else {"REINFORGE_ENVIRONMENT_URL": self.environment_url}),
        }

    def accepts(self, key: str) -> bool:
        """Returns True for the episode's key; the comparison takes equally long for every wrong one."""
        return hmac.compare_digest(encode_any(key), self.api_key.encode())

    def close(self) -> None:
        """Ends the episode here: calls in flight are cancelled, and their clients are told that it has ended."""
        if self.is_closed:
            return
        self.is_closed = True
        for task in self._tasks:
            task.cancel()
        self._replies = SentReplies()
        self._detach(self)

    async def wait_closed(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def answer(self, request: EndpointRequest) -> tuple[EndpointResponse, SentReply]:
        """Answers a request; one that repeats an earlier request gets the same response, and nothing is sampled.

        The answer does not depend on the client: once sampled, a call is recorded, and waits for a retry.
        """
        self.check_open()
        digest = hash_request(request)
        reply = self._replies.find(digest, request.headers)
        if reply is None:
            task = asyncio.ensure_future(self._call(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            reply = SentReply(digest, task, request.headers.get("idempotency-key", ""))
            self._replies.add(reply)
        try:
            return await asyncio.shield(reply.response), reply
        except asyncio.CancelledError:
            if reply.response.cancelled():
                raise build_ended() from None
            raise

    def check_open(self) -> None:
        if self.is_closed or self._endpoint.is_closed:
            raise build_ended()

    async def _call(self, request: EndpointRequest) -> EndpointResponse:
        response = await self._endpoint.answer(request)
        if isinstance(response.body, bytes):
            return response
        pieces = bytearray()
        for number, piece in enumerate(response.body, 1):
            pieces += piece
            if number % PIECES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return EndpointResponse(response.status, response.headers, bytes(pieces))


RETRY_COUNT, IDEMPOTENCY_KEY = "x-stainless-retry-count", "idempotency-key"


@dataclass(slots=True, eq=False)
class SentReply:
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
    """The latest replies of one episode, so that a request that is sent again is not sampled again.

    A client sends a request again when the response did not reach it in time: `x-stainless-retry-count` (of the
    official clients of OpenAI and Anthropic) or an `idempotency-key` says so. An agent may also ask the same thing
    twice on purpose, which is two calls; so a request that is not a retry is always sampled.

        "2 + 2?"               sampled, reply A
        "2 + 2?"               sampled, reply B (the agent asks twice)
        "2 + 2?", retry 1      the reply that did not reach its client, A or B; it is not sampled
    """

    _replies: deque[SentReply] = field(default_factory=deque)
    _num_bytes: int = 0

    def add(self, reply: SentReply) -> None:
        """Keeps a reply; once it is there, the oldest ones are dropped if there are too many."""
        self._replies.append(reply)
        reply.response.add_done_callback(lambda _: self._trim(reply))

    def _trim(self, reply: SentReply) -> None:
        self._num_bytes += reply.num_bytes
        count, size = get_limits().kept_replies, get_limits().kept_reply_bytes
        while len(self._replies) > 1 and (len(self._replies) > count or self._num_bytes > size):
            oldest = next(each for each in self._replies if each.response.done())
            if oldest is reply:
                return
            self._replies.remove(oldest)
            self._num_bytes -= oldest.num_bytes

    def find(self, digest: bytes, headers: Mapping[str, str]) -> SentReply | None:
        """Returns the reply to the request that this one repeats; None: it repeats none."""
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
