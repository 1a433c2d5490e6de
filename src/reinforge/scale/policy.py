"""The policy of all workers: each reply is sampled by the worker where its conversation is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from reinforge.adapters.described_policy import DescribedPolicy
from reinforge.scale.engine_worker import PolicyDescription
from reinforge.scale.router import find_conversation
from reinforge.types.request import Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray


class Workers(Protocol):
    """What the policy asks of the workers."""

    async def ask(self, key: str, call: Callable[[Any], Any]) -> Any:
        """Returns the answer of the worker that a conversation belongs to."""

    def publish(self, name: str, version: int) -> None:
        """Opens admission on every worker."""

    def compare_fingerprints(self, name: str) -> str:
        """Returns the fingerprint of the weights that every worker has."""


class RoutedPolicy(DescribedPolicy):
    """Samples from one adapter, or from the only policy, on any of the workers."""

    def __init__(self, group: Workers, name: str, description: PolicyDescription):
        super().__init__(description)
        self._group, self.name = group, name

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply; if its worker ends meanwhile, another one samples it."""
        key = find_conversation(request)
        reply: ModelReply = await self._group.ask(key, lambda actor: actor.sample.remote(self.name, request))
        return self.note_version(reply)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns log p of each token given the tokens before it, at temperature 1."""
        rows: list[FloatArray] = await self._group.ask(
            "score", lambda actor: actor.score_tokens.remote(self.name, token_ids)
        )
        return rows

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        tokens: TokenLogprobs = await self._group.ask(
            find_conversation(request), lambda actor: actor.encode.remote(self.name, request, reply)
        )
        return tokens

    async def publish(self, version: int) -> None:
        await asyncio.to_thread(self._group.publish, self.name, version)
        self._version = version

    async def fingerprint(self) -> str:
        """Returns a short hash of the weights, which are the same on every worker."""
        return await asyncio.to_thread(self._group.compare_fingerprints, self.name)
