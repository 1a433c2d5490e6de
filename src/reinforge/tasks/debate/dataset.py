"""The dataset of the debate; no problem is in two splits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.interfaces import Builder, DatasetLoader
from reinforge.registry import register_dataset
from reinforge.tasks.debate.cells import sample_cells
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random


class CellsDatasetConfig(DatasetConfig, name="cells"):
    """Number of problems per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=2048, ge=1, description="Problems to train on.")
    num_select: int = Field(default=200, ge=1, description="Problems to select the best checkpoint on.")
    num_confirm: int = Field(default=500, ge=1, description="Problems for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the problems.")


class CellsDataset(DatasetLoader):
    """Rows such as `{"id": "train-00017", "cells": "a3 b2 ...", "seen": "b2 g1", "answer": "reject"}`."""

    def __init__(self, config: CellsDatasetConfig):
        self.config = config

    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows, in the order train, select, confirm."""
        rng, known = stable_random(self.config.seed, "cells"), set[str]()
        rows = []
        for split in ("train", "select", "confirm"):
            for index in range(getattr(self.config, f"num_{split}")):
                row = sample_cells(rng).to_row()
                while row["question"] in known:
                    row = sample_cells(rng).to_row()
                known.add(row["question"])
                rows.append({"id": f"{split}-{index:05}", "split": split, **row})
        return rows

    def load(self) -> list[EvalInputItem]:
        """Returns every problem as an example whose expected output is the right decision."""
        return [
            EvalInputItem(
                id=row["id"], input_obj=row["question"], expected_output_obj=row["answer"], full_dataset_entry=row
            )
            for row in self.rows()
        ]


@register_dataset(config_type=CellsDatasetConfig)
async def cells_dataset(config: CellsDatasetConfig, builder: Builder) -> AsyncIterator[CellsDataset]:
    """Yields the dataset."""
    yield CellsDataset(config)
