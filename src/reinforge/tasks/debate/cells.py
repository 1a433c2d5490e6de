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
