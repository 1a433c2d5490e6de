"""The agent that plays any environment: it shows the policy what the environment says, and gives its replies back.

The environment's tasks are the run's dataset.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.dialects.text_tools import PROMPT, read_calls, write_tools
from reinforge.dialects.tool_calls import detect_tool_format
from reinforge.errors import ConfigError, PolicyFailure, Problem
from reinforge.evaluation.datasets import RowDataset
from reinforge.interfaces import Builder, DatasetLoader, PolicyServer
from reinforge.registry import register_dataset, register_workflow
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.episode import extract_text
from reinforge.rollout.workflows.outside_agent import AgentWorkflowConfig, OutsideWorkflow
from reinforge.types.environment import Reply
from reinforge.types.evaluation import EvalInputItem

ADD = "add `environment: TYPE:NAME`; `reinforge environments list` has them"


class EnvironmentWorkflowConfig(AgentWorkflowConfig, name="environment"):
    """The policy plays the configured `environment`; its tools become tools of the chat."""

    system: str | None = Field(default=None, description="System prompt before what the environment says; null: none.")
    max_turns: int = Field(
        default=32, ge=1, description="Maximum replies in an episode; if it is not over by then, the policy has failed."
    )
    max_tokens: int | None = Field(
        default=256, ge=1, description="Maximum tokens of a reply; null: up to the context limit."
    )
    tool_calls: Literal["auto", "template", "text"] = Field(
        default="auto",
        description="How the policy gets tools and calls them: `template`: as its chat template has them; `text`: in a "
        "message, with calls as text; `auto`: `text` if its chat template has no tool calls.",
    )
    tool_prompt: str = Field(
        default=PROMPT, description="With tools as `text`: the message, with `{task}` and, a signature each, `{tools}`."
    )


@dataclass(frozen=True)
class EnvironmentPlayer:
    config: EnvironmentWorkflowConfig
    find_policy: Callable[[], PolicyServer | None]

    async def __call__(self, item: EvalInputItem, llm: Any, context: EpisodeContext) -> str:
        environment: Any = context.environment  # type: ignore[attr-defined]
        observation = await environment.reset()
        system = context.text("system", self.config.system or "")
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        arguments = {} if self.config.max_tokens is None else {"max_tokens": self.config.max_tokens}
        text = ""
        for _ in range(self.config.max_turns):
            as_text = bool(observation.tools) and self._writes_tools()
            messages += write_tools(observation, self.config.tool_prompt) if as_text else observation.messages
            tools = {"tools": observation.tools} if observation.tools and not as_text else {}
            reply = await llm.chat.completions.create(messages=messages, **arguments, **tools)
            message = reply.choices[0].message
            text = extract_text(message.content)
            if (failure := context.calls[-1].reply.failure) is not None:
                raise PolicyFailure(failure, output=text)
            result = await environment.step(Reply(text, read_calls(text, observation.tools)) if as_text else message)
            if result.done:
                return text
            messages.append(message)
            observation = result.observation
        raise PolicyFailure(f"the episode is not over after {self.config.max_turns} replies (max_turns)", output=text)

    def _writes_tools(self) -> bool:
        if self.config.tool_calls != "auto":
            return self.config.tool_calls == "text"
        template = getattr(self.find_policy(), "chat_template", None)
        return template is not None and detect_tool_format(template) is None


@register_workflow(config_type=EnvironmentWorkflowConfig)
async def environment(config: EnvironmentWorkflowConfig, builder: Builder) -> AsyncIterator[OutsideWorkflow]:
    if builder.config.environment is None:
        raise ConfigError(Problem("environment", "the workflow `environment` plays one, but none is configured", ADD))
    player = EnvironmentPlayer(config, builder.policy)
    yield OutsideWorkflow(player, config.llm, True, config.share_environment_seed, name="environment")


class EnvironmentDatasetConfig(DatasetConfig, name="environment"):
    """The tasks of the configured `environment`."""


@register_dataset(config_type=EnvironmentDatasetConfig)
async def environment_tasks(config: EnvironmentDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    if (host := await builder.get_environment()) is None:
        raise ConfigError(Problem("environment", "the dataset has an environment's tasks, but none is configured", ADD))
    yield RowDataset(await host.load())
