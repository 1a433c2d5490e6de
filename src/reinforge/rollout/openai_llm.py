"""`llms.<name>._type: openai`: any endpoint that speaks OpenAI's chat completions.

As the agent's model, as a judge, or as a second model of a workflow. It is never trained: what it says is context
without log-probs, also where the endpoint tells log-probs or token ids. The client is imported when one is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from reinforge.registry import register_llm
from reinforge.rollout.openai_config import OpenAILLMConfig, endpoint_of, entry_of, warn_of_key

if TYPE_CHECKING:
    from reinforge.rollout.openai_client import OpenAIChat


@register_llm(config_type=OpenAILLMConfig)
async def openai_llm(config: OpenAILLMConfig, builder: Any) -> AsyncIterator[OpenAIChat]:
    """Yields the endpoint's model and closes its connections at the end."""
    url, key = endpoint_of(config)
    warn_of_key(config, url, ("llms", entry_of(builder.config.llms, config)), builder)
    from reinforge.rollout.openai_client import OpenAIChat  # loads the HTTP client

    model = OpenAIChat(config, url, key)
    try:
        yield model
    finally:
        await model.close()
