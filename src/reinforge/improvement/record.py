"""What a search has done so far: the file `search.json`, from which it resumes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from reinforge.errors import ConfigError, Problem
from reinforge.files import find_json, read_json_file, write_json
from reinforge.improvement.recipes import GOOD, GOOD_REWARD, PIPELINE, REWARDS, SIGNAL, Overrides, SearchRecipe
from reinforge.runs.rows import ValidationRow
from reinforge.runs.summary import format_duration
from reinforge.trainer.context import RESERVED

SEARCH, RECIPE = "search.json", "recipe.yml"
MAX_EPOCHS = 1000
"""Epochs that a trial may have; the budget ends it long before."""
VERDICT_SHARE, LEAST_SHARE = 0.2, 0.05
"""Shares of the budget that are kept for the verdict: while what it takes is unknown, and at least, since the last
trial may overrun its share by half an epoch."""
MIN_EPISODES = 30
"""With fewer, that all are alike may be chance."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """What a search may use: seconds, or sampled tokens, which make the same search each time."""

    total: float
    unit: str = "s"  # `s` or `tokens`

    def format(self, amount: float) -> str:
        if self.unit == "tokens":
            return f"{amount:,.0f} tokens"
        return format_duration(amount)


@dataclass(slots=True)
class Trial:
    """One recipe: an ordinary run, which is trained on as long as it is among the best.

    Costs are in the budget's unit; scores are means on `select`.
    """

    number: int
    recipe: SearchRecipe
    used: float = 0.0
    epochs: int = 0
    start_cost: float = 0.0  # of loading the model and measuring it untrained
    finished: int = -1  # the last rung that it has finished
    rung: int = -1  # the last rung that it has begun
    rung_from: float = 0.0  # `used` when that began
    rung_epochs: int = 0  # `epochs` when that began
    rung_best: list[int | None] = field(default_factory=list)  # `best_epoch` at the end of each rung
    rung_end: float = 0.0  # up to where `used` may grow in it
    baseline: float | None = None  # the untrained model's score
    score: float | None = None  # the best one
    best_epoch: int | None = None
    stopped: str | None = None  # why it is not trained on; None: it may be
    prompts: dict[str, str] | None = None  # better texts of the agent, which were found; None: not searched for yet
    prompt_cost: float = 0.0  # of that search
    rows: str | None = None  # the file with the replies to imitate, which it left; None: the prompts are used instead
    seed: int | None = None  # of a winner that is trained again; None: a trial of the search
    most_epochs: int = MAX_EPOCHS
    improvement: dict[str, Any] | None = None  # on `confirm`, of a winner that was trained again

    @property
    def overrides(self) -> Overrides:
        """What the trial changes, with the prompts or the rows that it found."""
        texts = ((f"prompts.{name}", json.dumps(text)) for name, text in (self.prompts or {}).items())
        rows = () if self.rows is None else ((f"{PIPELINE}.imitate.dataset", json.dumps(self.rows)),)
        return (*self.recipe.overrides, *rows, *texts)

    @property
    def epoch_cost(self) -> float:
        """Mean cost of an epoch of the current rung; 0: none has ended."""
        new = self.epochs - self.rung_epochs
        return (self.used - max(self.rung_from, self.start_cost)) / new if new else 0.0

    @property
    def has_used_share(self) -> bool:
        """Whether another epoch would leave the share of the rung by more than a half of it; each rung has an epoch."""
        if self.seed is not None:
            return self.epochs >= self.most_epochs
        return self.epochs > self.rung_epochs and self.used + self.epoch_cost / 2 > self.rung_end

    @property
    def name(self) -> str:
        return f"seed-{self.seed}" if self.seed is not None else f"{self.number:02}-{self.recipe.name}"


@dataclass(frozen=True, slots=True)
class FirstEpoch:
    """What the untouched agent earned on `select`, and in the first epoch of the first trial."""

    num_episodes: int  # of both, with a reward
    lowest: float  # of these rewards
    highest: float
    num_groups: int  # of the epoch; 0: the algorithm does not compare siblings, or it is unknown
    num_with_signal: int  # those of them whose rewards differ enough
    is_solved: bool  # every score on `select` is 1, nearly all of the epoch are, and none is higher

    def find_missing(self) -> list[str]:
        """Returns what recipes need, but these episodes do not have."""
        if self.num_episodes < MIN_EPISODES:
            return []
        missing = {
            REWARDS: self.lowest == self.highest,
            GOOD: self.highest < GOOD_REWARD,
            SIGNAL: self.lowest == self.highest or (self.num_groups > 0 and self.num_with_signal == 0),
        }
        return [need for need, is_missing in missing.items() if is_missing]

    def __str__(self) -> str:
        if self.lowest == self.highest:
            return f"all {self.num_episodes} episodes have the reward {self.lowest:g}"
        groups = f", which differ in {self.num_with_signal} of {self.num_groups} groups" if self.num_groups else ""
        return f"{self.num_episodes} episodes have rewards from {self.lowest:g} to {self.highest:g}{groups}"


@dataclass
class SearchRecord:
    """The state of a search, written after each of its steps."""

    folder: Path
    budget: SearchBudget
    trials: list[Trial] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    rung: int = 0
    sizes: list[int] = field(default_factory=list)
    """Number of trials in each rung; empty: the first trial has not shown yet what a trial costs."""
    first_epoch: FirstEpoch | None = None  # None: unknown
    arm_cost: float = 0.0
    """What one model takes on `confirm`, as the first trial predicts it; 0: it cannot."""
    judged: float = 0.0  # what the verdict took, and those on other seeds
    num_seeds: int = 1  # trainings of the winner, with the search's own
    repeats: list[Trial] = field(default_factory=list)
    untouched: dict[str, float] = field(default_factory=dict)
    """The untouched agent's score on each `confirm` example."""
    result: dict[str, Any] | None = None  # once it is over

    def locate(self, trial: Trial) -> Path:
        return self.folder / ("trials" if trial.seed is None else "seeds") / trial.name

    @property
    def used(self) -> float:
        return self.judged + sum(trial.used for trial in (*self.trials, *self.repeats))

    @property
    def verdict_cost(self) -> float:
        """What the untouched agent and each training of the winner may take on `confirm`: predicted, with a margin."""
        return RESERVED * (1 + self.num_seeds) * self.arm_cost

    @property
    def verdict_share(self) -> float:
        return LEAST_SHARE if self.arm_cost else VERDICT_SHARE

    @property
    def for_trials(self) -> float:
        """What the trials and repeated trainings may use together; the rest is for the verdict."""
        return self.budget.total - max(self.verdict_share * self.budget.total, self.verdict_cost)

    @property
    def open_trials(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.stopped is None]

    def write(self) -> None:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "folder"}
        values |= {name: list(map(asdict, getattr(self, name))) for name in ("trials", "repeats")}
        values["first_epoch"] = None if self.first_epoch is None else asdict(self.first_epoch)
        write_json(self.folder / SEARCH, {**values, "budget": asdict(self.budget)})

    @classmethod
    def read(cls, folder: Path) -> Self:
        if not (folder / SEARCH).is_file():
            fix = "name the folder that `reinforge improve` printed"
            raise ConfigError(Problem("--resume", f"{folder} is not a search: it has no {SEARCH}", fix))
        data = read_json_file(folder / SEARCH)
        for name in ("trials", "repeats"):
            data[name] = list(map(_read_trial, data[name]))
        if (first := data["first_epoch"]) is not None:
            data["first_epoch"] = FirstEpoch(**first)
        return cls(folder, SearchBudget(**data.pop("budget")), **data)


def read_validations(record: SearchRecord, trial: Trial) -> list[ValidationRow]:
    rows = find_json(record.locate(trial) / "validation_history.json") or []
    return [ValidationRow.from_dict(row) for row in rows]


def _read_trial(row: dict[str, Any]) -> Trial:
    recipe = row.pop("recipe")
    overrides = tuple((path, value) for path, value in recipe.pop("overrides"))
    return Trial(recipe=SearchRecipe(**recipe, overrides=overrides), **row)
