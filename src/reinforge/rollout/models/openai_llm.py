"""`llms.<name>._type: openai`: a model behind any OpenAI-compatible chat completions endpoint.

It can be the agent's model, a judge, or a second model of a workflow. The embedded engine never trains it. A trainer
adapter of a user's that serves no policy itself may train it: the log-probs and token ids that the endpoint returns are
kept with each reply.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from reinforge.interfaces import Builder
from reinforge.registry import register_llm
from reinforge.rollout.models.llms import PolicyLLM, find_served_entries
from reinforge.rollout.models.openai_config import (
    OpenAILLMConfig,
    find_entry_name,
    resolve_endpoint,
    warn_about_api_key,
)

if TYPE_CHECKING:
    from reinforge.rollout.models.openai_client import OpenAIChat


@register_llm(config_type=OpenAILLMConfig)
async def openai_llm(config: OpenAILLMConfig, builder: Builder) -> AsyncIterator[OpenAIChat | PolicyLLM]:
    """Yields the model and closes its connections at the end; the policy, if the entry names the trained model."""
    if find_entry_name(builder.config.llms, config) in find_served_entries(builder.config):
        yield PolicyLLM(builder.policy)
        return
    url, key = resolve_endpoint(config)
    warn_about_api_key(config, url, ("llms", find_entry_name(builder.config.llms, config)), builder)
    from reinforge.rollout.models.openai_client import OpenAIChat  # imports the HTTP client

    model = OpenAIChat(config, url, key)
    try:
        yield model
    finally:
        await model.close()
