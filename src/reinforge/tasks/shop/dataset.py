"""The dataset of questions, each with its right answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.interfaces import Builder, DatasetLoader
from reinforge.registry import register_dataset
from reinforge.tasks.shop.questions import write_question
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random


class ShopDatasetConfig(DatasetConfig, name="shop"):
    """Number of questions per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=512, ge=1, le=2000, description="Questions to train on.")
    num_select: int = Field(default=60, ge=1, le=200, description="Questions to select the best checkpoint on.")
    num_confirm: int = Field(default=200, ge=1, le=500, description="Questions for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the questions.")


class ShopDataset(DatasetLoader):
    """Rows such as `{"id": "train-00017", "split": "train", "question": "What do 3 ...", "answer": "72"}`.

    No question occurs twice.
    """

    def __init__(self, config: ShopDatasetConfig):
        self.config = config

    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows, in the order train, select, confirm."""
        rng, seen = stable_random(self.config.seed, "shop"), set[str]()
        rows = []
        for split in ("train", "select", "confirm"):
            for index in range(getattr(self.config, f"num_{split}")):
                question = write_question(rng)
                while question.text in seen:
                    question = write_question(rng)
                seen.add(question.text)
                answer = str(question.answer)
                rows.append({"id": f"{split}-{index:05}", "split": split, "question": question.text, "answer": answer})
        return rows

    def load(self) -> list[EvalInputItem]:
        """Returns every row as an example."""
        return [
            EvalInputItem(
                id=row["id"], input_obj=row["question"], expected_output_obj=row["answer"], full_dataset_entry=row
            )
            for row in self.rows()
        ]


@register_dataset(config_type=ShopDatasetConfig)
async def shop_dataset(config: ShopDatasetConfig, builder: Builder) -> AsyncIterator[ShopDataset]:
    """Yields the dataset."""
    yield ShopDataset(config)
