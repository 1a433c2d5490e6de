"""What an agent outside this process is given, a program or a service, and how its answer is read."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import Field

from reinforge.bounded import decode_json
from reinforge.config.schema import WorkflowConfig
from reinforge.errors import ConfigError, PolicyFailure, Problem
from reinforge.interfaces import Builder
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.episode import extract_text
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.workflow import BoundWorkflow

if TYPE_CHECKING:
    from reinforge.rollout.gateway import Gateway, GatewayAccess

logger = logging.getLogger(__name__)

SHOWN = 200  # characters of an answer that a message shows


class AgentWorkflowConfig(WorkflowConfig):
    """Settings of every agent that is configured instead of written as a workflow."""

    llm: str | None = Field(
        default=None,
        description="Entry of llms that the agent calls; null: the only entry, or the only one that is trained.",
    )
    share_environment_seed: bool = Field(default=True, description="Run siblings with the same environment seed.")


class AgentFailed(Exception):
    """An agent outside this process failed, or its answer cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideWorkflow(BoundWorkflow):
    name: str  # what messages call the agent

    @property
    def source(self) -> str:
        return self.name


@dataclass
class AgentAccess:
    gateway: Gateway | None  # None: the configuration is only checked
    name: str
    _is_warned: bool = field(default=False, init=False)

    @asynccontextmanager
    async def open(self, context: EpisodeContext) -> AsyncIterator[GatewayAccess]:
        """Yields the access of one episode, and says once if the agent never went through it."""
        if self.gateway is None:
            raise ConfigError("this workflow was only checked, so no episode can run")
        with self.gateway.attach(context.endpoint) as access:
            yield access
        if not context.calls and context.refused_call is None and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "%s has answered without calling the model, so there is nothing to train: it must send its calls to "
                "the base URL and with the key that it is given; many clients read both from "
                "OPENAI_BASE_URL and OPENAI_API_KEY unless the code sets others",
                self.name,
            )


@asynccontextmanager
async def open_access(builder: Builder, name: str) -> AsyncIterator[AgentAccess]:
    """Yields the accesses of a run; opens no port if the configuration is only checked."""
    if not getattr(builder, "makes_models", True):
        yield AgentAccess(None, name)
        return
    from reinforge.rollout.gateway import Gateway  # aiohttp; the worker of an environment that runs programs has none

    async with Gateway() as gateway:
        yield AgentAccess(gateway, name)


def format_task(value: Any) -> str:
    """Returns an example's input as text: a string unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def describe_episode(item: EvalInputItem, context: EpisodeContext) -> dict[str, Any]:
    """Returns what every agent may know of its episode, by the name that a template uses."""
    return {
        "input": item.input_obj,
        "example_id": context.example_id,
        "seed": context.seed,
        "is_training": context.is_training,
        "model": context.endpoint.default,
    }


def build_variables(episode: Mapping[str, Any], access: GatewayAccess) -> dict[str, str]:
    return {
        **access.environment(),
        "REINFORGE_EXAMPLE_ID": str(episode["example_id"]),
        "REINFORGE_SEED": str(episode["seed"]),
        "REINFORGE_IS_TRAINING": "1" if episode["is_training"] else "0",
        "REINFORGE_MODEL": str(episode["model"]),
    }


def decode_answer(text: str, what: str, context: EpisodeContext) -> Any:
    """Returns the value of an answer in JSON; text that the agent only passed on is a failure of the policy."""
    try:
        return decode_json(text)
    except ValueError as error:
        message = f"{what} is not JSON ({error}): {shorten(text)}"
        said = (extract_text(call.reply.message.get("content")) for call in context.calls)
        if text.strip() and any(text.strip() in reply for reply in said):
            raise PolicyFailure(f"{message}; the policy wrote it", output=text) from None
        raise AgentFailed(message) from None


def shorten(text: str) -> str:
    return repr(text[:SHOWN]) + ("..." if len(text) > SHOWN else "")


def refuse_windows(what: str) -> None:
    if os.name == "nt":
        raise ConfigError(
            Problem("_type", f"{what} needs process groups, which Windows does not have", "run it in WSL, or on Linux")
        )
