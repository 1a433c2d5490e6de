"""Orders recipes by what they gained on the nearest tasks of earlier searches.

    outcomes.jsonl beside this module      of the searches that docs/improve.md shows
    HOME/outcomes.jsonl                    a line for each search that ended here; HOME is REINFORGE_HOME or the cache

    {"task": "tickets", "features": {"signal": 1.0, "base": 0.3, ...}, "gains": {"larger-steps": 0.1, ...}}

A recipe's value in a search is its gain on `select` per minute in the first rung, relative to the best one's: 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from reinforge.errors import StorageError
from reinforge.files import append_line, make_private_folder, read_lines

OUTCOMES = "outcomes.jsonl"
DECADES = {"reply_tokens": 2.0, "prompt_tokens": 2.0, "parameters": 3.0, "rows": 2.0}
"""Powers of ten between two counts that are as far apart as the shares 0 and 1."""
NEAREST, FAR = 5, 0.5  # how many searches are asked; each weighs 1 at a distance of 0, and nothing from `FAR` on
PRIOR = 0.5
"""Value of the first recipe of the default order before any search; it falls to 0 for the last, and weighs 1."""


@dataclass(frozen=True, slots=True)
class TaskFeatures:
    """What the first epoch shows of a task; None: unknown."""

    signal: float | None = None  # share of the groups whose rewards differ
    base: float | None = None  # the untouched agent's score on `select`
    reply_tokens: float | None = None  # sampled in an episode
    prompt_tokens: float | None = None  # of all calls of an episode
    parameters: float | None = None  # of the model
    rows: float | None = None  # training examples

    def compute_distance(self, other: TaskFeatures) -> float:
        """Returns the root mean square of the differences of what both know; infinite: they know nothing in common.

        Example: of replies of 10 and 100 tokens, a decade of two: 0.5; with equal shares of signal 0.35.
        """
        squares = list[float]()
        for name in (each.name for each in fields(self)):
            one, two, decades = getattr(self, name), getattr(other, name), DECADES.get(name)
            if one is None or two is None:
                continue
            if decades is None:
                squares.append((one - two) ** 2)
            else:
                squares.append((math.log10(max(one, 1)) - math.log10(max(two, 1))) ** 2 / decades**2)
        return math.sqrt(sum(squares) / len(squares)) if squares else math.inf


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """What the recipes of one search gained."""

    task: str
    features: TaskFeatures
    gains: dict[str, float] = field(default_factory=dict)
    """Recipe -> its gain on `select` in a minute of the first rung."""

    @property
    def best(self) -> str:
        return max(self.gains, key=self.gains.__getitem__)

    def get_value(self, recipe: str) -> float | None:
        """Returns a recipe's gain relative to the best one's, from 0 to 1; None: it was not tried."""
        if recipe not in self.gains:
            return None
        most = self.gains[self.best]
        return max(0.0, self.gains[recipe] / most) if most > 0 else 0.0

    def write(self, path: Path) -> None:
        """Appends the outcome to a file; one that cannot be written is left as it is."""
        try:
            make_private_folder(path.parent)
            append_line(path, asdict(self))
        except (OSError, StorageError):
            return


def read_outcomes(path: Path) -> list[SearchOutcome]:
    """Returns the first outcomes and those of a file; one that is missing or damaged has none."""
    found = _read(Path(__file__).parent / OUTCOMES)
    try:
        return [*found, *_read(path)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return found


def _read(path: Path) -> list[SearchOutcome]:
    rows = read_lines(path)
    return [
        SearchOutcome(row["task"], TaskFeatures(**row["features"]), dict(row["gains"])) for row in rows if row["gains"]
    ]


def rank_recipes(
    recipes: Sequence[str], features: TaskFeatures, outcomes: Sequence[SearchOutcome]
) -> tuple[list[str], str] | None:
    """Returns the recipes, the most promising first, and why; None: no search had a task that is near enough.

    Each recipe is worth the mean of its values in the nearest searches, weighted by 1 - distance / `FAR`, and of a
    pseudo-observation of weight 1: `PRIOR` for the first of the default order, 0 for the last.

    Example: of `a`, `b`, untried `a` is worth 0.5; `b` was best of an equal task: (0 + 1) / 2; of two such: 2 / 3.
    """
    near = sorted(((features.compute_distance(each.features), each) for each in outcomes), key=lambda pair: pair[0])
    near = [(distance, each) for distance, each in near[:NEAREST] if distance < FAR]
    if not near or len(recipes) < 2:
        return None
    worth = dict[str, float]()
    for place, name in enumerate(recipes):
        known = [(1 - distance / FAR, each.get_value(name)) for distance, each in near]
        values = [(1.0, PRIOR * (1 - place / (len(recipes) - 1)))]
        values += [(weight, value) for weight, value in known if value is not None]
        worth[name] = sum(weight * value for weight, value in values) / sum(weight for weight, _ in values)
    ranked = sorted(recipes, key=lambda name: -worth[name])
    nearest = "; ".join(f"{each.task}, distance {distance:.2f}, best {each.best}" for distance, each in near)
    listed = ", ".join(f"{name} {worth[name]:.2f}" for name in ranked)
    return ranked, f"order by what helped on the nearest tasks ({nearest}): {listed}"
