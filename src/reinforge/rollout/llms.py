"""`llms.<name>._type: policy`: the model that is being trained."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from pydantic import Field, field_validator

from reinforge.config.schema import LLMConfig
from reinforge.dialects.tool_calls import add_tool_calls
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Builder, PolicyServer
from reinforge.registry import register_llm
from reinforge.types.request import ModelReply, ModelRequest

RESERVED = "training"
"""A checkpoint's folder for the training state, so no adapter can have this name."""


class PolicyLLMConfig(LLMConfig, name="policy"):
    """The model that the trainer adapter trains and serves."""

    adapter: str | None = Field(
        default=None,
        description="Name of the LoRA adapter; entries with the same name share it; null: the only policy.",
    )

    @field_validator("adapter")
    @classmethod
    def _check_name(cls, adapter: str | None) -> str | None:
        if adapter is not None and (not adapter.isidentifier() or adapter == RESERVED):
            allowed = f'letters, digits and _, but not the name "{RESERVED}"'
            raise ValueError(f"{adapter!r} is not a valid adapter name; allowed: {allowed}")
        return adapter


def find_adapters(llms: Mapping[str, LLMConfig]) -> dict[str, str]:
    """Returns the adapter name of each entry of `llms` that has one.

    Example: planner: {_type: policy, adapter: a}, worker: {_type: policy, adapter: b}, judge: {_type: openai} ->
    {"planner": "a", "worker": "b"}.
    """
    return {
        entry: llm.adapter
        for entry, llm in llms.items()
        if isinstance(llm, PolicyLLMConfig) and llm.adapter is not None
    }


class PolicyLLM:
    """Sends calls to the trainer adapter's policy server.

    Args:
        find: Returns the policy server, or None if there is none yet.
        adapter: Name of one of its LoRA adapters; None: the policy itself.
    """

    is_policy = True

    def __init__(self, find: Callable[[], PolicyServer | None], adapter: str | None = None):
        self._find, self.adapter = find, adapter

    @property
    def server(self) -> PolicyServer:
        """The policy server.

        Raises:
            ConfigError: The trainer adapter serves no policy, or none with this name.
        """
        server = self._find()
        if server is None:
            raise ConfigError(
                "llms: `_type: policy` needs a trainer adapter that serves the policy, but this one does not; "
                "use the trainer adapter `_type: local`, or point the agent at the model that your backend serves"
            )
        return server if self.adapter is None else server.get_policy(self.adapter)

    @property
    def model_name(self) -> str:
        """The policy's name."""
        return self.server.model_name

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply from the weights being trained and parses tool calls in the model family's format."""
        server = self.server
        return add_tool_calls(await server.sample(request), request, server.chat_template)


@register_llm(config_type=PolicyLLMConfig)
async def policy_llm(config: PolicyLLMConfig, builder: Builder) -> AsyncIterator[PolicyLLM]:
    """Yields the policy, which is available once the trainer adapter is initialized."""
    named = find_adapters(builder.config.llms)
    if named and config.adapter is None:
        others = ", ".join(f"{entry}: {adapter}" for entry, adapter in named.items())
        message = f"not set, but other entries of llms name an adapter ({others})"
        raise ConfigError(Problem("adapter", message, "set it here too, or in none of the entries"))
    yield PolicyLLM(builder.policy, config.adapter)
