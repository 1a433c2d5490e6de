"""The dataset of word problems, each with its right answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.interfaces import Builder, DatasetLoader
from reinforge.registry import register_dataset
from reinforge.tasks.word_problems.problems import (
    CONFIRM_WORDINGS,
    WORDINGS,
    Calculation,
    list_calculations,
    write_problem,
)
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random

SPLITS = ("train", "select", "confirm")
SHARES = {"train": 0.6, "select": 0.1, "confirm": 0.3}
"""Share of the calculations of each operator that a split's problems use."""


class WordProblemsDatasetConfig(DatasetConfig, name="word_problems"):
    """Number of problems per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=512, ge=1, le=4000, description="Problems to train on.")
    num_select: int = Field(default=60, ge=1, le=400, description="Problems to select the best checkpoint on.")
    num_confirm: int = Field(default=200, ge=1, le=1000, description="Problems for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the problems.")


class WordProblemsDataset(DatasetLoader):
    """Rows such as `{"id": "train-00017", "split": "train", "question": "Ana has 12 ...", "answer": "17"}`.

    The four operators take turns. No calculation occurs in two splits, and no problem twice.
    """

    def __init__(self, config: WordProblemsDatasetConfig):
        self.config = config

    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows, in the order train, select, confirm."""
        calculations = self._split_calculations()
        rows = []
        for split in SPLITS:
            rng, seen = stable_random(self.config.seed, "word problems", split), set[str]()
            wordings = CONFIRM_WORDINGS if split == "confirm" else WORDINGS
            for index in range(getattr(self.config, f"num_{split}")):
                operator = "+-*/"[index % 4]
                text = ""
                while not text or text in seen:
                    calculation = rng.choice(calculations[split, operator])
                    text = write_problem(rng, calculation, wordings)
                seen.add(text)
                answer = str(calculation.result)
                rows.append({"id": f"{split}-{index:05}", "split": split, "question": text, "answer": answer})
        return rows

    def _split_calculations(self) -> dict[tuple[str, str], list[Calculation]]:
        found: dict[tuple[str, str], list[Calculation]] = {}
        for operator in WORDINGS:
            every = [each for each in list_calculations() if each.operator == operator]
            stable_random(self.config.seed, "calculations", operator).shuffle(every)
            start = 0
            for split in SPLITS:
                end = start + round(SHARES[split] * len(every))
                found[split, operator] = every[start:end]
                start = end
        return found

    def load(self) -> list[EvalInputItem]:
        """Returns every row as an example."""
        return [
            EvalInputItem(
                id=row["id"], input_obj=row["question"], expected_output_obj=row["answer"], full_dataset_entry=row
            )
            for row in self.rows()
        ]


@register_dataset(config_type=WordProblemsDatasetConfig)
async def word_problems_dataset(
    config: WordProblemsDatasetConfig, builder: Builder
) -> AsyncIterator[WordProblemsDataset]:
    """Yields the dataset."""
    yield WordProblemsDataset(config)
