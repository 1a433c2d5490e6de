"""The dataset of games: the agent's side, and the seed of the opponent's moves."""

from __future__ import annotations

import random
from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.registry import register_dataset
from reinforge.tasks.datasets import SPLITS, SplitDataset
from reinforge.types.evaluation import EvalInputItem

NUM_WORLD_SEEDS = 2**31


class TicTacToeDatasetConfig(DatasetConfig, name="tic_tac_toe"):
    """Number of games per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=8192, ge=1, description="Games to train on.")
    num_select: int = Field(default=200, ge=1, description="Games to select the best checkpoint on.")
    num_confirm: int = Field(default=1000, ge=1, description="Games for the verdict.")
    sharp_train: float = Field(
        default=0.0, ge=0, le=1, description="Share of training games whose opponent always completes its lines."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the opponents' seeds.")


@register_dataset(config_type=TicTacToeDatasetConfig)
class TicTacToeDataset(SplitDataset):
    """Rows such as `{"id": "train-00017", "split": "train", "side": "O", "opponent": "random", "world_seed": 9383}`.

    Sides alternate, so each split has as many games of either side; no two rows share a `world_seed`. The opponent in
    `select` and `confirm` is always uniformly random, since that is the win rate reported. A training game may have a
    sharp opponent, which punishes an open threat at once instead of one time in five.
    """

    def rows(self) -> list[dict[str, Any]]:
        sizes = {split: getattr(self.config, f"num_{split}") for split in SPLITS}
        seeds = iter(random.Random(self.config.seed).sample(range(NUM_WORLD_SEEDS), sum(sizes.values())))
        return [self._row(split, index, next(seeds)) for split, size in sizes.items() for index in range(size)]

    def _row(self, split: str, index: int, world_seed: int) -> dict[str, Any]:
        is_sharp = split == "train" and random.Random(world_seed).random() < self.config.sharp_train
        return {
            "id": f"{split}-{index:05}",
            "split": split,
            "side": "XO"[index % 2],
            "opponent": "sharp" if is_sharp else "random",
            "world_seed": world_seed,
        }

    def load(self) -> list[EvalInputItem]:
        rows = [(row, {key: row[key] for key in ("side", "opponent", "world_seed")}) for row in self.rows()]
        return [
            EvalInputItem(id=row["id"], input_obj=game, expected_output_obj=None, full_dataset_entry=row)
            for row, game in rows
        ]
