"""Configuration of the trainer adapter for OpenAI's fine-tuning API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from reinforge.config.schema import TrainerAdapterConfig
from reinforge.rollout.models.openai_config import EndpointConfig

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]


class OpenAIAdapterConfig(EndpointConfig, TrainerAdapterConfig, name="openai"):
    """Trains through OpenAI's fine-tuning API, or another service with the same API."""

    base_model: str | None = Field(
        default=None, min_length=1, description="The model to fine-tune; null: finetuning.policy.model."
    )
    n_epochs: Auto | Count = Field(default="auto", description="Hyperparameter: passes over the training file.")
    batch_size: Auto | Count = Field(default="auto", description="Hyperparameter: rows per optimizer step.")
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0)] = Field(
        default="auto", description="Hyperparameter: multiplies the learning rate that the service chooses."
    )
    seed: int | None = Field(default=None, description="Seed of the jobs; null: derived from finetuning.seed.")
    suffix: str | None = Field(
        default=None, min_length=1, max_length=64, description="Suffix in the names of the fine-tuned models."
    )
    fine_tune_from_scratch: bool = Field(
        default=False, description="Start each job from the base model; false: from the previous job's model."
    )
    min_examples: int = Field(
        default=10,
        ge=1,
        description="Minimum number of rows in a training file; with fewer, the job fails and nothing is sent.",
    )
    poll_interval_s: float = Field(default=10.0, gt=0, description="Seconds between two polls of a job.")
    max_wait_s: float = Field(
        default=86400.0, gt=0, description="Seconds to wait for a job, queue included; then it is cancelled."
    )
    ready_s: float = Field(default=600.0, gt=0, description="Seconds to wait until a new model is available.")
    cancel_on_stop: bool = Field(
        default=False,
        description="Cancel the running job when the run is stopped; false: it keeps running, and --resume uses it.",
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="Other arguments to send with each chat completion."
    )
