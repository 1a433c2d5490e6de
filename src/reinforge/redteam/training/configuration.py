"""How a tester is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainingConfiguration(BaseModel):
    """Settings of a training; the first six are the reference's, with its defaults.

    Example:
        TrainingConfiguration(lr=1e-4, training_steps=50, run_dir="runs/first", eval_every=5)
    """

    model_config = ConfigDict(extra="forbid")

    lr: float = Field(default=3e-3, gt=0, description="Peak learning rate; pretrained models want 1e-6 to 1e-5.")
    batch_size: int = Field(default=16, ge=1, description="Steps of the algorithm in a batch.")
    optimizer: Literal["adam", "adamw", "sgd", "rmsprop", "adagrad"] = Field(
        default="adamw", description="The optimizer."
    )
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="Batches of an optimizer step.")
    training_steps: int = Field(default=1024, ge=1, description="Experiences to collect and train on.")
    num_episodes_per_experience: int = Field(default=8, ge=1, description="Rollouts of an experience.")

    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate changes over the training steps."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps of linear warm-up.")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="Share of the peak left at the end.")
    weight_decay: float = Field(default=0.0, ge=0, description="On matrices only.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this norm.")
    seed: int = Field(default=0, ge=0, description="Every rollout's seed derives from it.")

    run_dir: Path | None = Field(
        default=None, description="Folder of log and checkpoints; null: nothing is written, and nothing can go on."
    )
    checkpoint_every: int = Field(default=10, ge=1, description="Experiences between checkpoints in run_dir.")
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints that stay.")
    resume: bool = Field(default=False, description="Go on from the newest checkpoint in run_dir.")

    eval_every: int | None = Field(default=None, ge=1, description="Experiences between evaluations; null: none.")
    eval_rollouts: int = Field(default=16, ge=1, description="Rollouts of an evaluation.")
    patience: int | None = Field(
        default=None, ge=1, description="Stop after so many evaluations without a better one; null: never."
    )

    max_minutes: float | None = Field(default=None, gt=0, description="Stop after this long, resumably.")
    max_steps: int | None = Field(default=None, ge=1, description="Stop after so many optimizer steps.")
    max_empty: int = Field(
        default=3, ge=1, description="Experiences in a row that moved no weight before it stops, or fails at the start."
    )
