"""What stands behind an entry of `llms`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from pydantic import Field, field_validator

from reinforge.config.schema import LLMConfig
from reinforge.dialects.tool_calls import with_tool_calls
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import PolicyServer
from reinforge.registry import register_llm
from reinforge.types.request import ModelReply, ModelRequest

RESERVED = "training"
"""The folder of a checkpoint in which the run's own state lies."""


class PolicyLLMConfig(LLMConfig, name="policy"):
    """The model that the trainer adapter trains and serves."""

    adapter: str | None = Field(
        default=None,
        description="The LoRA adapter that answers; entries with the same name share it; null: the one policy.",
    )

    @field_validator("adapter")
    @classmethod
    def _is_a_name(cls, adapter: str | None) -> str | None:
        if adapter is not None and (not adapter.isidentifier() or adapter == RESERVED):
            raise ValueError(f"{adapter!r} cannot be the name of an adapter; use letters, digits and _, as in provers")
        return adapter


def adapters_of(llms: Mapping[str, LLMConfig]) -> dict[str, str]:
    """Returns the adapter of each entry of `llms` that names one.

    Example: planner: {_type: policy, adapter: a}, worker: {_type: policy, adapter: b}, judge: {_type: openai} ->
    {"planner": "a", "worker": "b"}.
    """
    return {
        entry: llm.adapter
        for entry, llm in llms.items()
        if isinstance(llm, PolicyLLMConfig) and llm.adapter is not None
    }


class PolicyLLM:
    """Calls go to the policy server that the adapter names.

    Args:
        find: Returns the adapter's policy, or None while it has none.
        adapter: Which of its named policies; None: the policy itself.
    """

    is_policy = True

    def __init__(self, find: Callable[[], PolicyServer | None], adapter: str | None = None):
        self._find, self.adapter = find, adapter

    @property
    def server(self) -> PolicyServer:
        """The policy server.

        Raises:
            ConfigError: The adapter serves none, or none of that name.
        """
        server = self._find()
        if server is None:
            raise ConfigError(
                "llms: `_type: policy` needs a trainer adapter that serves the policy, and this one does not; "
                "use `_type: local`, or point the agent at the model that your backend serves"
            )
        return server if self.adapter is None else server.named(self.adapter)

    @property
    def model_name(self) -> str:
        """The policy's name."""
        return self.server.model_name

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Draws one reply from the weights being trained; tool calls in its text are read in the family's format."""
        server = self.server
        return with_tool_calls(await server.sample(request), request, server.chat_template)


@register_llm(config_type=PolicyLLMConfig)
async def policy_llm(config: PolicyLLMConfig, builder: Any) -> AsyncIterator[PolicyLLM]:
    """Yields the adapter's policy, which exists once the adapter is initialised."""
    named = adapters_of(builder.config.llms)
    if named and config.adapter is None:
        told = ", ".join(f"{entry} names {adapter}" for entry, adapter in named.items())
        message = f"this entry names no adapter, so nobody can tell what it trains ({told})"
        raise ConfigError(Problem("adapter", message, "name one here too, or leave it out of every entry"))
    yield PolicyLLM(builder.policy, config.adapter)
