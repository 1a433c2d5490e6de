"""What a search has done so far: the file `search.json`, from which it resumes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from reinforge.config.imports import PYTHON_OBJECT
from reinforge.errors import ConfigError, Problem
from reinforge.files import find_json, read_json_file, write_json
from reinforge.improvement.outcomes import SearchOutcome, TaskFeatures
from reinforge.improvement.recipes import ANSWERS, PAIRS, PIPELINE, REWARDS, SIGNAL, Overrides, SearchRecipe
from reinforge.runs.rows import ValidationRow
from reinforge.runs.summary import format_duration
from reinforge.trainer.context import RESERVED
from reinforge.trainer.evaluate import Evaluation

SEARCH, RECIPE = "search.json", "recipe.yml"
MAX_EPOCHS = 1000  # epochs that a trial may have; the budget ends it long before
VERDICT_SHARE, LEAST_SHARE = 0.2, 0.05
"""Shares of the budget that are kept for the verdict: while what it takes is unknown, and at least, since the last
trial may overrun its share by half an epoch."""
MARGIN = 1.1
"""How many times what the untouched agent took on `confirm` is kept for the winner; more if its replies got longer."""
MIN_EPISODES = 30  # with fewer, that all are alike may be chance
MOST_SAMPLES = 1.5  # per episode, for which half of the episodes may still be in a preference pair


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
    select_cost: float = 0.0  # of that measurement on `select` alone
    has_baseline: bool = False  # the first trial's measurement, so that its start did not pay for one
    growth: float = 1.0  # length of its replies in the last epoch, relative to the first
    judge_cost: float | None = None
    """What the untouched agent took on `confirm`, once the share of the rung is to pay the verdict, too."""
    finished: int = -1  # the last rung that it has finished
    rung: int = -1  # the last rung that it has begun
    rung_from: float = 0.0  # `used` when that began
    rung_epochs: int = 0  # `epochs` when that began
    gain_rate: float | None = None  # gain on `select` for each unit of the budget, at the end of its first rung
    rung_best: list[int | None] = field(default_factory=list)  # `best_epoch` at the end of each rung
    rung_end: float = 0.0  # up to where `used` may grow in it
    baseline: float | None = None  # the untrained model's score
    score: float | None = None  # the best one
    best_epoch: int | None = None
    stopped: str | None = None  # why it is not trained on; None: it may be
    is_behind: bool = False  # that is only because another was better
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
        """Mean cost of an epoch of the current rung, or of all epochs until one of it has ended."""
        new = self.epochs - self.rung_epochs
        if new:
            return (self.used - max(self.rung_from, self.start_cost)) / new
        return (self.used - self.start_cost) / self.epochs if self.epochs else 0.0

    @property
    def ahead(self) -> float:
        """What it takes to train one more epoch (half of it, if others share the overrun) and to end the rung."""
        measured = self.growth * self.select_cost
        if self.judge_cost is None:
            return self.epoch_cost / 2 + measured
        return self.epoch_cost + measured + max(MARGIN, self.growth) * self.judge_cost

    @property
    def resume_cost(self) -> float:
        return max(0.0, self.start_cost - self.prompt_cost - (0.0 if self.has_baseline else self.select_cost))

    def has_used_share(self, *, is_running: bool = True) -> bool:
        """Returns whether another epoch would leave the share of the rung; each rung but the last has one."""
        if self.seed is not None:
            return self.epochs >= self.most_epochs
        if self.judge_cost is None:
            return self.epochs > self.rung_epochs and self.used + self.ahead > self.rung_end
        return self.used + self.ahead + (0.0 if is_running else self.resume_cost) > self.rung_end

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
    has_answers: bool = True  # some training examples have an expected answer
    samples_per_episode: float = 1.0  # more where the agent rewrites its history between turns; 1 if unknown
    features: TaskFeatures = field(default_factory=TaskFeatures)

    def find_missing(self) -> list[str]:
        """Returns what recipes need, but these episodes or the examples do not have."""
        known = self.num_episodes >= MIN_EPISODES
        is_flat = known and (self.lowest == self.highest or (self.num_groups > 0 and self.num_with_signal == 0))
        missing = {
            ANSWERS: not self.has_answers,
            REWARDS: known and self.lowest == self.highest,
            SIGNAL: is_flat,
            PAIRS: is_flat or self.samples_per_episode > MOST_SAMPLES,
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
    """What one model takes on `confirm`, as the first trial predicts it, and then measured; 0: unknown."""
    judged: float = 0.0  # what the verdict took, and those on other seeds
    num_seeds: int = 1  # trainings of the winner, with the search's own
    repeats: list[Trial] = field(default_factory=list)
    before: Evaluation | None = None
    """The untouched agent on `confirm`, without its episodes; None: not measured, as no trial has beaten it yet."""
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
        """What the trials and repeated trainings may use together; the rest is for the verdict.

        Once the untouched agent is measured, their shares pay what is left of the verdict; see `Trial.judge_cost`.
        """
        if self.before is not None:
            return self.budget.total - self.judged
        return self.budget.total - max(self.verdict_share * self.budget.total, self.verdict_cost)

    def read_outcome(self) -> SearchOutcome | None:
        """Returns what each recipe gained in its first rung; None: none was measured."""
        rates = {trial.recipe.name: trial.gain_rate for trial in self.trials}
        gains = {name: 60 * rate for name, rate in rates.items() if rate is not None}
        return SearchOutcome(self.folder.name, self.first_epoch.features, gains) if gains and self.first_epoch else None

    @property
    def open_trials(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.stopped is None]

    def write(self) -> None:
        values = asdict(self)
        del values["folder"]
        write_json(self.folder / SEARCH, values)

    @classmethod
    def read(cls, folder: Path) -> Self:
        if not (folder / SEARCH).is_file():
            fix = "name the folder that `reinforge improve` printed"
            raise ConfigError(Problem("--resume", f"{folder} is not a search: it has no {SEARCH}", fix))
        return TypeAdapter(cls).validate_python({**read_json_file(folder / SEARCH), "folder": folder})


def describe_recipe(path: Path) -> str:
    """Returns what runs a recipe, and first what to write in place of functions that only Python can pass."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    command, passed = f"reinforge finetune {path}", list_passed(text)
    if not passed:
        return command
    return f"{command}, once it names {', '.join(passed)} as `module:name` in a file of the project"


def list_passed(recipe: str) -> list[str]:
    """Returns the functions of a recipe that were passed in Python, which no file can name."""
    return list(dict.fromkeys(each["name"] for each in PYTHON_OBJECT.finditer(recipe)))


def read_validations(record: SearchRecord, trial: Trial) -> list[ValidationRow]:
    rows = find_json(record.locate(trial) / "validation_history.json") or []
    return [ValidationRow.from_dict(row) for row in rows]
