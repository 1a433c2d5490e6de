"""Each step of a model under its own name: the newest from the weights that are trained, earlier ones from disk.

agent@3    while 3 is the newest step: what `agent` serves
           later: the checkpoint of step 3, loaded when a client asks for it and freed again
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from reinforge.config.policy import PolicyConfig
from reinforge.engine import import_engine
from reinforge.interfaces import PolicyServer
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.serving.models import OnDemandPolicy
from reinforge.types.request import ModelReply, ModelRequest, ReplyPiece
from reinforge.types.sample import FloatArray

if TYPE_CHECKING:
    from reinforge.engine import Engine

MAX_LOADED = 2  # most earlier steps in memory


class ModelStep(OnDemandPolicy):
    """One step; step 0 is the base model."""

    def __init__(self, step: int, newest: PolicyServer, earlier: EarlierSteps, policy: PolicyConfig):
        super().__init__(newest)
        self.step, self._newest, self._earlier, self.policy_config = step, newest, earlier, policy

    def use(self) -> AbstractAsyncContextManager[PolicyServer]:
        return self._earlier.use(self)

    @property
    def version(self) -> int:
        return self.step

    async def sample(self, request: ModelRequest) -> ModelReply:
        if self._newest.version == self.step:
            reply = await self._newest.sample(request)
            if reply.version == self.step:  # the next step may have come before the reply began
                return reply
        return await super().sample(request)

    async def stream(
        self, request: ModelRequest, markers: Sequence[str] = ()
    ) -> AsyncGenerator[ReplyPiece | ModelReply, None]:
        if self._newest.version == self.step:
            async with aclosing(self._newest.stream(request, markers)) as pieces:
                async for piece in pieces:
                    if _find_version(piece) != self.step:
                        break  # at the first piece alone: the next step came before the reply began
                    yield piece
                else:
                    return
        async with self.use() as policy, aclosing(policy.stream(request, markers)) as pieces:
            async for piece in pieces:
                yield piece

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        if self._newest.version == self.step:
            return await self._newest.score(token_ids)
        return await super().score(token_ids)


def _find_version(piece: ReplyPiece | ModelReply) -> int | None:
    return piece.version if isinstance(piece, ModelReply) else piece.tokens.policy_version


class LoadedStep:
    def __init__(self, load: Coroutine[Any, Any, Engine]):
        self.loading = asyncio.create_task(load)
        self.num_in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def free(self) -> None:
        """Frees the weights once no call is in flight."""
        await self.idle.wait()
        try:
            engine = await asyncio.shield(self.loading)
        except Exception:  # noqa: BLE001  it was never loaded, as its callers were told
            return
        await run_in_daemon_thread(engine.close, "engine-close")


class EarlierSteps:
    """The earlier steps in memory, of all models; the one that was asked for longest ago goes first.

    A step that is needed while calls use all the others waits for one of them, and later calls wait behind it.
    """

    def __init__(self, device: str):
        self._device = device
        self._loaded: OrderedDict[ModelStep, LoadedStep] = OrderedDict()
        self._freeing: set[asyncio.Task[None]] = set()
        self._making_room = asyncio.Lock()
        self._has_idle = asyncio.Event()

    @asynccontextmanager
    async def use(self, step: ModelStep) -> AsyncIterator[PolicyServer]:
        """Yields the policy of a step, which stays in memory inside the block."""
        if step not in self._loaded or self._making_room.locked():
            async with self._making_room:
                await self._make_room(step)
                loaded = self._take(step)
        else:
            loaded = self._take(step)
        try:
            yield (await asyncio.shield(loaded.loading)).policy
        finally:
            loaded.num_in_flight -= 1
            if not loaded.num_in_flight:
                loaded.idle.set()
                self._has_idle.set()

    async def _make_room(self, step: ModelStep) -> None:
        while step not in self._loaded and len(self._loaded) + len(self._freeing) >= MAX_LOADED:
            idle = next((each for each, loaded in self._loaded.items() if not loaded.num_in_flight), None)
            if idle is None:
                self._has_idle.clear()
                await self._has_idle.wait()
            else:
                await self.remove(idle)

    def _take(self, step: ModelStep) -> LoadedStep:
        if step not in self._loaded:
            self._loaded[step] = LoadedStep(self._load(step))
        self._loaded.move_to_end(step)
        loaded = self._loaded[step]
        loaded.num_in_flight += 1
        loaded.idle.clear()
        return loaded

    async def _load(self, step: ModelStep) -> Engine:
        load = import_engine().load
        try:
            engine = await run_in_daemon_thread(
                lambda: load(step.policy_config, seed=0, device=self._device, frozen=True), "engine-load"
            )
        except BaseException:
            self._loaded.pop(step, None)  # the next call tries again
            self._has_idle.set()
            raise
        await engine.policy.publish(step.step)
        return engine

    async def remove(self, step: ModelStep) -> None:
        """Frees a step before its checkpoint is deleted; it is freed even if the caller is cancelled meanwhile."""
        if (loaded := self._loaded.pop(step, None)) is not None:
            freeing = asyncio.create_task(loaded.free())
            self._freeing.add(freeing)
            freeing.add_done_callback(self._forget)
            await asyncio.shield(freeing)

    def _forget(self, freeing: asyncio.Task[None]) -> None:
        self._freeing.discard(freeing)
        self._has_idle.set()

    async def close(self) -> None:
        for step in list(self._loaded):
            await self.remove(step)
        await asyncio.gather(*self._freeing)
