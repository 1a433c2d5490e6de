"""What a run will take, stage by stage, from what the stages of the probe took.

    start       packages, data, model                          measured
    baseline    select examples x seconds per episode          measured on select examples
    collect     epochs x episodes x seconds per episode
    train       epochs x trained groups x seconds per group
    publish     epochs x (new weights served and checked, the epoch's files written)
    validate    validations x select examples x seconds per episode
    verdict     2 x confirm episodes x seconds per episode, and loading two checkpoints
    files       report, page and plot                          measured

Where whole epochs were probed, the first counts once and the mean of the others for the rest: the first one is slower,
since much runs for the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from reinforge.algorithms.curriculum import compute_included_share
from reinforge.config.schema import CurriculumLearningConfig
from reinforge.runs.forecast import COLLECT, HELD_OUT, TRAIN, RunSize
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.runs.rows import EpochMetrics

PUBLISH = ("ADOPT", "VALIDATE")  # stages of an epoch after its job; the epoch's files are written in the first one


class StageClock(SilentProgress):
    """Measures the stages of a run; a progress display that shows another one what it is told."""

    def __init__(self, shown: RunProgress, clock: Callable[[], float] = time.monotonic):
        self._shown, self._clock = shown, clock
        self._current: tuple[int | None, str] | None = None
        self._since = clock()
        self.seconds: dict[tuple[int | None, str], float] = {}
        self.rows: list[EpochMetrics] = []

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Ends the current stage and begins another; a stage that begins again is continued."""
        self.stop()
        self._current, self._since = (epoch, stage), self._clock()
        self._shown.stage(None, stage, total)

    def advance(self, share: float) -> None:
        self._shown.advance(share)

    def stop(self) -> None:
        if self._current is not None:
            self.seconds[self._current] = self.seconds.get(self._current, 0.0) + self._clock() - self._since
            self._current = None

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        self._shown.episode(outcome, reward, num_tokens)

    def epoch_done(self, metrics: EpochMetrics) -> None:
        self.rows.append(metrics)

    def note(self, text: str) -> None:
        self._shown.note(text)

    def measure(self, stage: str) -> float:
        """Returns the seconds of a stage outside the epochs."""
        return self.seconds.get((None, stage), 0.0)


@dataclass(frozen=True, slots=True)
class ProbedEpoch:
    """What an epoch of the probe took, and how much it did."""

    collect_s: float  # seconds of collecting and selecting
    train_s: float  # seconds of the job, with its checkpoint
    publish_s: float  # seconds of serving the new weights, checking them, and writing the epoch's files
    num_groups: int
    num_kept: int
    num_episodes: int


def list_probed_epochs(clock: StageClock) -> list[ProbedEpoch]:
    epochs = []
    for row in clock.rows:
        of_epoch = {stage: seconds for (epoch, stage), seconds in clock.seconds.items() if epoch == row.epoch}
        train_s = of_epoch.pop("AWAIT", 0.0) + of_epoch.pop("SUBMIT", 0.0)
        publish_s = sum(of_epoch.pop(stage, 0.0) for stage in PUBLISH)
        collect_s = sum(of_epoch.values())
        epochs.append(
            ProbedEpoch(
                collect_s, train_s, publish_s, row.num_groups or 0, row.num_groups_kept or 0, row.num_trajectories or 0
            )
        )
    return epochs


@dataclass(frozen=True, slots=True)
class JobTime:
    """What a training job takes: `fixed_s + groups * group_s`."""

    fixed_s: float  # seconds of a job of any size: optimizer steps, fingerprints
    group_s: float


def fit_job_time(small: tuple[int, float], large: tuple[int, float]) -> JobTime:
    """Returns the line through a small and a large job.

    Example: 2 groups in 3 s and 10 groups in 7 s -> 0.5 s per group and 2 s; 2 groups in 3 s alone -> 1.5 s and 0.
    """
    (few, few_s), (many, many_s) = small, large
    slope = (many_s - few_s) / (many - few) if many > few else 0.0
    fixed_s = many_s - many * slope
    if slope <= 0 or fixed_s <= 0:  # one job only, or another program was in the way
        return JobTime(0.0, many_s / max(1, many))
    return JobTime(fixed_s, slope)


@dataclass(frozen=True, slots=True)
class Timings:
    """What the probe measured."""

    start_s: float  # until the model was loaded and its first checkpoint written
    episode_s: float  # seconds per episode of the sample, at the run's concurrency
    select_episode_s: float  # the same for a validation
    save_s: float = 0.0
    load_s: float = 0.0
    files_s: float = 0.0
    epochs: list[ProbedEpoch] = field(default_factory=list)  # the probed epochs; empty: none could be trained here
    is_whole: bool = False  # True: a probed epoch does as much as one of the run
    job: JobTime | None = None  # what a job takes by its size; None: it is that of the probed epoch


@dataclass(frozen=True, slots=True)
class TimePart:
    name: str
    seconds: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class PredictedTime:
    parts: list[TimePart]

    @property
    def is_complete(self) -> bool:
        return all(part.seconds is not None for part in self.parts)

    @property
    def total_s(self) -> float:
        return sum(part.seconds or 0.0 for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        parts = [asdict(part) for part in self.parts]
        return {"total_s": self.total_s if self.is_complete else None, "known_s": self.total_s, "parts": parts}


def predict_time(size: RunSize, timings: Timings, *, signal_share: float | None, growth: float = 1.0) -> PredictedTime:
    """Returns what a run will take.

    Args:
        signal_share: Expected share of groups with signal, where the probed epochs are smaller than the run's.
        growth: Mean share of the groups that the curriculum trains on, as a multiple of the first epochs' share.
    """
    per_select = timings.select_episode_s
    verdict_s = size.num_confirmed * per_select + 2 * timings.load_s
    return PredictedTime(
        [
            TimePart("start", timings.start_s, "packages, data, model and the first checkpoint, measured"),
            TimePart("baseline", size.num_select * per_select, _describe_episodes(size.num_select, per_select)),
            *_predict_epochs(size, timings, signal_share, growth),
            TimePart(
                "validate",
                size.num_validations * size.num_select * per_select,
                f"{size.num_validations} x {_describe_episodes(size.num_select, per_select)}",
            ),
            TimePart("verdict", verdict_s, f"both models: {_describe_episodes(size.num_confirmed, per_select)}"),
            TimePart("files", timings.files_s, "report, page and plot, measured"),
        ]
    )


PARTS = {HELD_OUT: ("baseline", "validate", "verdict"), COLLECT: ("collect",), TRAIN: ("train", "publish")}
"""The parts of a run with each kind of work of a `Forecast`."""


def predict_each(size: RunSize, time: PredictedTime) -> dict[str, float]:
    """Returns the seconds that one of each kind of work takes; kinds that are not known are left out.

    Example: baseline 5 s and verdict 20 s, for 50 episodes and 2 x 100 -> `{"held out": 0.1}`.
    """
    seconds, work = {part.name: part.seconds or 0.0 for part in time.parts}, size.count_work()
    sums = {kind: sum(seconds.get(name, 0.0) for name in names) for kind, names in PARTS.items()}
    return {kind: total / work[kind] for kind, total in sums.items() if total and work[kind]}


def _predict_epochs(size: RunSize, timings: Timings, signal_share: float | None, growth: float) -> list[TimePart]:
    """Returns the parts inside the epochs; that of training is unknown if no epoch was trained."""
    epochs, probed = size.num_epochs, timings.epochs
    collected = size.examples_per_epoch * size.group_size
    of_agent = f"{epochs:,} epochs x {_describe_episodes(collected, timings.episode_s)}"
    trained = next((epoch for epoch in probed if epoch.num_kept), None)
    has_epoch = trained is not None
    if trained is None and timings.job is not None:  # there was time for jobs alone
        trained = ProbedEpoch(0.0, 0.0, 0.0, 1, 1, 0)
    if trained is None:
        collect = TimePart("collect", epochs * collected * timings.episode_s, of_agent)
        return [collect, TimePart("train", None, "no training step was measured")]
    if timings.is_whole:
        measured = f"{epochs:,} epochs; {len(probed)} measured, "
        collect_s = _extend([epoch.collect_s for epoch in probed], epochs)
        train_s = _extend([epoch.train_s for epoch in probed], epochs) * growth
        publish_s = _extend([epoch.publish_s for epoch in probed], epochs)
        collected_by = f"{measured}{_mean([epoch.num_episodes for epoch in probed]):,.0f} episodes each"
        num_kept = _mean([epoch.num_kept for epoch in probed])
        trained_by = f"{measured}{num_kept:,.0f} groups trained, with checkpoints"
    else:
        groups = size.examples_per_epoch * size.groups_per_example
        share = trained.num_kept / max(1, trained.num_groups) if signal_share is None else signal_share
        job = timings.job or JobTime(0.0, max(0.0, trained.train_s - timings.save_s) / trained.num_kept)
        num_trained = groups * share * growth
        by_row = trained.collect_s * groups / max(1, trained.num_groups)
        collect_s = epochs * (collected * timings.episode_s if size.group_size else by_row)
        train_s = epochs * (job.fixed_s + num_trained * job.group_s + timings.save_s)
        publish_s = epochs * trained.publish_s
        collected_by = of_agent if size.group_size else f"{epochs:,} epochs x {groups:,} groups of rows"
        each_ms = 1000 * job.group_s
        trained_by = f"{epochs:,} epochs x {num_trained:,.0f} groups of {each_ms:,.0f} ms, and a checkpoint"
    return [
        TimePart("collect", collect_s if has_epoch or size.group_size else None, collected_by),
        TimePart("train", train_s, trained_by),
        TimePart("publish", publish_s if has_epoch else None, "new weights served and checked, files of the epoch"),
    ]


def _extend(seconds: Sequence[float], epochs: int) -> float:
    """Returns the seconds of all epochs: the first one once, and the mean of the other measured ones for the rest.

    Example: [3, 1, 2] and 10 epochs -> 3 + 9 * 1.5 = 16.5; [3] and 10 epochs -> 30.
    """
    rest = seconds[1:] or seconds
    return seconds[0] + (epochs - 1) * _mean(rest)


def compute_growth(config: CurriculumLearningConfig, num_probed: int, num_epochs: int) -> float:
    """Returns the mean share of groups that the curriculum includes in a run, over that of the first epochs.

    Example: shares 0.3 in the first half of the epochs and 0.5 in the second, 1 epoch probed -> 0.4 / 0.3 = 1.33.
    """
    if not config.enabled:
        return 1.0
    shares = [compute_included_share(config, epoch) for epoch in range(num_epochs)]
    return _mean(shares) / _mean(shares[: max(1, num_probed)])


MIN_ROWS, ENOUGH_EPOCHS = 8, 10
"""Fewer rows an epoch are not suggested; and they are only for a run that would otherwise have fewer epochs."""


@dataclass(frozen=True, slots=True)
class SuggestedSize:
    """A run that takes about so many minutes; `num_epochs` is 0 if none does."""

    minutes: int
    examples_per_epoch: int
    group_size: int
    num_epochs: int
    fixed_s: float  # seconds outside the epochs: loading, baseline and verdict

    def __str__(self) -> str:
        if not self.num_epochs:
            return f"{self.minutes} min: too short, since loading, baseline and verdict take {self.fixed_s / 60:,.0f}"
        replies = f" x {self.group_size} generations" if self.group_size else ""
        return f"{self.minutes} min: {self.num_epochs:,} epochs of {self.examples_per_epoch:,} rows{replies}"


def suggest_size(size: RunSize, time: PredictedTime, minutes: int, validation_interval: int) -> SuggestedSize:
    """Returns how large a run of some minutes can be: the rows of the file, or fewer for at least ten epochs.

    Example: 60 s outside the epochs, 54 s an epoch of 64 rows, 10 minutes -> 10 epochs of 64 rows; 108 s -> 10 of 32.
    """
    seconds = {part.name: part.seconds or 0.0 for part in time.parts}
    validation_s = seconds["validate"] / size.num_validations
    epoch_s = sum(seconds[name] for name in ("collect", "train", "publish")) / size.num_epochs
    fixed_s = sum(seconds[name] for name in ("start", "baseline", "verdict", "files")) + validation_s
    rows = size.examples_per_epoch
    while True:
        each_s = epoch_s * rows / size.examples_per_epoch + validation_s / validation_interval
        num_epochs = max(0, int((60 * minutes - fixed_s) / max(each_s, 1e-6)))
        if num_epochs >= ENOUGH_EPOCHS or rows // 2 < MIN_ROWS:
            return SuggestedSize(minutes, rows, size.group_size, num_epochs, fixed_s)
        rows //= 2


def _describe_episodes(count: int, each_s: float) -> str:
    return f"{count:,} episodes of {1000 * each_s:,.1f} ms"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
