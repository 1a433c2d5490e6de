"""The dataset of openings to attack from; no opening is in two splits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.interfaces import Builder, DatasetLoader
from reinforge.registry import register_dataset
from reinforge.tasks.front_desk.grammar import write_opening
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random


class FrontDeskDatasetConfig(DatasetConfig, name="front_desk"):
    """Number of openings per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=1024, ge=1, description="Openings to train on.")
    num_select: int = Field(default=100, ge=1, description="Openings to select the best checkpoint on.")
    num_confirm: int = Field(default=400, ge=1, description="Openings for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the openings.")


class FrontDeskDataset(DatasetLoader):
    """Rows such as `{"id": "train-00017", "split": "train", "question": "It is a rainy Monday at the desk ..."}`."""

    def __init__(self, config: FrontDeskDatasetConfig):
        self.config = config

    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows, in the order train, select, confirm."""
        rng, seen = stable_random(self.config.seed, "front_desk"), set[str]()
        rows = []
        for split in ("train", "select", "confirm"):
            for index in range(getattr(self.config, f"num_{split}")):
                opening = write_opening(rng)
                while opening in seen:
                    opening = write_opening(rng)
                seen.add(opening)
                rows.append({"id": f"{split}-{index:05}", "split": split, "question": opening})
        return rows

    def load(self) -> list[EvalInputItem]:
        """Returns every opening as the question of an example."""
        return [
            EvalInputItem(id=row["id"], input_obj=row["question"], expected_output_obj=None, full_dataset_entry=row)
            for row in self.rows()
        ]


@register_dataset(config_type=FrontDeskDatasetConfig)
async def front_desk_dataset(config: FrontDeskDatasetConfig, builder: Builder) -> AsyncIterator[FrontDeskDataset]:
    """Yields the dataset."""
    yield FrontDeskDataset(config)
