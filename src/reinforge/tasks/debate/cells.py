"""Eight cells with a digit each, and a claim about all of them: one cell can refute it, and none can prove it.

claim     every cell is below 7
cells     a3 b5 c0 d9 e2 f4 g1 h5      (the provers see these)
sight     b5 g1                        (the verifier sees two of them)
evidence  d9                           (a prover shows one cell; it is checked against the cells)
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = "abcdefgh"
LIMIT = 7
NUM_SEEN = 2


@dataclass(frozen=True, slots=True)
class Cells:
    """One problem.

    Attributes:
        digits: One digit a cell, from a to h.
        seen: The cells that the verifier sees, by index.
    """

    digits: tuple[int, ...]
    seen: tuple[int, ...]

    @property
    def is_true(self) -> bool:
        """Whether the claim holds."""
        return max(self.digits) < LIMIT

    def write(self, which: tuple[int, ...] | None = None) -> str:
        """Returns cells as text, all of them or some.

        Example: digits 3 5 0 9 2 4 1 5 -> "a3 b5 c0 d9 e2 f4 g1 h5".
        """
        return " ".join(f"{NAMES[i]}{self.digits[i]}" for i in which or range(len(self.digits)))

    def row(self) -> dict[str, Any]:
        """Returns the columns of a dataset."""
        return {
            "question": f"every cell is below {LIMIT}: {self.write()}",
            "answer": "accept" if self.is_true else "reject",
            "cells": self.write(),
            "seen": self.write(self.seen),
        }


def draw_cells(rng: random.Random) -> Cells:
    """Returns a problem: the claim is true half the time, and otherwise one cell refutes it."""
    digits = [rng.randrange(LIMIT) for _ in NAMES]
    if rng.random() < 0.5:
        digits[rng.randrange(len(NAMES))] = rng.randrange(LIMIT, 10)
    seen = sorted(rng.sample(range(len(NAMES)), NUM_SEEN))
    return Cells(tuple(digits), tuple(seen))


def checked(said: str, row: Mapping[str, Any]) -> str:
    """Returns what a prover's message shows: its evidence where that is true of the cells.

    Example: "d9" -> "d9" where d is 9, else "false".

    Args:
        said: The message.
        row: The problem's columns.
    """
    return said.strip() if said.strip() in str(row["cells"]).split() else "false"
