"""The worker's side of `workflow.placement`: builds the agent from the configuration of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError
from reinforge.rollout.isolation.agent_worker import serve_agent
from reinforge.rollout.isolation.worker import Perform
from reinforge.rollout.isolation.worker_protocol import Message
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.trainer.setup.placement import AGENT_SECTIONS


async def load_workflow(function: dict[str, Any], project_root: Path) -> tuple[Perform, Message]:
    """Returns how to run an episode with the agent of a configuration, and what it is."""
    if not project_root.is_dir():
        raise ConfigError(f"there is no folder {project_root} on this node: every node needs the project at this path")
    loaded = replace(build_config(function["settings"], keep_going=True), project_root=project_root)
    if found := [each for each in loaded.problems if each.path.partition(".")[0] in AGENT_SECTIONS]:
        raise ConfigError(found)
    return serve_agent(await ComponentBuilder(loaded).get_workflow())
