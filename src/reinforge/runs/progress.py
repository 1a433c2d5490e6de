"""Shows the progress of a run.

    LiveLine        on a terminal: a live line with a bar, and a permanent line per epoch and validation
    PlainProgress   in a file, a pipe, CI, TERM=dumb: the permanent lines, and a progress line a minute
    SilentProgress  shows nothing
    StatusLine      keeps the live line as text

`default_progress()` chooses between the first two. `episode` is called for every episode and only counts; the display
is rendered from the counters, at most four times a second.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from reinforge.evaluation.statistics import format_interval
from reinforge.registry import load_named
from reinforge.runs.forecast import Forecast, RunSize
from reinforge.runs.rows import MISSING, EpochMetrics, ValidationRow
from reinforge.runs.summary import STAGE_NAMES, format_duration
from reinforge.safe_text import to_one_line
from reinforge.types.evaluation import count_examples

Clock = Callable[[], float]
FIRST_S, EVERY_S = 10.0, 60.0
"""Seconds until the first progress line of a file or a pipe and of each stage outside the epochs, and between two."""
LIVE_LINE = "reinforge.runs.live_line:open_live_line"
BAR = 20  # characters of a bar in a line of text


class RunProgress:
    """Receives the events of a run; calls must return at once and may not raise. Those not overridden do nothing."""

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        """Called once, with the run's name, its folder and the settings that took effect."""

    def plan(self, size: RunSize, predicted: Mapping[str, float]) -> None:
        """Called once it is known how much the run does, with what one of each kind of work takes by a preflight."""

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Called when a stage starts; `epoch` is None outside the epochs, `total` is its number of episodes, if any."""

    def advance(self, share: float) -> None:
        """Called with the share of a stage without episodes that is done, where it is known."""

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        """Called when an episode has ended, with its sampled tokens; `reward` is None if it is unknown."""

    def epoch_done(self, metrics: EpochMetrics) -> None:
        """Called when an epoch has ended."""

    def validation(self, row: ValidationRow) -> None:
        """Called when a validation has ended; epoch -1 is the baseline."""

    def note(self, text: str) -> None:
        """Called with a message for the user, which becomes one permanent line."""

    def close(self) -> None:
        """Called when the run is over; may be called twice."""


class SilentProgress(RunProgress):
    """Shows nothing."""


class SharedProgress(RunProgress):
    """Passes the events of a run on to several displays."""

    def __init__(self, *displays: RunProgress):
        self._displays = displays

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        for display in self._displays:
            display.start(run_id, folder, num_epochs, settings)

    def plan(self, size: RunSize, predicted: Mapping[str, float]) -> None:
        for display in self._displays:
            display.plan(size, predicted)

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        for display in self._displays:
            display.stage(epoch, stage, total)

    def advance(self, share: float) -> None:
        for display in self._displays:
            display.advance(share)

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        for display in self._displays:
            display.episode(outcome, reward, num_tokens)

    def epoch_done(self, metrics: EpochMetrics) -> None:
        for display in self._displays:
            display.epoch_done(metrics)

    def validation(self, row: ValidationRow) -> None:
        for display in self._displays:
            display.validation(row)

    def note(self, text: str) -> None:
        for display in self._displays:
            display.note(text)

    def close(self) -> None:
        for display in self._displays:
            display.close()


@dataclass
class _Counters:
    """The state of a run that both displays render."""

    clock: Clock
    num_epochs: int = 0
    forecast: Forecast | None = None
    epoch: int | None = None
    stage: str = ""
    total: int | None = None
    stage_since_s: float = 0.0
    share: float = 0.0  # of a stage without episodes
    num_done: int = 0
    num_missing: int = 0
    num_rewards: int = 0
    sum_rewards: float = 0.0
    num_tokens: int = 0
    epoch_since_s: float | None = None

    def begin_stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        now = self.clock()
        if epoch is not None and epoch >= 0 and epoch != self.epoch:
            self.epoch_since_s = now
        if self.forecast is not None and self.stage:
            self.forecast.end_stage(self.stage, now - self.stage_since_s, self.num_done)
        self.epoch, self.stage, self.total, self.stage_since_s = epoch, stage, total, now
        self.num_done = self.num_missing = self.num_rewards = self.num_tokens = 0
        self.sum_rewards = self.share = 0.0

    def add(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        self.num_done += 1
        self.num_tokens += num_tokens
        if outcome in MISSING:
            self.num_missing += 1
        elif reward is not None:
            self.num_rewards += 1
            self.sum_rewards += reward

    def end_epoch(self) -> float | None:
        """Returns the seconds since the epoch began; None: it began before the run was resumed."""
        return None if self.epoch_since_s is None else self.clock() - self.epoch_since_s

    def estimate(self) -> tuple[float, float | None] | None:
        """Returns the share that is done and the seconds left: of the run, or of a stage outside a run; None: unknown.

        Example: 30 of 120 episodes in 10 s, outside a run -> (0.25, 30.0).
        """
        seconds = self.clock() - self.stage_since_s
        if self.forecast is not None:
            return self.forecast.estimate(self.epoch, self.stage, seconds, self.num_done or self.share)
        share = min(1.0, self.num_done / self.total) if self.total else self.share
        return (share, seconds * (1 / share - 1) if share else None) if share or self.total else None

    def format_position(self) -> str:
        """Returns `epoch 3 (4/20) collect` or `confirm`; the first number is the epoch's in all files of the run."""
        stage = STAGE_NAMES.get(self.stage, self.stage.lower())
        if self.epoch is None or self.epoch < 0:
            return stage
        return f"epoch {self.epoch} ({self.epoch + 1}/{self.num_epochs}) {stage}"

    def format_counts(self) -> list[str]:
        """Returns what is known about the current stage, in a few short phrases."""
        parts: list[str] = []
        seconds, found = self.clock() - self.stage_since_s, self.estimate()
        if self.total is not None or self.num_done:
            rate = f" ({_format_rate(self.num_done / seconds)})" if self.num_done and seconds > 0 else ""
            of = f"/{self.total}" if self.total else ""
            parts.append(f"{self.num_done}{of} episodes{rate}")
        elif self.stage:
            parts.append(f"{format_duration(seconds)} so far")
        if found is not None and found[1]:
            parts.append(f"~{format_duration(found[1])} left")
        if self.num_rewards:
            parts.append(f"reward {self.sum_rewards / self.num_rewards:.3f}")
        if self.num_missing:
            parts.append(f"{self.num_missing} missing")
        if self.num_tokens and seconds > 0:
            parts.append(f"{self.num_tokens / seconds:,.0f} tokens/s")
        return parts

    def format_bar(self) -> str:
        """Returns `[#####---------------]  25 %`, or an empty string while the share is unknown."""
        if (found := self.estimate()) is None:
            return ""
        num_full = int(found[0] * BAR)
        return f"[{'#' * num_full}{'-' * (BAR - num_full)}] {found[0]:>4.0%}".replace("%", " %")


def _format_rate(each_s: float) -> str:
    return f"{each_s:,.1f}/s" if each_s >= 1 else f"{60 * each_s:,.1f}/min"


class StatusLine(SilentProgress):
    """Keeps where the run is as one line of text, for a page."""

    def __init__(self, clock: Clock = time.monotonic):
        self._counters = _Counters(clock)

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        self._counters.num_epochs = num_epochs

    def plan(self, size: RunSize, predicted: Mapping[str, float]) -> None:
        self._counters.forecast = Forecast(size, predicted)

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        self._counters.begin_stage(epoch, stage, total)

    def advance(self, share: float) -> None:
        self._counters.share = share

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        self._counters.add(outcome, reward, num_tokens)

    def refresh(self) -> None:
        """Shows the present time and what follows from it, if that is due."""

    def __str__(self) -> str:
        """Returns `epoch 3 (4/20) collect: 57 episodes (4.2/s), ~5 min 20 s left, reward 0.412`."""
        return ": ".join(filter(None, (self._counters.format_position(), ", ".join(self._counters.format_counts()))))

    def format_line(self) -> str:
        """Returns the same after a bar, where the share is known: `[########------------]  41 % epoch 3 (4/20) ...`."""
        return " ".join(filter(None, (self._counters.format_bar(), str(self))))


class PlainProgress(StatusLine):
    """Writes plain lines, to standard error or another stream that is not a terminal.

    Args:
        ticks: Write progress lines while nothing happens, too, from a thread that ends with `close`.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        every_s: float = EVERY_S,
        clock: Clock = time.monotonic,
        *,
        ticks: bool = False,
    ):
        super().__init__(clock)
        self._stream: TextIO | None = stream if stream is not None else sys.stderr
        self._every_s = every_s
        self._next_s = clock() + min(FIRST_S, every_s)
        self._ticks, self._closed, self._lock = ticks, threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        super().start(run_id, folder, num_epochs, settings)
        self._write([format_start(run_id, folder), *format_settings(settings)])

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        super().stage(epoch, stage, total)
        if self._ticks and self._thread is None:
            self._thread = threading.Thread(target=self._tick, name="reinforge-progress", daemon=True)
            self._thread.start()
        if epoch is None and self._ticks:
            self._next_s = min(self._next_s, self._counters.clock() + FIRST_S)
        self.refresh()

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        super().episode(outcome, reward, num_tokens)
        self.refresh()

    def epoch_done(self, metrics: EpochMetrics) -> None:
        self._write([format_epoch(metrics, self._counters.num_epochs, self._counters.end_epoch())])

    def validation(self, row: ValidationRow) -> None:
        self._write([format_validation(row)])

    def note(self, text: str) -> None:
        self._write([to_one_line(text)])

    def close(self) -> None:
        self._closed.set()
        self._write([])

    def _tick(self) -> None:
        while not self._closed.wait(1.0):
            self.refresh()

    def refresh(self) -> None:
        """Writes a progress line if one is due."""
        with self._lock:
            if (now := self._counters.clock()) < self._next_s:
                return
            self._next_s = now + self._every_s
        self._write(["  " + self.format_line()])

    def _write(self, lines: Sequence[str]) -> None:
        """Writes lines and flushes; a closed pipe must not stop the run."""
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            with self._lock:
                for line in lines:
                    self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


@contextmanager
def open_progress(*, silent: bool = False, stream: TextIO | None = None) -> Iterator[RunProgress]:
    """Opens the display of a command, which moves from here on and is closed before the command prints its result."""
    progress: RunProgress = SilentProgress() if silent else default_progress(stream)
    try:
        progress.stage(None, "START", None)
        yield progress
    finally:
        progress.close()


def default_progress(
    stream: TextIO | None = None, environment: Mapping[str, str] | None = None, clock: Clock = time.monotonic
) -> StatusLine:
    """Returns the display that fits a stream: live on a terminal, plain lines elsewhere and under CI or TERM=dumb.

    The default is standard error, so that standard output stays free for results.
    """
    stream = stream if stream is not None else sys.stderr
    environment = environment if environment is not None else os.environ
    in_ci = environment.get("CI", "").lower() not in ("", "0", "false")
    if stream is None or in_ci or environment.get("TERM") == "dumb" or not stream.isatty():
        return PlainProgress(stream, clock=clock, ticks=clock is time.monotonic)
    live: StatusLine = load_named(LIVE_LINE)(stream, clock, no_color=bool(environment.get("NO_COLOR")))
    return live


def format_start(run_id: str, folder: Path) -> str:
    return to_one_line(f"run {run_id} in {folder}")


def format_settings(settings: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in settings), default=0)
    return [f"  {name:<{width}}  {to_one_line(value)}" for name, value in settings]


def format_epoch(metrics: EpochMetrics, num_epochs: int, seconds: float | None) -> str:
    """Returns `epoch 3 (4/20): reward 0.512 [0.480, 0.544], 30 of 64 groups kept (reward 0.550), 12 s`."""
    parts = [f"reward {format_interval(metrics.avg_reward, metrics.ci_low, metrics.ci_high)}"]
    loss, num_skipped = metrics.job.get("loss"), metrics.job.get("num_skipped_steps")
    is_of_rows = metrics.avg_reward is None and loss is not None  # a dataset's rows have no reward
    if is_of_rows:
        parts = [f"loss {loss:.3f}"]
    kept, total, filtered = metrics.num_groups_kept, metrics.num_groups, metrics.filtered_avg_reward
    if is_of_rows and kept != total:
        parts.append(f"{kept} of {total} rows trained")
    elif not is_of_rows and kept is not None and total is not None:
        clusters = metrics.num_clusters
        of = f" of {clusters} prompts" if clusters is not None and clusters < total else ""
        parts.append(
            f"{kept} of {total} groups{of} kept" + (f" (reward {filtered:.3f})" if filtered is not None else "")
        )
    share = metrics.curriculum_percentile
    if share is not None and share < 1:
        parts.append(f"curriculum {share:.0%}")
    if metrics.level is not None:
        parts.append(f"level {metrics.level}")
    if metrics.num_missing:
        reason = f" ({to_one_line(metrics.missing_reason)})" if metrics.missing_reason else ""
        parts.append(f"{metrics.num_missing} missing{reason}")
    if num_skipped:
        parts.append(f"{num_skipped} optimizer steps skipped (non-finite numbers)")
    if num_left_out := metrics.job.get("num_tokens_left_out"):
        parts.append(f"{num_left_out:,} sampled tokens not trained (penalties, logit_bias, or temperature 0)")
    if seconds is not None:
        parts.append(format_duration(seconds))
    return f"epoch {metrics.epoch} ({metrics.epoch + 1}/{num_epochs}): {', '.join(parts)}"


def format_validation(row: ValidationRow) -> str:
    """Returns `  validation after epoch 3: reward 0.512 [0.480, 0.544] on 200 examples`.

    If there are several evaluators, their means follow: `; correct 0.400, format 0.950`.
    """
    name = "baseline" if row.epoch < 0 else f"  validation after epoch {row.epoch}"
    interval = format_interval(row.avg_reward, row.ci_low, row.ci_high)
    reason = f": {to_one_line(row.unscored_reason)}" if row.unscored_reason and not row.error else ""
    unscored = f" ({row.num_unscored} unscored{reason})" if row.num_unscored else ""
    examples = f" on {count_examples(row.num_examples, row.num_clusters)}" if row.num_examples is not None else ""
    error = f": {to_one_line(row.error)}" if row.error else ""
    texts = {metric: "unknown" if mean is None else f"{mean:.3f}" for metric, mean in row.metrics.items()}
    means = [f"{to_one_line(metric)} {text}" for metric, text in texts.items()]
    evaluators = f"; {', '.join(means)}" if len(means) > 1 else ""
    return f"{name}: reward {interval}{examples}{unscored}{error}{evaluators}"
