"""What stands behind an entry of `llms`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from reinforge.config.schema import LLMConfig
from reinforge.dialects.tool_calls import with_tool_calls
from reinforge.errors import ConfigError
from reinforge.interfaces import PolicyServer
from reinforge.registry import register_llm
from reinforge.types.request import ModelReply, ModelRequest


class PolicyLLMConfig(LLMConfig, name="policy"):
    """The model that the trainer adapter trains and serves."""


class PolicyLLM:
    """Calls go to the policy server that the adapter names.

    Args:
        find: Returns the adapter's policy, or None while it has none.
    """

    is_policy = True

    def __init__(self, find: Callable[[], PolicyServer | None]):
        self._find = find

    @property
    def server(self) -> PolicyServer:
        """The policy server.

        Raises:
            ConfigError: The adapter serves none.
        """
        server = self._find()
        if server is None:
            raise ConfigError(
                "llms: `_type: policy` needs a trainer adapter that serves the policy, and this one does not; "
                "use `_type: local`, or point the agent at the model that your backend serves"
            )
        return server

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
    yield PolicyLLM(builder.policy)
