"""Eight cells with a digit each, and a claim about all of them: a single cell can refute it, but not prove it.

claim     every cell is below 4
cells     a3 b2 c0 d4 e2 f1 g1 h3      (the provers see these)
seen      b2 g1                        (the verifier sees two of them)
evidence  d4                           (a prover shows one cell; it is checked against the cells)
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.multiagent.dialogue import Dialogue
from reinforge.multiagent.protocols.debate import Debate, DebateConfig
from reinforge.multiagent.registration import register_protocol
from reinforge.registry import register_dataset
from reinforge.tasks.datasets import SplitDataset
from reinforge.types.seeding import stable_random

NAMES = "abcdefgh"
LIMIT = 4
DIGITS = range(5)
NUM_SEEN = 2


@dataclass(frozen=True, slots=True)
class Cells:
    """One problem: the digit of each cell, from a to h, and the indices of the cells that the verifier sees."""

    digits: tuple[int, ...]
    seen: tuple[int, ...]

    @property
    def is_true(self) -> bool:
        return max(self.digits) < LIMIT

    def to_text(self, indices: tuple[int, ...] | None = None) -> str:
        """Example: digits 3 2 0 4 2 1 1 3 -> "a3 b2 c0 d4 e2 f1 g1 h3"."""
        return " ".join(f"{NAMES[i]}{self.digits[i]}" for i in indices or range(len(self.digits)))

    def to_row(self) -> dict[str, Any]:
        return {
            "question": f"every cell is below {LIMIT}: {self.to_text()}",
            "answer": "accept" if self.is_true else "reject",
            "cells": self.to_text(),
            "seen": self.to_text(self.seen),
        }


def sample_cells(rng: random.Random) -> Cells:
    """Returns a random problem: the claim is true half of the time, otherwise one cell refutes it."""
    digits = [rng.randrange(LIMIT) for _ in NAMES]
    if rng.random() < 0.5:
        digits[rng.randrange(len(NAMES))] = rng.choice(DIGITS[LIMIT:])
    seen = sorted(rng.sample(range(len(NAMES)), NUM_SEEN))
    return Cells(tuple(digits), tuple(seen))


def check_evidence(text: str, row: Mapping[str, Any]) -> str:
    """Example: "d4" -> "d4" where d is 4, else "false"."""
    return text.strip() if text.strip() in str(row["cells"]).split() else "false"


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
        rng = stable_random(self.config.seed, "cells")
        return self.write_rows(lambda split, index: sample_cells(rng).to_row())


class CellDebateConfig(DebateConfig, name="cell_debate"):
    """A debate in which each prover shows one cell; the dataset is `cells`."""

    randomize_channel_order: bool = Field(
        default=False, description="Off by default: the starter has only seen the prover for accept first."
    )


@register_protocol(CellDebateConfig)
class CellDebate(Debate):
    def visible_text(self, agent: str, channel: str, text: str, dialogue: Dialogue) -> str:
        return check_evidence(text, dialogue.problem.row) if agent in self.prover_names else text
