"""The settings of training a tester."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainingConfiguration(BaseModel):
    """Settings of a training run; the first six are astra-rl's, with its defaults.

    Example:
        TrainingConfiguration(lr=1e-4, training_steps=50, run_dir="runs/first", eval_every=5)
    """

    model_config = ConfigDict(extra="forbid")

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field, or in a subclass any attribute, as one for a training loop of its own may do."""
        if type(self) is TrainingConfiguration or name in type(self).model_fields or name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self.__dict__[name] = value

    lr: float = Field(default=3e-3, gt=0, description="Peak learning rate; pretrained models need 1e-6 to 1e-5.")
    batch_size: int = Field(default=16, ge=1, description="Steps of the algorithm per batch.")
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop", "adagrad"] = Field(
        default="adamw", description="The optimizer."
    )
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="Batches per optimizer step.")
    training_steps: int = Field(default=1024, ge=1, description="Experiences to collect and train on.")
    num_episodes_per_experience: int = Field(default=8, ge=1, description="Rollouts per experience.")

    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate changes over the training steps."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up.")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="Final learning rate as a fraction of the peak.")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay, applied to matrices only.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this norm.")
    seed: int = Field(default=0, ge=0, description="The seed that all rollout seeds derive from.")

    run_dir: Path | None = Field(
        default=None, description="Folder for the log and checkpoints; null: neither is written, so no resuming."
    )
    checkpoint_every: int = Field(default=10, ge=1, description="Experiences between checkpoints in run_dir.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Number of newest checkpoints to keep.")
    resume: bool = Field(default=False, description="Resume from the newest checkpoint in run_dir.")

    eval_every: int | None = Field(default=None, ge=1, description="Experiences between evaluations; null: none.")
    eval_rollouts: int = Field(default=16, ge=1, description="Rollouts per evaluation.")
    patience: int | None = Field(
        default=None, ge=1, description="Stop after this many evaluations without a new best; null: never."
    )

    max_minutes: float | None = Field(default=None, gt=0, description="Stop after this many minutes; can be resumed.")
    max_steps: int | None = Field(default=None, ge=1, description="Stop after this many optimizer steps.")
    max_empty: int = Field(
        default=3,
        ge=1,
        description="Stop after this many experiences in a row without training signal; fail if no step was ever made.",
    )
