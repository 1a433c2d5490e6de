"""One-step word problems: a calculation with two numbers, told as a story.

    12 + 5   Ana has 12 apples and buys 5 more. How many apples does Ana have now?                      17
    6 * 8    A box holds 8 marbles. How many marbles do 6 boxes hold?                                   48

The problems for the verdict share neither a calculation nor a wording with those that are trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Wordings = Mapping[str, tuple[str, ...]]
"""Wordings by operator."""

WORDINGS: Wordings = {
    "+": (
        "{name} has {left} {things} and buys {right} more. How many {things} does {name} have now?",
        "There are {left} {things} in a box and {right} in a bag. How many {things} are there in total?",
        "{name} found {left} {things} on Monday and {right} on Tuesday. How many {things} did {name} find altogether?",
        "A shop sold {left} {things} in the morning and {right} in the afternoon. How many {things} did it sell?",
        "{left} {things} are on the table. {name} adds {right} more. How many {things} are on the table?",
        "{name} has {left} {things} and Leo has {right}. How many {things} do they have together?",
    ),
    "-": (
        "{name} has {left} {things} and gives away {right}. How many {things} does {name} have left?",
        "There were {left} {things} in a box. {name} took {right} of them. How many {things} are still in the box?",
        "A shop had {left} {things} and sold {right}. How many {things} are left?",
        "{name} needs {left} {things} and has {right}. How many more {things} does {name} need?",
        "Of {left} {things}, {right} are broken. How many {things} are not broken?",
        "{name} has {left} {things} and Leo has {right}. How many more {things} does {name} have than Leo?",
    ),
    "*": (
        "{name} has {left} boxes with {right} {things} each. How many {things} does {name} have?",
        "A bag holds {right} {things}. How many {things} do {left} bags hold?",
        "{name} buys {right} {things} every day for {left} days. How many {things} does {name} buy in total?",
        "There are {left} tables with {right} {things} on each. How many {things} are on the tables?",
        "{left} children get {right} {things} each. How many {things} do they get altogether?",
        "There are {left} rows of {right} {things}. How many {things} are there?",
    ),
    "/": (
        "{name} shares {left} {things} equally among {right} friends. How many {things} does each friend get?",
        "{left} {things} are put into {right} boxes, the same number in each. How many {things} are in one box?",
        "{name} packs {left} {things} into bags of {right}. How many bags does {name} fill?",
        "{right} children share {left} {things} equally. How many {things} does each child get?",
        "{name} uses {right} {things} a day. For how many days do {left} {things} last?",
        "There are {left} {things} in {right} equal rows. How many {things} are in each row?",
    ),
}
"""Wordings of `train` and `select`."""

CONFIRM_WORDINGS: Wordings = {
    "+": (
        "{name} baked {left} {things} yesterday and {right} today. What is the number of {things} in all?",
        "One shelf holds {left} {things}, another one {right}. How many {things} do both shelves hold?",
        "A basket with {left} {things} gets {right} extra {things}. What is in the basket now, in {things}?",
    ),
    "-": (
        "{name} carried {left} {things} and lost {right} on the way. How many {things} arrived?",
        "Out of {left} {things} in the jar, {right} were eaten. How many {things} remain?",
        "A truck with {left} {things} unloads {right}. How many {things} stay on the truck?",
    ),
    "*": (
        "Each of {left} shelves has {right} {things}. What is the number of {things} on all shelves?",
        "{name} makes {right} {things} an hour. How many {things} does {name} make in {left} hours?",
        "One pack contains {right} {things}. How many {things} are in {left} packs?",
    ),
    "/": (
        "A teacher splits {left} {things} evenly between {right} groups. How many {things} does every group receive?",
        "{left} {things} fill {right} trays equally. How many {things} does a tray hold?",
        "{name} ties {left} {things} into bundles of {right}. How many bundles are there?",
    ),
}
"""Wordings of `confirm`."""

NAMES = ("Ana", "Ben", "Carla", "David", "Emma", "Finn", "Grace", "Hugo", "Iris", "Jack", "Kate", "Liam")
THINGS = ("apples", "pears", "marbles", "books", "pencils", "stamps", "cookies", "shells", "cards", "eggs", "buttons")


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
    """Yields every calculation that a problem may need; of 3 + 5 and 5 + 3 only one, and of products as well.

    Args:
        largest: Largest number of a sum or a difference.
    """
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
