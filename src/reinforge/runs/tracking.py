"""Metrics of a run, sent to its trackers: a slow or broken dashboard never holds up the run."""

from __future__ import annotations

import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reinforge.errors import describe_error
from reinforge.interfaces import Tracker
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.progress import RunProgress, SharedProgress
from reinforge.runs.rows import BASELINE, EpochMetrics, ValidationRow
from reinforge.runs.summary import STAGE_NAMES, RunSummary
from reinforge.types.tracking import MetricPoint, TrackedRun

SENT = "sent_to_"  # facts of a run with this prefix hold the last step of each metric that was sent to a tracker
VALIDATIONS = ("BASELINE", "VALIDATE")


class TrackedProgress(SharedProgress):
    """Shows a run on its display and sends its metrics to trackers; the journal keeps what was sent."""

    def __init__(
        self,
        display: RunProgress,
        trackers: Mapping[str, Tracker],
        run: TrackedRun,
        journal: RunJournal,
        clock: Callable[[], float] = time.time,
    ):
        super().__init__(display)
        self._clock = clock
        self._steps, self._times = StepCount(), dict[str, float]()
        self._stage, self._stage_since_s = "", clock()
        sent = read_sent(journal)
        self._senders = [
            TrackerSender(name, tracker, run, sent.get(name, {}), _make_record(journal, name))
            for name, tracker in trackers.items()
        ]
        self._is_open = True

    def send_history(self, epochs: Sequence[EpochMetrics], validations: Sequence[ValidationRow]) -> None:
        """Sends what earlier processes of the run measured; a tracker that has a point already leaves it out."""
        for row in epochs:
            self._send_epoch(row)
        for validation in validations:
            self._send_validation(validation)

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        self._end_stage()
        self._stage = stage
        super().stage(epoch, stage, total)
        self._report_failures()

    def epoch_done(self, metrics: EpochMetrics) -> None:
        super().epoch_done(metrics)
        self._end_stage()
        times = {stage: seconds for stage, seconds in self._times.items() if stage not in VALIDATIONS}
        self._send_epoch(metrics, name_times(times))
        self._times.clear()

    def validation(self, row: ValidationRow) -> None:
        super().validation(row)
        self._end_stage()
        times = {stage: self._times.pop(stage) for stage in VALIDATIONS if stage in self._times}
        self._send_validation(row, name_times(times))

    def finish(self, summary: RunSummary) -> None:
        """Sends the verdict and closes the run at every tracker; says what could not be sent."""
        if not self._is_open:
            return
        self._is_open = False
        self._send(self._steps.steps, name_results(summary))
        started_s = time.monotonic()
        for sender in self._senders:
            timeout_s = sender.tracker.stop_s if summary.status == "stopped" else sender.tracker.finish_s
            is_done = sender.finish(summary.status, max(0.0, started_s + timeout_s - time.monotonic()))
            self._report_failures()
            if not is_done:
                late = f"tracker {sender.name}: not everything was sent within {timeout_s:g} s"
                self.note(f"{late}; the run folder has every metric")

    def _end_stage(self) -> None:
        now = self._clock()
        if self._stage:
            self._times[self._stage] = self._times.get(self._stage, 0.0) + max(0.0, now - self._stage_since_s)
        self._stage, self._stage_since_s = "", now

    def _send_epoch(self, row: EpochMetrics, more: Mapping[str, float] | None = None) -> None:
        step = self._steps.add(row)
        self._send(step, {**name_epoch_metrics(row), **(more or {})})

    def _send_validation(self, row: ValidationRow, more: Mapping[str, float] | None = None) -> None:
        self._send(self._steps.find(row.epoch), {**name_validation_metrics(row), **(more or {})})

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            for sender in self._senders:
                sender.send(MetricPoint(step, metrics, self._clock()))

    def _report_failures(self) -> None:
        for sender in self._senders:
            failure = sender.take_failure()
            if failure is not None:
                text = f"tracker {sender.name}: {failure}; training continues, and the run folder has every metric"
                self.note(text)


def read_sent(journal: JournalReader) -> dict[str, dict[str, int]]:
    facts = {name: value for name, value in journal.facts().items() if name.startswith(SENT)}
    return {name.removeprefix(SENT): value for name, value in facts.items() if isinstance(value, dict)}


def _make_record(journal: RunJournal, name: str) -> Callable[[Mapping[str, int]], None]:
    def record(steps: Mapping[str, int]) -> None:
        journal.set_facts(**{SENT + name: dict(steps)})
        journal.flush()

    return record


JOB_NAMES = {
    "loss": "loss",
    "lr": "learning_rate",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "kl_ref": "kl",
    "approx_kl": "approx_kl",
    "clip_fraction": "clip_ratio/region_mean",
    "clip_fraction_low": "clip_ratio/low_mean",
    "clip_fraction_high": "clip_ratio/high_mean",
    "mismatch": "mismatch/mean",
    "mismatch_kl": "mismatch_kl/mean",
    "ratio": "ratio/mean",
    "tis_weight": "tis_weight/mean",
    "policy_version": "policy_version",
    "num_tokens": "tokens/trained",
    "num_updates": "steps/made",
    "num_skipped_steps": "steps/skipped",
    "canary_difference": "canary/max_difference",
    "canary_k3": "canary/k3",
}
"""Metrics of a training job -> their names on a dashboard; others are sent as `job/<name>`."""


def name_epoch_metrics(row: EpochMetrics) -> dict[str, float]:
    """Returns the metrics of an epoch that are known, by their names on a dashboard."""
    groups = row.num_groups or None
    values: dict[str, Any] = {
        "epoch": row.epoch,
        "reward/mean": row.avg_reward,
        "reward/std": row.reward_std,
        "reward/kept_mean": row.filtered_avg_reward,
        **{f"reward/{name}": value for name, value in row.scores.items()},
        "completions/mean_length": row.completion_tokens,
        "completions/clipped_ratio": row.clipped_share,
        "frac_reward_zero_std": _divide(row.num_groups_zero_variance, groups),
        "groups/kept_ratio": _divide(row.num_groups_kept, groups),
        "episodes/missing": row.num_missing,
        "curriculum": row.curriculum_percentile,
        **{JOB_NAMES.get(name, f"job/{name}"): value for name, value in row.job.items()},
    }
    return keep_numbers(values)


def name_validation_metrics(row: ValidationRow) -> dict[str, float]:
    own = {f"validation/{name}": value for name, value in row.metrics.items()}
    return keep_numbers({**own, "validation/reward": row.avg_reward, "validation/unscored": row.num_unscored})


def name_results(summary: RunSummary) -> dict[str, float]:
    if summary.improvement is None:
        return {}
    arms = {"base": summary.confirm_base, "tuned": summary.confirm_tuned}
    values: dict[str, Any] = {f"verdict/{name}": arm.mean for name, arm in arms.items() if arm is not None}
    improvement = summary.improvement
    values |= {
        "verdict/improvement": improvement.mean_difference,
        "verdict/ci_low": improvement.ci_low,
        "verdict/ci_high": improvement.ci_high,
        "verdict/promoted": None if summary.promoted is None else int(summary.promoted),
    }
    return keep_numbers(values)


def name_times(seconds_by_stage: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each stage: `{"AWAIT": 3.2}` -> `{"time/train": 3.2}`."""
    return {f"time/{STAGE_NAMES.get(stage, stage.lower())}": seconds for stage, seconds in seconds_by_stage.items()}


def keep_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers, under names that every dashboard takes: letters, digits and `_-./ `."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {re.sub(r"[^\w\-./ ]", "_", name): float(value) for name, value in numbers.items() if math.isfinite(value)}


def _divide(count: int | None, total: int | None) -> float | None:
    return None if count is None or total is None else count / total


@dataclass
class StepCount:
    """Counts the optimizer steps of a run, epoch by epoch; a job of a backend that reports none counts as one step."""

    steps: int = 0

    def __post_init__(self) -> None:
        self._after = {BASELINE: self.steps}

    def add(self, row: EpochMetrics) -> int:
        """Returns the number of steps after an epoch; adding the same epoch again changes nothing."""
        if row.epoch not in self._after:
            made = row.job.get("num_updates")
            has_job = bool(row.job) if row.num_groups_kept is None else row.num_groups_kept > 0
            self.steps += made if isinstance(made, int) else int(has_job)
            self._after[row.epoch] = self.steps
        return self._after[row.epoch]

    def find(self, epoch: int) -> int:
        """Returns the number of steps after an epoch; for one that is not known, those so far."""
        return self._after.get(epoch, self.steps)


logger = logging.getLogger(__name__)

Record = Callable[[Mapping[str, int]], None]


class TrackerSender:
    """Sends each point once, in order.

    A point is sent if its step is above the last one that the dashboard has; where the dashboard cannot tell, above the
    last one that the run recorded as sent. That record is on disk before the point is sent, so a run that is killed and
    resumed sends no point twice, and loses at most the one that it was sending.

    Args:
        sent: Last step of each metric that earlier processes recorded as sent.
        record: Records the last steps on disk before it returns.
    """

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, sent: Mapping[str, int], record: Record):
        self.name, self.tracker, self.run, self.record = name, tracker, run, record
        self._known, self._keeps_record = dict(sent), False
        self._failure: str | None = None
        self._queue: queue.Queue[MetricPoint | str] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=f"reinforge-tracker-{name}", daemon=True)
        self._thread.start()

    def send(self, point: MetricPoint) -> None:
        self._queue.put(point)

    def finish(self, status: str, timeout_s: float) -> bool:
        """Waits until everything is sent and the run is closed; returns False if that takes longer."""
        self._queue.put(status)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def take_failure(self) -> str | None:
        """Returns the first failure, once; None: there was none, or it was returned before."""
        failure, self._failure = self._failure, None if self._failure is None else ""
        return failure or None

    def _work(self) -> None:
        try:
            known = self.tracker.start(self.run)
        except Exception as error:  # noqa: BLE001  a dashboard may raise anything, and the run continues
            self._fail(error)
            return
        self._keeps_record = known is None
        self._known = dict(self._known if known is None else known)
        while True:
            entry = self._queue.get()
            try:
                if isinstance(entry, str):
                    self.tracker.finish(entry)
                    return
                self._send(entry)
            except Exception as error:  # noqa: BLE001  as above
                self._fail(error)
                if isinstance(entry, str):
                    return

    def _send(self, point: MetricPoint) -> None:
        new = {name: value for name, value in point.metrics.items() if point.step > self._known.get(name, -1)}
        if not new:
            return
        self._known |= dict.fromkeys(new, point.step)
        if self._keeps_record:
            self.record(self._known)
        self.tracker.log(replace(point, metrics=new))

    def _fail(self, error: Exception) -> None:
        logger.warning("tracker %s: %s", self.name, describe_error(error), exc_info=error)
        if self._failure is None:
            self._failure = describe_error(error)
