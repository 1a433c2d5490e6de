"""A plain chat: the policy answers the example's messages once, and its reply is the output.

workflow: {_type: chat}        # rows {"messages": [...]} or {"prompt": ...}; a text becomes a message of the user
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from reinforge.errors import PolicyFailure
from reinforge.interfaces import Builder
from reinforge.registry import register_workflow
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.episode import extract_text
from reinforge.rollout.workflows.outside_agent import AgentWorkflowConfig, OutsideWorkflow, format_task
from reinforge.types.evaluation import EvalInputItem


class ChatWorkflowConfig(AgentWorkflowConfig, name="chat"):
    """Sends the example's messages to the policy unchanged; the text of its reply is the output."""

    max_tokens: int | None = Field(
        default=None, ge=1, description="Maximum tokens of the reply; null: up to the context limit."
    )


@dataclass(frozen=True)
class PlainChat:
    config: ChatWorkflowConfig

    async def __call__(self, item: EvalInputItem, llm: Any, context: EpisodeContext) -> str:
        given = item.input_obj
        messages = given if isinstance(given, list) else [{"role": "user", "content": format_task(given)}]
        arguments = {} if self.config.max_tokens is None else {"max_tokens": self.config.max_tokens}
        reply = await llm.chat.completions.create(messages=messages, **arguments)
        text = extract_text(reply.choices[0].message.content)
        if (failure := context.calls[-1].reply.failure) is not None:
            raise PolicyFailure(failure, output=text)
        return text


@register_workflow(config_type=ChatWorkflowConfig)
async def chat(config: ChatWorkflowConfig, builder: Builder) -> AsyncIterator[OutsideWorkflow]:
    yield OutsideWorkflow(PlainChat(config), config.llm, True, config.share_environment_seed, name="chat")
