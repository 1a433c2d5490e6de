"""The engine behind Tinker's protocol: one base model, adapters that are trained, and adapters that sample.

    untrained        the base model (an adapter of zeros)
    trained000 ...   one for each model that a client trains; nothing samples from it
    sampled000 ...   hold the snapshots from which clients sample; more snapshots than slots take turns

All calls into the engine run in one thread, one after the other, so a job of one model never meets that of another.
Replies are sampled between two calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from reinforge.errors import EngineError
from reinforge.files import write_folder
from reinforge.interfaces import PolicyServer
from reinforge.serving.models import OnDemandPolicy
from reinforge.types.request import ChatPrompt, Message, ModelRequest, TokenLogprobs
from reinforge.types.sample import AdamSettings, FloatArray, GradientReport, LossSpec, TrainingSample

if TYPE_CHECKING:
    from reinforge.engine import Engine
    from reinforge.engine.model.adapter_weights import AdapterWeights


T = TypeVar("T")
BASE = "untrained"


def list_slots(max_models: int, max_samplers: int) -> list[str]:
    """Returns the names of the engine's adapters; PEFT confuses names of which one begins another."""
    trained = [f"trained{i:03}" for i in range(max_models)]
    return [BASE, *trained, *(f"sampled{i:03}" for i in range(max_samplers))]


@dataclass(eq=False)
class Snapshot:
    """Weights to sample from."""

    name: str
    load: Callable[[], AdapterWeights]
    slot: SamplerSlot | None = None  # where they are now; None: in no slot


@dataclass(eq=False)
class SamplerSlot:
    adapter: str
    snapshot: Snapshot | None = None
    num_users: int = 0
    used_at: int = 0


@dataclass(eq=False)
class AdapterSlots:
    engine: Engine
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "reinforge-tinker"))

    def __post_init__(self) -> None:
        names = list(self.engine.policies)
        self._free = [name for name in names if name.startswith("trained")]
        self.num_models = len(self._free)
        self._samplers = [SamplerSlot(name) for name in names if name.startswith("sampled")]
        self._changed = asyncio.Condition()
        self._num_uses = 0

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def take(self, rank: int, seed: int) -> str:
        """Returns a slot with a new adapter."""
        if not self._free:
            raise EngineError(
                f"this server trains at most {self.num_models} models at a time, and that many are open: close a "
                "session that is no longer needed, or start the server with a larger --max_models"
            )
        slot = self._free.pop(0)
        try:
            await self.run(lambda: self._change(slot, lambda: self._put_new(slot, rank, seed)))
        except BaseException:
            self._free.append(slot)
            raise
        return slot

    def release(self, slot: str) -> None:
        self._free.append(slot)

    async def accumulate(
        self,
        slot: str,
        samples: list[TrainingSample],
        contexts: list[TrainingSample],
        loss: LossSpec,
        *,
        backward: bool,
    ) -> tuple[GradientReport, list[FloatArray]]:
        """Adds the gradient of a loss to those of a slot; returns its report and the log-probs of the contexts."""

        def compute() -> tuple[GradientReport, list[FloatArray]]:
            report = self.engine.accumulate(samples, loss, backward=backward, adapter=slot)
            if report is None:
                raise EngineError("the loss, a log-prob or a gradient of this request is not finite")
            return report, self.engine.logprobs(contexts, slot) if contexts else []

        return await self.run(compute)

    async def clear_gradients(self, slot: str) -> None:
        await self.run(lambda: self.engine.clear_gradients(slot))

    async def step(self, slot: str, settings: AdamSettings) -> dict[str, float]:
        def apply() -> dict[str, float]:
            metrics = self.engine.apply(settings, slot)
            if metrics is None:
                raise EngineError("the gradient is not finite: no step was made, and the gradients are cleared")
            return metrics

        return await self.run(lambda: self._change(slot, apply))

    async def read(self, slot: str) -> AdapterWeights:
        return await self.run(lambda: self.engine.read_adapter(slot))

    async def save(self, slot: str, folder: Path, note: Callable[[Path], None], *, with_training: bool) -> None:

        def write(staged: Path) -> None:
            self.engine.write(staged, self.engine.policies[slot].version, slot, with_training)
            note(staged)

        await self.run(lambda: write_folder(folder, write))

    async def load(self, slot: str, folder: Path, rank: int, *, with_training: bool) -> None:
        def load() -> None:
            self._put_new(slot, rank)  # an adapter's scale depends on its rank
            self.engine.load_weights(folder, slot)
            if not with_training:
                self.engine.put_adapter(self.engine.read_adapter(slot), slot)  # which drops the optimizer's state

        await self.run(lambda: self._change(slot, load))

    @asynccontextmanager
    async def use(self, snapshot: Snapshot | None) -> AsyncIterator[PolicyServer]:
        """Yields the policy of a snapshot, which stays in the engine meanwhile; None: that of the base model."""
        if snapshot is None:
            yield self.engine.policies[BASE]
            return
        slot = await self._place(snapshot)
        try:
            yield self.engine.policies[slot.adapter]
        finally:
            slot.num_users -= 1  # at once, since waiting for the lock may be cancelled, too
            async with self._changed:
                self._changed.notify_all()

    async def _place(self, snapshot: Snapshot) -> SamplerSlot:
        async with self._changed:
            while (slot := snapshot.slot or self._find_free()) is None:
                await self._changed.wait()
            self._num_uses += 1
            slot.num_users, slot.used_at = slot.num_users + 1, self._num_uses
            if slot.snapshot is snapshot:
                return slot
            self._forget(slot)
            try:
                await self.run(lambda: self._fill(slot.adapter, snapshot))
            except BaseException:
                slot.num_users -= 1
                self._changed.notify_all()
                raise
            slot.snapshot, snapshot.slot = snapshot, slot
            return slot

    def _find_free(self) -> SamplerSlot | None:
        idle = [slot for slot in self._samplers if not slot.num_users]
        return min(idle, key=lambda slot: (slot.snapshot is not None, slot.used_at), default=None)

    def _forget(self, slot: SamplerSlot) -> None:
        if slot.snapshot is not None:
            slot.snapshot.slot = None
        slot.snapshot = None

    async def refresh(self, snapshot: Snapshot) -> None:
        """Puts the new weights of a snapshot into its slot, if it has one, once no reply is in flight."""
        async with self._changed:
            if (slot := snapshot.slot) is not None:
                await self.run(lambda: self._fill(slot.adapter, snapshot))

    async def drop(self, snapshot: Snapshot) -> None:
        async with self._changed:
            if snapshot.slot is not None:
                self._forget(snapshot.slot)
                self._changed.notify_all()

    # In the engine's thread.

    def _fill(self, adapter: str, snapshot: Snapshot) -> None:
        weights = snapshot.load()
        self._change(adapter, lambda: self.engine.put_adapter(weights, adapter))

    def _put_new(self, slot: str, rank: int, seed: int = 0) -> None:
        self.engine.put_adapter(self.engine.make_adapter(rank=rank, seed=seed), slot)

    def _change(self, slot: str, change: Callable[[], T]) -> T:
        policy = self.engine.policies[slot]
        self.engine.begin_job(slot)
        try:
            result = change()
        except BaseException:
            self.engine.rollback()
            raise
        self.engine.end_job()
        policy.open(policy.version + 1)
        return result

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self.engine.close)


class SnapshotPolicy(OnDemandPolicy):
    """A checkpoint as a model of the server: `"model": "tinker://RUN/sampler_weights/NAME"`."""

    def __init__(self, slots: AdapterSlots, snapshot: Snapshot):
        super().__init__(slots.engine.policies[BASE])
        self._slots, self._snapshot = slots, snapshot

    def use(self) -> AbstractAsyncContextManager[PolicyServer]:
        return self._slots.use(self._snapshot)

    @property
    def version(self) -> int:
        return 0

    @property
    def model_name(self) -> str:
        return self._snapshot.name

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs | ChatPrompt:
        return await self._base.encode(request, reply)
