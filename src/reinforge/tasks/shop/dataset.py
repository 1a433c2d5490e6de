"""The dataset of questions, each with its right answer."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.registry import register_dataset
from reinforge.tasks.datasets import SplitDataset
from reinforge.tasks.shop.questions import write_question
from reinforge.types.seeding import stable_random


class ShopDatasetConfig(DatasetConfig, name="shop"):
    """Number of questions per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=512, ge=1, le=2000, description="Questions to train on.")
    num_select: int = Field(default=60, ge=1, le=200, description="Questions to select the best checkpoint on.")
    num_confirm: int = Field(default=200, ge=1, le=500, description="Questions for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the questions.")


@register_dataset(config_type=ShopDatasetConfig)
class ShopDataset(SplitDataset):
    """Rows such as `{"id": "train-00017", "split": "train", "question": "What do 3 ...", "answer": "72"}`."""

    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows, in the order train, select, confirm."""
        rng = stable_random(self.config.seed, "shop")

        def write(split: str, index: int) -> dict[str, Any]:
            question = write_question(rng)
            return {"question": question.text, "answer": str(question.answer)}

        return self.write_rows(write)
