"""Several policies of one backend as one policy server: one version and one fingerprint for all, each with its name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import PolicyServer
from reinforge.types.request import ChatPrompt, Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray


class NamedPolicies(PolicyServer):
    """Publishes all policies as the same version; a request without a name goes to the first.

    Args:
        policies: By name, at least one.
    """

    def __init__(self, policies: Mapping[str, PolicyServer]):
        self._policies = dict(policies)
        self._first = next(iter(self._policies.values()))
        self.tolerance = max(policy.tolerance for policy in self._policies.values())

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return tuple(self._policies)

    def get_policy(self, name: str) -> PolicyServer:
        """Returns the policy with this name.

        Raises:
            ConfigError: There is none.
        """
        if name not in self._policies:
            raise ConfigError(Problem("llms", f"there is no adapter {name}, only {', '.join(self._policies)}"))
        return self._policies[name]

    @property
    def version(self) -> int:
        return max(policy.version for policy in self._policies.values())

    @property
    def model_name(self) -> str:
        return ", ".join(dict.fromkeys(policy.model_name for policy in self._policies.values()))

    @property
    def chat_template(self) -> str | None:
        """The first policy's template; policies of one model share it."""
        return self._first.chat_template

    async def sample(self, request: ModelRequest) -> ModelReply:
        return await self._first.sample(request)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        return await self._first.score(token_ids)

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs | ChatPrompt:
        return await self._first.encode(request, reply)

    async def publish(self, version: int) -> None:
        """Opens admission on all of them."""
        for policy in self._policies.values():
            await policy.publish(version)

    async def fingerprint(self) -> str:
        """Returns one hash for all of them."""
        digest = hashlib.sha256()
        for name, policy in self._policies.items():
            digest.update(f"{name}={await policy.fingerprint()};".encode())
        return digest.hexdigest()[:16]
