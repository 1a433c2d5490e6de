"""NeMo Agent Toolkit's settings for a remote OpenPipe ART server: validated, but refused when a run starts.

Such a file still gets a report of its other problems, and the settings to use in place of this block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import Block, TrainerAdapterConfig
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Builder
from reinforge.registry import register_trainer_adapter


class ARTBackendConfig(Block):
    """Address of the ART server and what it trains."""

    ip: str = Field(description="Address of the server.")
    port: int = Field(description="Port of the server.")
    name: str = Field(default="trainer_run", description="Name of the trained model.")
    project: str = Field(default="trainer_project", description="Project that the model belongs to.")
    base_model: str = Field(default="Qwen/Qwen2.5-7B-Instruct", description="Hub id of the base model.")
    api_key: str = Field(default="default", description="API key of the server's inference endpoint.")
    delete_old_checkpoints: bool = Field(default=False, description="Keep only the newest checkpoint.")
    init_args: dict[str, Any] | None = Field(default=None, description="Arguments for loading the model.")
    engine_args: dict[str, Any] | None = Field(default=None, description="Arguments for the inference engine.")
    server_config: dict[str, Any] | None = Field(default=None, description="Arguments for the inference server.")


class ARTTrainerAdapterConfig(TrainerAdapterConfig, name="openpipe_art_trainer_adapter"):
    """A remote ART server; not supported in this version."""

    backend: ARTBackendConfig = Field(description="The server.")
    training: dict[str, Any] | None = Field(default=None, description="Arguments for training on the server.")


@register_trainer_adapter(config_type=ARTTrainerAdapterConfig)
async def art_trainer_adapter(config: ARTTrainerAdapterConfig, builder: Builder) -> AsyncIterator[Any]:
    """Refuses to run.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        Problem(
            "_type",
            f"remote ART servers are not supported in this version ({config.backend.ip}:{config.backend.port})",
            "use trainer_adapters._type: local and set the model in finetuning.policy.model",
        )
    )
    yield
