"""Configuration of the trainer adapter for OpenAI's fine-tuning API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from reinforge.config.schema import TrainerAdapterConfig
from reinforge.rollout.openai_config import EndpointConfig

if TYPE_CHECKING:
    pass

Auto = Literal["auto"]


Count = Annotated[int, Field(ge=1)]


class OpenAIAdapterConfig(EndpointConfig, TrainerAdapterConfig, name="openai"):
    """Trains through OpenAI's fine-tuning service, or another one that speaks its API."""

    base_model: str | None = Field(
        default=None, min_length=1, description="The model to begin with; null: finetuning.policy.model."
    )
    n_epochs: Auto | Count = Field(default="auto", description="Passes over a job's rows.")
    batch_size: Auto | Count = Field(default="auto", description="Rows of an optimizer step.")
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0)] = Field(
        default="auto", description="Of the learning rate that the service chooses."
    )
    seed: int | None = Field(default=None, description="Of the jobs; null: derived from finetuning.seed.")
    suffix: str | None = Field(
        default=None, min_length=1, max_length=64, description="Part of the names of the models that are made."
    )
    fine_tune_from_scratch: bool = Field(
        default=False, description="Each job begins with the base model; false: with the model of the job before."
    )
    min_examples: int = Field(
        default=10, ge=1, description="Fewest rows of a job: fewer are a failed job, and nothing is sent."
    )
    poll_interval_s: float = Field(default=10.0, gt=0, description="Seconds between two looks at a job.")
    max_wait_s: float = Field(
        default=86400.0, gt=0, description="Seconds that a job may take, queue included; then it is cancelled."
    )
    ready_s: float = Field(default=600.0, gt=0, description="Seconds that a new model may take until it answers.")
    cancel_on_stop: bool = Field(
        default=False,
        description="Cancel the job in flight when the run is stopped; false: it goes on, and --resume takes it up.",
    )
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Further arguments of each chat completion.")
