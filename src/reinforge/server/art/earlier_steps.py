"""Each step of a model under a name of its own: the newest from the weights that are trained, earlier ones from disk.

agent@3    while 3 is the newest step: what `agent` serves
           later: the checkpoint of step 3, loaded when a client asks for it and freed again
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from reinforge.config.schema import PolicyConfig
from reinforge.engine.packages import import_engine
from reinforge.errors import EngineError
from reinforge.interfaces import PolicyServer
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.types.request import ModelReply, ModelRequest
from reinforge.types.sample import FloatArray

if TYPE_CHECKING:
    from reinforge.engine import Engine

MAX_LOADED = 2
"""Most earlier steps in memory."""


class ModelStep(PolicyServer):
    """One step.

    Args:
        step: Its number.
        newest: The model as it is trained.
        earlier: Loads the step once it is not the newest.
        policy: The checkpoint of the step, or the base model for step 0.
    """

    def __init__(self, step: int, newest: PolicyServer, earlier: EarlierSteps, policy: PolicyConfig):
        self.step, self._newest, self._earlier, self.policy_config = step, newest, earlier, policy
        self.tolerance = newest.tolerance

    @property
    def version(self) -> int:
        """The step."""
        return self.step

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self._newest.model_name

    @property
    def chat_template(self) -> str | None:
        """The template of the model."""
        return self._newest.chat_template

    @property
    def history(self) -> str:
        """How earlier replies reach the model."""
        return self._newest.history

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply.

        Raises:
            ContextOverflow: The prompt does not fit the context.
        """
        if self._newest.version == self.step:
            reply = await self._newest.sample(request)
            if reply.version == self.step:  # the next step may have come before the reply began
                return reply
        async with self._earlier.use(self) as policy:
            return await policy.sample(request)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns the log-prob of each token given those before it."""
        if self._newest.version == self.step:
            return await self._newest.score(token_ids)
        async with self._earlier.use(self) as policy:
            return await policy.score(token_ids)

    async def publish(self, version: int) -> None:
        """Raises: these weights never change.

        Raises:
            EngineError: Always.
        """
        raise EngineError(f"step {self.step} is frozen")

    async def fingerprint(self) -> str:
        """Returns a short hash of the weights."""
        async with self._earlier.use(self) as policy:
            return await policy.fingerprint()


class LoadedStep:
    """An earlier step in memory."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.lock = asyncio.Lock()
        self.num_in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()


class EarlierSteps:
    """The earlier steps in memory, of all models; the one that was asked for longest ago goes first.

    Args:
        device: `auto`, `cpu`, `cuda` or `mps`.
    """

    def __init__(self, device: str):
        self._device = device
        self._loaded: OrderedDict[ModelStep, LoadedStep] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def use(self, step: ModelStep) -> AsyncIterator[PolicyServer]:
        """Yields the policy of a step, which stays in memory inside the block."""
        loaded = self._loaded.pop(step, None) or LoadedStep()
        self._loaded[step] = loaded
        loaded.num_in_flight += 1
        loaded.idle.clear()
        while len(self._loaded) > MAX_LOADED:
            _, oldest = self._loaded.popitem(last=False)
            task = asyncio.create_task(_free(oldest))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        try:
            async with loaded.lock:
                if loaded.engine is None:
                    load = import_engine().load
                    loaded.engine = await run_in_daemon_thread(
                        lambda: load(step.policy_config, seed=0, device=self._device, frozen=True), "engine-load"
                    )
                    await loaded.engine.policy.publish(step.step)
            yield loaded.engine.policy
        finally:
            loaded.num_in_flight -= 1
            if not loaded.num_in_flight:
                loaded.idle.set()

    async def remove(self, step: ModelStep) -> None:
        """Frees a step before its checkpoint is deleted."""
        if (loaded := self._loaded.pop(step, None)) is not None:
            await _free(loaded)

    async def close(self) -> None:
        """Frees all steps."""
        for step in list(self._loaded):
            await self.remove(step)
        await asyncio.gather(*self._closing)


async def _free(loaded: LoadedStep) -> None:
    """Frees the weights once no call is in flight."""
    await loaded.idle.wait()
    if loaded.engine is not None:
        await run_in_daemon_thread(loaded.engine.close, "engine-close")
