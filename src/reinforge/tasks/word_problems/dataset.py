"""The dataset of word problems, each with its right answer."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.registry import register_dataset
from reinforge.tasks.datasets import SPLITS, SplitDataset
from reinforge.tasks.word_problems.problems import (
    CONFIRM_WORDINGS,
    WORDINGS,
    Calculation,
    list_calculations,
    write_problem,
)
from reinforge.types.seeding import stable_random

SHARES = {"train": 0.6, "select": 0.1, "confirm": 0.3}
"""Share of the calculations of each operator that a split's problems use."""


class WordProblemsDatasetConfig(DatasetConfig, name="word_problems"):
    """Number of problems per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=512, ge=1, le=4000, description="Problems to train on.")
    num_select: int = Field(default=60, ge=1, le=400, description="Problems to select the best checkpoint on.")
    num_confirm: int = Field(default=200, ge=1, le=1000, description="Problems for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the problems.")


@register_dataset(config_type=WordProblemsDatasetConfig)
class WordProblemsDataset(SplitDataset):
    """Rows such as `{"id": "train-00017", "split": "train", "question": "Ana has 12 ...", "answer": "17"}`.

    The four operators take turns. No calculation occurs in two splits.
    """

    def rows(self) -> list[dict[str, Any]]:
        calculations = self._split_calculations()
        rngs = {split: stable_random(self.config.seed, "word problems", split) for split in SPLITS}

        def write(split: str, index: int) -> dict[str, Any]:
            calculation = rngs[split].choice(calculations[split, "+-*/"[index % 4]])
            wordings = CONFIRM_WORDINGS if split == "confirm" else WORDINGS
            text = write_problem(rngs[split], calculation, wordings)
            return {"question": text, "answer": str(calculation.result)}

        return self.write_rows(write)

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
