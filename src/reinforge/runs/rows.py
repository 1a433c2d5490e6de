"""What the journal of a run and its JSON files hold: one dataclass per kind of row.

journal (run.sqlite)                           Session, StageRow, JobRow, EpisodeRow, PolicyVersion, SnapshotRow,
                                               EpochSnapshot
training_metrics.jsonl, reward_history.json    EpochMetrics
validation_history.json                        ValidationRow
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self

from reinforge.types.evaluation import MetricSummary
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.trajectory import Outcome

BASELINE = -1  # the epoch of everything that happens before the first one
PHASES = {
    "COLLECT": "collect",
    "BASELINE": "validate",
    "VALIDATE": "validate",
    "CONFIRM_BASE": "confirm_base",
    "CONFIRM_TUNED": "confirm_tuned",
    "CONFIRM_REFERENCE": "confirm_reference",
    "REGRESSION_BASE": "regression_base",
    "REGRESSION_TUNED": "regression_tuned",
    "TRANSFER_BASE": "transfer_base",
    "TRANSFER_TUNED": "transfer_tuned",
    "TRANSFER_REFERENCE": "transfer_reference",
}
"""Stage -> the phase of its episodes."""
MISSING = [outcome.value for outcome in Outcome if outcome.is_missing]
"""Outcomes of episodes that failed for reasons outside the policy."""


@dataclass(frozen=True, slots=True)
class Session:
    """One process that worked on a run; times are seconds since the Unix epoch."""

    id: int  # from 1, in the order of the sessions
    started_s: float
    pid: int
    host: str
    resumed_after: int | None  # the last finished epoch when it started; -1: none was; None: it started from scratch
    ended_s: float | None  # None: it is still running, or was killed
    ended: str | None  # how, for example `completed`


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage, such as `COLLECT`, that ended at `at_s` seconds since the Unix epoch; epoch -1: outside the epochs."""

    epoch: int
    stage: str
    at_s: float
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobRow:
    """One training job."""

    job_key: str
    epoch: int
    backend: str | None  # where it runs; None: it has not been submitted yet
    state: str  # `intent` before it is submitted, then the value of its `TrainingStatusEnum`
    ref: TrainingJobRef | None  # its name there
    status: TrainingJobStatus | None  # its last known status; None: the backend has not reported one yet


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One finished episode as `dump_episode` wrote it; its key is `phase/epoch/round/example/generation`."""

    key: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EpisodeHead:
    """A finished episode without its messages."""

    key: str
    epoch: int  # -1: the baseline
    round: int  # which refill of the epoch it belongs to
    example_id: str
    outcome: str  # such as `timeout`
    reason: str  # why it failed; may be empty
    reward: float | None  # None: missing
    scores: dict[str, float | None]  # of each evaluator


class ListedEpisode(NamedTuple):  # not a dataclass: 100,000 of them are made at once
    """A finished episode as a list shows it, without reading what it holds; `number` grows with every episode."""

    number: int
    key: str
    phase: str
    epoch: int
    round: int
    example_id: str
    generation: int
    outcome: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class EpisodeExtent:
    """How far the recorded episodes reach; while it stays the same, they do too."""

    count: int
    newest: int  # `number` of the newest one; 0: there is none
    session_s: float  # when the last process began to work on the run: it may have removed episodes


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One version of the weights."""

    version: int  # from 0, the weights before training
    fingerprint: str
    num_updates: int | None  # optimizer steps of the job that made it; None: the backend does not report them
    checkpoint: str | None = None  # its checkpoint, relative to the run folder; None: it has none

    def as_dict(self) -> dict[str, Any]:
        """Returns the entry of `summary.json`, which does not name checkpoints."""
        return {"version": self.version, "fingerprint": self.fingerprint, "num_updates": self.num_updates}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        return cls(row["version"], row.get("fingerprint", ""), row.get("num_updates"), row.get("checkpoint"))


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A point from which a run can resume."""

    epoch: int  # the last epoch whose job is done; -1: before the first epoch
    version: int | None  # version of the weights that this job made; None: the backend serves no policy
    checkpoint: str | None  # folder of these weights in the run folder; None: the backend does not export them


@dataclass(frozen=True, slots=True)
class EpochSnapshot(SnapshotRow):
    """A snapshot with everything that resuming needs: the state of the trainer and the run's counters."""

    state: dict[str, Any]


class ReadsLikeADict:
    """A row that is also read as its file holds it: `row["avg_reward"]`, `row.get("loss")`."""

    def as_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def __getitem__(self, name: str) -> Any:
        return self.as_dict()[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.as_dict().get(name, default)


@dataclass
class EpochMetrics(ReadsLikeADict):
    """The metrics of one epoch: a line of `training_metrics.jsonl` and an entry of `reward_history.json`."""

    epoch: int
    avg_reward: float | None = None  # mean reward over the examples; None: unknown, or the data has no rewards
    ci_low: float | None = None  # of its 95 % interval; None: unknown
    ci_high: float | None = None
    num_clusters: int | None = None  # distinct prompts or conversations, which the interval counts; None: unknown
    filtered_avg_reward: float | None = None  # mean reward of the groups that were trained on; None: none were
    num_groups: int | None = None
    num_groups_kept: int | None = None  # groups that were trained on
    num_groups_zero_variance: int | None = None  # groups dropped because all siblings have the same reward
    num_groups_low_spread: int | None = None  # groups dropped because the rewards of the siblings differ too little
    num_groups_outside: int | None = None  # groups that the curriculum left out
    num_groups_spared: int | None = None  # not even collected: the curriculum would have left them out
    num_trajectories: int | None = None
    num_missing: int | None = None  # episodes that the environment failed; None: the builder does not count them
    missing_reason: str | None = None  # the most common of these reasons; None: none is missing, or it is not known
    curriculum_percentile: float | None = None  # share of the groups that the curriculum admits, from 0 to 1
    reward_std: float | None = None  # standard deviation of the rewards of all scored episodes; None: unknown
    completion_tokens: float | None = None  # mean number of sampled tokens of a scored episode; None: unknown
    clipped_share: float | None = None  # of the scored episodes, with a reply that `max_tokens` cut off; None: unknown
    clipped_avg_reward: float | None = None  # mean reward of those; None: there are none, or unknown
    scores: dict[str, float] = field(default_factory=dict)
    """Evaluator -> mean score of the training episodes that have one."""
    stage: str | None = None  # the stage of the pipeline that the epoch belongs to; None: the run has no pipeline
    job: dict[str, Any] = field(default_factory=dict)
    """Reported by job and canary: `loss`, `policy_version`, `canary_k3`."""

    @property
    def level(self) -> int | None:
        """The highest level of the examples that the curriculum admits; None: it does not go by levels."""
        return self.job.get("level")

    @property
    def share_without_signal(self) -> float | None:
        """The share of the groups whose rewards are equal or nearly so; None: unknown."""
        if not self.num_groups or self.num_groups_zero_variance is None:
            return None
        return (self.num_groups_zero_variance + (self.num_groups_low_spread or 0)) / self.num_groups

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as its file holds it: the job's metrics follow the epoch's own.

        Example: `EpochMetrics(3, 0.5, job={"loss": 0.1}).as_dict()` -> `{"epoch": 3, "avg_reward": 0.5, ...,
        "curriculum_percentile": None, "loss": 0.1}`.
        """
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "job"}
        return {**own, **self.job}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Returns a row as its file holds it; every key that is not a field goes to `job`."""
        own, job = _split_fields(cls, "job", row)
        return cls(**own, job=job)


def fill_gaps(rows: Sequence[EpochMetrics]) -> list[EpochMetrics]:
    """Returns one row per epoch, an empty one where none was recorded: epochs 0 and 2 -> 0, 1 (empty), 2."""
    by_epoch = {row.epoch: row for row in rows}
    epochs = range(min(by_epoch), max(by_epoch) + 1) if by_epoch else ()
    return [by_epoch.get(epoch, EpochMetrics(epoch)) for epoch in epochs]


@dataclass
class ValidationRow(ReadsLikeADict):
    """One validation on the `select` examples: an entry of `validation_history.json`."""

    epoch: int  # the epoch after which it ran; -1: the baseline
    avg_reward: float | None = None  # mean reward; None: unknown, see `error`
    ci_low: float | None = None  # of its 95 % interval; None: unknown
    ci_high: float | None = None
    num_examples: int | None = None  # examples that were scored; None: not reported
    num_unscored: int | None = None  # examples that are missing for reasons outside the policy; None: not reported
    metrics: dict[str, float | None] = field(default_factory=dict)  # evaluator -> mean score; None: unknown
    summaries: dict[str, MetricSummary] = field(default_factory=dict)  # evaluator -> mean score with its interval
    outcomes: dict[str, int] = field(default_factory=dict)  # outcome -> number of episodes
    error: str | None = None  # why there is no reward; None: there is one
    version: int | None = None  # version of the weights; None: not known
    checkpoint: str | None = None  # their checkpoint, relative to the run folder; None: there is none
    unscored_reason: str | None = None  # the most common one; None: no example is missing, or it is not known
    num_clusters: int | None = None  # distinct prompts or conversations, which the intervals count; None: unknown
    extra: dict[str, Any] = field(default_factory=dict)  # what else a user's own `run_validation_evaluation` returned

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as `validation_history.json` holds it; `extra` follows the known fields."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "extra"}
        own["summaries"] = {name: summary.as_dict() for name, summary in self.summaries.items()}
        return {**own, **self.extra}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Returns a row of `validation_history.json`, or what a user's own `run_validation_evaluation` returned."""
        own, extra = _split_fields(cls, "extra", row)
        found = {name: value for name, value in own.items() if value is not None}
        summaries = {
            name: value if isinstance(value, MetricSummary) else MetricSummary(**value)
            for name, value in found.pop("summaries", {}).items()
        }
        return cls(**found, summaries=summaries, extra=extra)


def _split_fields(cls: type[Any], rest: str, row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what of a row are fields of a class, and what belongs to its field `rest`."""
    names = {each.name for each in fields(cls)} - {rest}
    return {name: row[name] for name in names & row.keys()}, {name: row[name] for name in row if name not in names}


def choose_best_validation(
    validations: Sequence[ValidationRow], metric: str | None = None, *, prefers_last: bool = False
) -> ValidationRow | None:
    """Returns the validation with the highest score, the baseline (epoch -1) included; of equals the earliest.

    Example: rewards `{-1: 0.40, 0: None, 1: 0.55, 2: 0.55}` by epoch -> the row of epoch 1. None: no validation has a
    score. If the best has epoch -1, no checkpoint beat the base model.

    Args:
        metric: The gate's metric; used if any validation has it, else `avg_reward`.
        prefers_last: Of equals the latest.
    """
    by_metric = metric is not None and any(metric in row.metrics for row in validations)

    def score(row: ValidationRow) -> float | None:
        value = row.metrics.get(metric) if by_metric and metric is not None else row.avg_reward
        return value if value is not None and math.isfinite(value) else None

    scored = [(value, row) for row in validations if (value := score(row)) is not None]
    if not scored:
        return None
    return min(scored, key=lambda pair: (-pair[0], -pair[1].epoch if prefers_last else pair[1].epoch))[1]


GUARD = "GUARD"  # the stage under which the journal keeps them


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """A guard has warned, stopped the run, or noted that it does not measure."""

    epoch: int  # the epoch after which it did; -1: before training
    guard: str  # its name in `finetuning.guards`; or what was found before training, such as "contamination"
    action: Literal["warn", "halt", "note"]
    text: str  # what was found and what to do, as sentences
    value: float | None = None  # None: there is no figure
    limit: float | None = None  # of the figure
    count: int = 1  # measurements in a row beyond the limit

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        where = "before training" if self.epoch < 0 else f"epoch {self.epoch}"
        return f"{where}, guard {self.guard}: {self.text}"


def list_guard_events(stages: Iterable[StageRow]) -> list[GuardEvent]:
    """Returns the events among the stages of a journal, each once, in their order."""
    found = {}
    for row in stages:
        if row.stage == GUARD:
            event = GuardEvent(**row.data)
            found[event.guard, event.epoch, event.action] = event
    return list(found.values())
