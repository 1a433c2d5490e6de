"""Checkpoints of Tinker's clients as models of the server: `"model": "tinker://RUN/sampler_weights/NAME"`."""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.interfaces import PolicyServer
from reinforge.protocols.tinker.server.slots import BASE, AdapterSlots, Snapshot
from reinforge.types.request import ChatPrompt, Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray


class SnapshotPolicy(PolicyServer):
    """Samples from a snapshot, which is in the engine while a request needs it.

    Args:
        slots: The engine.
        snapshot: The weights; None: those of the base model.
    """

    def __init__(self, slots: AdapterSlots, snapshot: Snapshot | None):
        self._slots, self._snapshot = slots, snapshot
        self._base = slots.engine.policies[BASE]
        self.tolerance = self._base.tolerance

    @property
    def history(self) -> str:
        """How earlier replies reach the model."""
        return self._base.history

    @property
    def version(self) -> int:
        """A snapshot never changes."""
        return 0

    @property
    def model_name(self) -> str:
        """The path of the checkpoint."""
        return self._base.model_name if self._snapshot is None else self._snapshot.name

    @property
    def chat_template(self) -> str | None:
        """The template of the base model."""
        return self._base.chat_template

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply."""
        async with self._slots.use(self._snapshot) as policy:
            return await policy.sample(request)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns log p of each token given the tokens before it."""
        async with self._slots.use(self._snapshot) as policy:
            return await policy.score(token_ids)

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs | ChatPrompt:
        """Returns the tokens of a given reply."""
        return await self._base.encode(request, reply)

    async def publish(self, version: int) -> None:
        """Does nothing: a snapshot never changes."""

    async def fingerprint(self) -> str:
        """Returns a short hash of the weights."""
        async with self._slots.use(self._snapshot) as policy:
            return await policy.fingerprint()
