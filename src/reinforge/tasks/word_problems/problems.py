"""One-step word problems: a calculation with two numbers, told as a story.

    12 + 5   Ana has 12 apples and buys 5 more. How many apples does Ana have now?                      17
    6 * 8    A box holds 8 marbles. How many marbles do 6 boxes hold?                                   48

The problems for the verdict share neither a calculation nor a wording with those that are trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reinforge.tasks.datasets import read_words

Wordings = Mapping[str, Sequence[str]]  # wordings by operator

_WORDS = read_words(__file__)
WORDINGS: Wordings = _WORDS["wordings"]  # wordings of `train` and `select`
CONFIRM_WORDINGS: Wordings = _WORDS["confirm_wordings"]
NAMES = _WORDS["names"]
THINGS = _WORDS["things"]


@dataclass(frozen=True, slots=True)
class Calculation:
    """A calculation with two numbers, such as 12 + 5; its result is a whole number above 0."""

    left: int
    operator: str
    right: int

    @property
    def result(self) -> int:
        left, right = self.left, self.right
        return {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[self.operator]


def list_calculations(largest: int = 29, largest_factor: int = 12) -> Iterator[Calculation]:
    """Yields every calculation that a problem may need; of 3 + 5 and 5 + 3 only one, and of products as well."""
    for small in range(2, largest + 1):
        for large in range(small, largest + 1):
            yield Calculation(large, "+", small)
            if large > small:
                yield Calculation(large, "-", small)
    for small in range(2, largest_factor + 1):
        for large in range(small, largest_factor + 1):
            yield Calculation(small, "*", large)
            yield Calculation(small * large, "/", small)


def write_problem(rng: random.Random, calculation: Calculation, wordings: Wordings) -> str:
    """Returns a problem whose answer is the calculation's result."""
    left, right = calculation.left, calculation.right
    if calculation.operator in "+*" and rng.random() < 0.5:
        left, right = right, left
    wording = rng.choice(wordings[calculation.operator])
    return wording.format(left=left, right=right, name=rng.choice(NAMES), things=rng.choice(THINGS))
