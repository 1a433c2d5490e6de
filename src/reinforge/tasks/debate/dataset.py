"""Problems for the debate: no problem stands in two splits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.interfaces import DatasetLoader
from reinforge.registry import register_dataset
from reinforge.tasks.debate.cells import draw_cells
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random


class CellsDatasetConfig(DatasetConfig, name="cells"):
    """How many problems each split holds; set `splits.key: split`, since every row names its own."""

    num_train: int = Field(default=2048, ge=1, description="Problems to train on.")
    num_select: int = Field(default=200, ge=1, description="Problems to choose the best checkpoint on.")
    num_confirm: int = Field(default=500, ge=1, description="Problems for the verdict.")
    seed: int = Field(default=0, ge=0, description="Problems are drawn by this seed.")


class CellsDataset(DatasetLoader):
    """Rows such as `{"id": "train-00017", "cells": "a3 b5 ...", "seen": "b5 g1", "answer": "reject"}`."""

    def __init__(self, config: CellsDatasetConfig):
        self.config = config

    def rows(self) -> list[dict[str, Any]]:
        """Returns every row, in the order train, select, confirm."""
        rng, known = stable_random(self.config.seed, "cells"), set[str]()
        rows = []
        for split in ("train", "select", "confirm"):
            for index in range(getattr(self.config, f"num_{split}")):
                row = draw_cells(rng).row()
                while row["question"] in known:
                    row = draw_cells(rng).row()
                known.add(row["question"])
                rows.append({"id": f"{split}-{index:05}", "split": split, **row})
        return rows

    def load(self) -> list[EvalInputItem]:
        """Returns every problem as an example, the right decision as what is expected."""
        return [
            EvalInputItem(
                id=row["id"], input_obj=row["question"], expected_output_obj=row["answer"], full_dataset_entry=row
            )
            for row in self.rows()
        ]


@register_dataset(config_type=CellsDatasetConfig)
async def cells_dataset(config: CellsDatasetConfig, builder: Any) -> AsyncIterator[CellsDataset]:
    """Yields the dataset."""
    yield CellsDataset(config)
