"""Small components, registered as a user would, for the tests of the configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from reinforge.config.schema import (
    DatasetConfig,
    EvaluatorConfig,
    LLMConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    WorkflowConfig,
)
from reinforge.registry import Registry


class OpenAIConfig(LLMConfig, name="openai"):
    model_name: str
    base_url: str | None = None
    api_key: SecretStr | None = None
    temperature: float = Field(default=1.0, ge=0)


class MyWorkflowConfig(WorkflowConfig, name="my_agent_workflow"):
    llm: str | None = None
    function: Any = None


class MyDatasetConfig(DatasetConfig, name="json"):
    file_path: Path


class MyEvaluatorConfig(EvaluatorConfig, name="my_custom_evaluator"):
    strict: bool = False
    labels: list[str] = Field(default_factory=list)


class MyBuilderConfig(TrajectoryBuilderConfig, name="my_traj_builder"):
    num_generations: int = Field(default=2, ge=1, description="Number of trajectory generations per example")
    include_tool_calls: bool = True
    min_episode_length: int = 2


class MyBackendConfig(BaseModel):  # as in the guide: says nothing about unknown keys, so pydantic would ignore them
    endpoint: str = Field(description="Training API endpoint URL")
    api_key: str = Field(description="API key for authentication")
    timeout: int = 3600
    learning_rate: float = 1e-5
    batch_size: int = 4


class OpenBackendConfig(BaseModel):
    model_config = ConfigDict(extra="allow")
    endpoint: str = "http://localhost"


class Precision(Enum):
    LOW = "bf16"
    HIGH = "fp32"


class MyAdapterConfig(TrainerAdapterConfig, name="my_trainer_adapter"):
    backend: MyBackendConfig
    mirrors: list[MyBackendConfig] = Field(default_factory=list)
    open_backend: OpenBackendConfig | None = None
    precision: Precision = Precision.HIGH
    validate_trajectories: bool = True


class MyTrainerConfig(TrainerConfig, name="my_trainer"):
    note: str = ""

    @field_validator("note")
    @classmethod
    def _check(cls, note: str) -> str:
        if note == "break":
            raise KeyError("broken")
        return note


async def component(config: Any, builder: Any) -> AsyncIterator[Any]:
    yield config


def registry() -> Registry:
    """Returns a registry of the guide's components, the child of an empty one."""
    child = Registry()
    child.add("llm", OpenAIConfig, component)
    child.add("workflow", MyWorkflowConfig, component)
    child.add("dataset", MyDatasetConfig, component)
    child.add("evaluator", MyEvaluatorConfig, component)
    child.add("trajectory_builder", MyBuilderConfig, component)
    child.add("trainer_adapter", MyAdapterConfig, component)
    child.add("trainer", MyTrainerConfig, component)
    return child


COMPLETE = """\
llms:
  my_model:
    _type: openai
    model_name: gpt-4
    base_url: http://localhost:8000/v1
workflow:
  _type: my_agent_workflow
  llm: my_model
eval:
  general:
    max_concurrency: 8
    output_dir: .tmp/finetuning/eval
    dataset:
      _type: json
      file_path: data/train.json
  evaluators:
    my_reward:
      _type: my_custom_evaluator
trajectory_builders:
  my_builder:
    _type: my_traj_builder
    num_generations: 4
    include_tool_calls: true
    min_episode_length: 3
trainer_adapters:
  my_adapter:
    _type: my_trainer_adapter
    backend:
      endpoint: http://training-server:8080
      api_key: ${TRAINING_API_KEY}
      learning_rate: 1e-5
      batch_size: 8
    validate_trajectories: true
trainers:
  my_trainer:
    _type: my_trainer
finetuning:
  enabled: true
  trainer: my_trainer
  trajectory_builder: my_builder
  trainer_adapter: my_adapter
  reward_function:
    name: my_reward
  num_epochs: 20
  output_dir: .tmp/finetuning/output
  curriculum_learning:
    enabled: true
    initial_percentile: 0.3
    increment_percentile: 0.2
    expansion_interval: 5
"""
"""The shape of the extension guide's complete configuration."""

KEY = {"TRAINING_API_KEY": "sk-canary-1"}
