"""One episode's way through the gateway: its address, its key, and its calls in flight."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from types import TracebackType

from reinforge.rollout.http.endpoint import EpisodeEndpoint, build_ended
from reinforge.rollout.http.exchange import EndpointRequest, EndpointResponse
from reinforge.rollout.http.sent_replies import SentReplies, SentReply, hash_request

KEY_PREFIX = "sk-episode-"
MAX_IN_FLIGHT = 64
"""Most requests of one episode that are read and answered at a time; further ones wait."""
PIECES_AT_ONCE = 256
"""Events of a stream that are written before other requests get their turn."""


class GatewayDoor:
    """The base URL and the key with which an episode's programs reach its models; valid inside its `with` block.

    with gateway.attach(context.endpoint) as door:
        subprocess.run(["node", "agent.mjs"], env={**os.environ, **door.environment()})
    """

    def __init__(self, endpoint: EpisodeEndpoint, origin: str, detach: Callable[[GatewayDoor], None]):
        self._endpoint, self._detach = endpoint, detach
        self.episode_id = secrets.token_hex(8)
        self.api_key = KEY_PREFIX + secrets.token_urlsafe(24)
        self.base_url = f"{origin}/episodes/{self.episode_id}/v1"
        self.slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self.is_closed = False
        self._replies = SentReplies()
        self._tasks: set[asyncio.Task[EndpointResponse]] = set()

    def __enter__(self) -> GatewayDoor:
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
        }

    def accepts(self, key: str) -> bool:
        """Returns True for the episode's key; the comparison takes equally long for every wrong one."""
        return hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self.api_key.encode())

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

        Raises:
            BadRequest: The episode has ended, or an idempotency key belongs to another request.
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
