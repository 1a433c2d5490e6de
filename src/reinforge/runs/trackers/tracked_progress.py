"""Passes the events of a run to the display, and its metrics to the trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reinforge.interfaces import Tracker
from reinforge.runs.journal import RunJournal
from reinforge.runs.journal_reader import JournalReader
from reinforge.runs.progress import RunProgress
from reinforge.runs.rows import EpochMetrics, ValidationRow
from reinforge.runs.summary import RunSummary
from reinforge.runs.trackers.points import (
    StepCount,
    name_epoch_metrics,
    name_results,
    name_times,
    name_validation_metrics,
)
from reinforge.runs.trackers.sender import TrackerSender
from reinforge.types.tracking import MetricPoint, TrackedRun

SENT = "sent_to_"
"""Facts of a run with this prefix hold the last step of each metric that was sent to a tracker."""
FINISH_S, STOP_S = 30.0, 4.0
"""Seconds to wait for the trackers at the end of a run, and of one that was stopped, which must end within seconds."""
VALIDATIONS = ("BASELINE", "VALIDATE")


class TrackedProgress:
    """Shows a run on its display and sends its metrics to trackers.

    Args:
        display: What the user sees.
        trackers: Trackers by name.
        run: The run.
        journal: The run's journal; keeps what was sent.
        clock: Returns seconds since the Unix epoch.
    """

    def __init__(
        self,
        display: RunProgress,
        trackers: Mapping[str, Tracker],
        run: TrackedRun,
        journal: RunJournal,
        clock: Callable[[], float] = time.time,
    ):
        self.display, self._clock = display, clock
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

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        self.display.start(run_id, folder, num_epochs, settings)

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Shows the stage, and measures how long the one before it took."""
        self._end_stage()
        self._stage = stage
        self.display.stage(epoch, stage, total)
        self._report_failures()

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        self.display.episode(outcome, reward, num_tokens)

    def epoch_done(self, metrics: EpochMetrics) -> None:
        """Shows the epoch and sends its metrics, with the seconds of its stages."""
        self.display.epoch_done(metrics)
        self._end_stage()
        times = {stage: seconds for stage, seconds in self._times.items() if stage not in VALIDATIONS}
        self._send_epoch(metrics, name_times(times))
        self._times.clear()

    def validation(self, row: ValidationRow) -> None:
        """Shows the validation and sends its metrics."""
        self.display.validation(row)
        self._end_stage()
        times = {stage: self._times.pop(stage) for stage in VALIDATIONS if stage in self._times}
        self._send_validation(row, name_times(times))

    def note(self, text: str) -> None:
        """Shows a message."""
        self.display.note(text)

    def finish(self, summary: RunSummary) -> None:
        """Sends the verdict and closes the run at every tracker; says what could not be sent."""
        if not self._is_open:
            return
        self._is_open = False
        self._send(self._steps.steps, name_results(summary))
        timeout_s = STOP_S if summary.status == "stopped" else FINISH_S
        deadline = time.monotonic() + timeout_s
        for sender in self._senders:
            is_done = sender.finish(summary.status, max(0.0, deadline - time.monotonic()))
            self._report_failures()
            if not is_done:
                late = f"tracker {sender.name}: not everything was sent within {timeout_s:g} s"
                self.display.note(f"{late}; the run folder has every metric")

    def close(self) -> None:
        self.display.close()

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
                text = f"tracker {sender.name}: {failure}; training goes on, and the run folder has every metric"
                self.display.note(text)


def read_sent(journal: JournalReader) -> dict[str, dict[str, int]]:
    facts = {name: value for name, value in journal.facts().items() if name.startswith(SENT)}
    return {name.removeprefix(SENT): value for name, value in facts.items() if isinstance(value, dict)}


def _make_record(journal: RunJournal, name: str) -> Callable[[Mapping[str, int]], None]:
    def record(steps: Mapping[str, int]) -> None:
        journal.set_facts(**{SENT + name: dict(steps)})
        journal.flush()

    return record
