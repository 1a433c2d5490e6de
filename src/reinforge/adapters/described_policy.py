"""A policy in another process: what never changes about it is described once, when it is loaded."""

from __future__ import annotations

from typing import Protocol

from reinforge.interfaces import PolicyServer
from reinforge.types.request import ModelReply


class PolicyFacts(Protocol):
    """What never changes about a policy; attributes are those of `PolicyServer`."""

    @property
    def model_name(self) -> str: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def history(self) -> str: ...

    @property
    def tolerance(self) -> float: ...

    @property
    def max_model_len(self) -> int: ...


class DescribedPolicy(PolicyServer):
    """Base of the policies whose engine is elsewhere."""

    def __init__(self, facts: PolicyFacts, version: int = 0):
        self._facts, self._version = facts, version
        self.tolerance, self.max_model_len = facts.tolerance, facts.max_model_len

    @property
    def version(self) -> int:
        return self._version

    @property
    def model_name(self) -> str:
        return self._facts.model_name

    @property
    def chat_template(self) -> str | None:
        return self._facts.chat_template

    @property
    def history(self) -> str:
        return self._facts.history

    def note_version(self, reply: ModelReply) -> ModelReply:
        """Returns a reply; a request after a job opens admission, so its version may be new."""
        if reply.version is not None:
            self._version = max(self._version, reply.version)
        return reply
