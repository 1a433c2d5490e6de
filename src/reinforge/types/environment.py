"""What passes between an agent and its environment.

reset       Observation([{"role": "user", "content": "Spell backward: sun"}])
step        Reply("nus")  ->  StepResult(Observation(), reward=1.0, done=True)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RANDOM, SELF = "random", "self"
"""Players of an environment's other seats: at random, and the policy, untrained; any other name: an entry of `llms`."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees: messages that continue the conversation, and the tools that it may call from now on."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools in OpenAI's form; the agent calls them, and `step` gets the calls."""
    player: str | None = None
    """The entry of `llms` that replies here in place of the agent, to `messages` alone; None: the agent."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the agent does: its text, its tool calls, or both."""

    text: str = ""
    tool_calls: list[ToolUse] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepResult:
    observation: Observation = field(default_factory=Observation)
    reward: float | None = None  # reward of this step; None: none yet. An episode's reward is the sum
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """Whatever else is known; the numbers of the last step are metrics of the episode."""
