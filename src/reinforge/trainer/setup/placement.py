"""`workflow.placement`: the agent's episodes in other processes of this machine, or on the nodes of a Ray cluster.

The agent is built here as always, which checks it and its examples. Each worker then builds the same agent from the
same configuration; its model calls come back to this process, which samples and records them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import WorkflowConfig
from reinforge.errors import ConfigError, Problem
from reinforge.registry import load_named
from reinforge.types.workflow import BoundWorkflow

LOADER = "reinforge.trainer.setup.placed_agent:load_workflow"
RAY = "ray"
RAY_AGENTS = "reinforge.scale.ray.agents:start_agents"  # what opens workers on the nodes of a Ray cluster
PLACEMENT = ("placement", "num_processes")
AGENT_SECTIONS = ("workflow", "functions", "llms")
"""Sections that the agent is made of; what cannot be sent of others is left out."""

_LEFT_OUT = object()


@asynccontextmanager
async def open_placed(
    loaded: LoadedConfig, config: WorkflowConfig, workflow: BoundWorkflow, *, is_run: bool
) -> AsyncIterator[BoundWorkflow]:
    """Yields the agent with its episodes in other processes, which end with the block.

    Args:
        is_run: False: the configuration is only checked, so Ray is not started.
    """
    if workflow.is_isolated:
        message = f"`isolation: process` and `placement: {config.placement}` cannot be combined"
        fix = "leave out isolation to run many episodes in a few processes, or placement to give each its own"
        raise ConfigError(Problem("placement", message, fix))
    if os.name == "nt":
        message = f"`{config.placement}` needs an operating system with process groups, which Windows does not have"
        raise ConfigError(Problem("placement", message, "use `driver`"))
    from reinforge.rollout.isolation.isolated_agent import PlacedWorkflow
    from reinforge.rollout.isolation.worker_pool import WorkerPool

    open_pool = partial(WorkerPool, {"settings": dump_settings(loaded)}, loaded.project_root, LOADER)
    open_pool = partial(open_pool, name=workflow.source, num_shared=config.num_processes)
    agents = load_named(RAY_AGENTS)(find_address(loaded)) if config.placement == RAY else None
    pool = open_pool() if agents is None else open_pool(open_transport=agents.open)
    try:
        if agents is None and is_run:
            await pool.start(shared=True)
        yield PlacedWorkflow.share(workflow, pool)
    finally:
        await pool.close()
        if agents is not None:
            await agents.close()


def find_address(loaded: LoadedConfig) -> str | None:
    """Returns the Ray cluster of the trainer adapter; None: it has none, so that one starts on this machine."""
    adapter = loaded.config.trainer_adapters.get(str(loaded.config.finetuning.trainer_adapter))
    return getattr(adapter, "address", None) if adapter is not None and adapter.static_type == RAY else None


def dump_settings(loaded: LoadedConfig) -> dict[str, Any]:
    """Returns the configuration as plain data, from which a worker builds the agent; it may contain secrets."""
    data = {name: _dump(value, (name,), loaded) for name, value in loaded.data.items()}
    data = {name: value for name, value in data.items() if value is not _LEFT_OUT}
    workflow = data.get("workflow")
    if isinstance(workflow, dict):
        data["workflow"] = {name: value for name, value in workflow.items() if name not in PLACEMENT}
    return data


def _dump(value: Any, path: tuple[str, ...], loaded: LoadedConfig) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        kind = {"_type": loaded.types[path]} if loaded.types.get(path) else {}
        value = kind | {name: getattr(value, name) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        items = {str(name): _dump(each, (*path, str(name)), loaded) for name, each in value.items()}
        return {name: each for name, each in items.items() if each is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        listed = [_dump(each, (*path, str(number)), loaded) for number, each in enumerate(value)]
        return [each for each in listed if each is not _LEFT_OUT]
    if path[0] in AGENT_SECTIONS:
        name = getattr(value, "__qualname__", type(value).__name__)
        message = f"{name} is a Python object of this process, so it cannot be sent to another one"
        raise ConfigError(Problem(".".join(path), message, 'write it into a module and pass "module:name"'))
    return _LEFT_OUT
