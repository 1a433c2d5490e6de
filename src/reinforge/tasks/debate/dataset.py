"""The dataset of the debate; no problem is in two splits."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.registry import register_dataset
from reinforge.tasks.datasets import SplitDataset
from reinforge.tasks.debate.cells import sample_cells
from reinforge.types.seeding import stable_random


class CellsDatasetConfig(DatasetConfig, name="cells"):
    """Number of problems per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=2048, ge=1, description="Problems to train on.")
    num_select: int = Field(default=200, ge=1, description="Problems to select the best checkpoint on.")
    num_confirm: int = Field(default=500, ge=1, description="Problems for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the problems.")


@register_dataset(config_type=CellsDatasetConfig)
class CellsDataset(SplitDataset):
    """Rows such as `{"id": "train-00017", "cells": "a3 b2 ...", "seen": "b2 g1", "answer": "reject"}`."""

    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows, in the order train, select, confirm."""
        rng = stable_random(self.config.seed, "cells")
        return self.write_rows(lambda split, index: sample_cells(rng).to_row())
