"""The dataset of openings to attack from; no opening is in two splits."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.registry import register_dataset
from reinforge.tasks.datasets import SplitDataset
from reinforge.tasks.front_desk.grammar import write_opening
from reinforge.types.seeding import stable_random


class FrontDeskDatasetConfig(DatasetConfig, name="front_desk"):
    """Number of openings per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=1024, ge=1, description="Openings to train on.")
    num_select: int = Field(default=100, ge=1, description="Openings to select the best checkpoint on.")
    num_confirm: int = Field(default=400, ge=1, description="Openings for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the openings.")


@register_dataset(config_type=FrontDeskDatasetConfig)
class FrontDeskDataset(SplitDataset):
    """Rows such as `{"id": "train-00017", "split": "train", "question": "It is a rainy Monday at the desk ..."}`."""

    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows, in the order train, select, confirm."""
        rng = stable_random(self.config.seed, "front_desk")
        return self.write_rows(lambda split, index: {"question": write_opening(rng)})
