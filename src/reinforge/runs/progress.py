"""What a person sees while a run goes on.

    RichProgress    a terminal: one live line with a bar, and one line that stays for each epoch and validation
    PlainProgress   a file, a pipe, CI, TERM=dumb: the lines that stay, and at most one line of progress in 5 s
    SilentProgress  nothing

`default_progress()` chooses. `episode` is called for every episode and only counts; what is shown is made from the
counters when it is shown, four times a second at most.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reinforge.evaluation.statistics import format_interval
from reinforge.runs.summary import duration_text
from reinforge.types.trajectory import Outcome

Clock = Callable[[], float]
_MISSING = frozenset(outcome.value for outcome in Outcome if outcome.is_missing)


class RunProgress(Protocol):
    """What a run tells while it goes on; every call returns at once and none may stop a run."""

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        """Shows the run's name, its folder and the settings that took effect."""

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """A stage begins; `epoch` is None outside the epochs, `total` the number of its episodes where it runs any."""

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        """An episode ended with `num_tokens` sampled tokens; `reward` is None where it is unknown."""

    def epoch_done(self, epoch: int, metrics: dict[str, Any]) -> None:
        """An epoch ended; `metrics` is its row of the reward history."""

    def validation(self, epoch: int, report: dict[str, Any]) -> None:
        """A validation ended, as `run_validation_evaluation` gives it; epoch -1 is the baseline."""

    def note(self, text: str) -> None:
        """Something to know, in one line that stays."""

    def close(self) -> None:
        """The run is over; may be called twice."""


class SilentProgress:
    """Shows nothing."""

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        """Does nothing."""

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Does nothing."""

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        """Does nothing."""

    def epoch_done(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Does nothing."""

    def validation(self, epoch: int, report: dict[str, Any]) -> None:
        """Does nothing."""

    def note(self, text: str) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


@dataclass
class _Counters:
    """Where a run stands; the part that both displays share."""

    clock: Clock
    num_epochs: int = 0
    epoch: int | None = None
    stage: str = ""
    total: int | None = None
    stage_since_s: float = 0.0
    num_done: int = 0
    num_missing: int = 0
    num_rewards: int = 0
    sum_rewards: float = 0.0
    num_tokens: int = 0
    epoch_since_s: float = 0.0
    training_since_s: float | None = None
    num_epochs_left: int | None = None
    num_epochs_timed: int = 0
    last_epoch_ended_s: float = 0.0

    def begin_stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        now = self.clock()
        if epoch is not None and epoch >= 0 and epoch != self.epoch:
            self.epoch_since_s = now
            if self.training_since_s is None:
                self.training_since_s = now
        self.epoch, self.stage, self.total, self.stage_since_s = epoch, stage, total, now
        self.num_done = self.num_missing = self.num_rewards = self.num_tokens = 0
        self.sum_rewards = 0.0

    def add(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        self.num_done += 1
        self.num_tokens += num_tokens
        if outcome in _MISSING:
            self.num_missing += 1
        elif reward is not None:
            self.num_rewards += 1
            self.sum_rewards += reward

    def end_epoch(self, epoch: int) -> float:
        """Returns the seconds since the epoch began."""
        self.last_epoch_ended_s = self.clock()
        self.num_epochs_left = self.num_epochs - epoch - 1
        self.num_epochs_timed += 1
        return self.last_epoch_ended_s - self.epoch_since_s

    def time_left_s(self) -> float | None:
        """Returns the epochs left times the mean of those past, validations included; None before the first is over."""
        if self.num_epochs_left is None or self.training_since_s is None:
            return None
        mean = (self.last_epoch_ended_s - self.training_since_s) / self.num_epochs_timed
        return max(0.0, self.num_epochs_left * mean - (self.clock() - self.last_epoch_ended_s))

    def place(self) -> str:
        """Returns `epoch 3 (4/20) collect` or `confirm`; the first number is the one in every file of the run."""
        stage = self.stage.lower()
        if self.epoch is None or self.epoch < 0:
            return stage
        return f"epoch {self.epoch} ({self.epoch + 1}/{self.num_epochs}) {stage}"

    def parts(self) -> list[str]:
        """Returns what is known of the stage that runs now, in few words."""
        parts: list[str] = []
        if self.total is not None or self.num_done:
            parts.append(f"{self.num_done}/{self.total} episodes" if self.total else f"{self.num_done} episodes")
        if self.num_rewards:
            parts.append(f"reward {self.sum_rewards / self.num_rewards:.3f}")
        if self.num_missing:
            parts.append(f"{self.num_missing} missing")
        left = self.time_left_s()
        if left:
            parts.append(f"~{duration_text(left)} left")
        seconds = self.clock() - self.stage_since_s
        if self.num_tokens and seconds > 0:
            parts.append(f"{self.num_tokens / seconds:,.0f} tokens/s")
        return parts


class PlainProgress:
    """Plain lines, for a stream that is not a terminal.

    Args:
        stream: Where lines go; None: standard error.
        every_s: Seconds between two lines of progress.
        clock: Seconds; another one for tests.
    """

    def __init__(self, stream: TextIO | None = None, every_s: float = 5.0, clock: Clock = time.monotonic):
        self._stream: TextIO | None = stream if stream is not None else sys.stderr
        self._every_s = every_s
        self._counters = _Counters(clock)
        self._next_s = clock() + every_s

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        """Writes the run's name, its folder and the settings that took effect."""
        self._counters.num_epochs = num_epochs
        self._lines([_start_line(run_id, folder), *_setting_lines(settings)])

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Remembers where the run stands."""
        self._counters.begin_stage(epoch, stage, total)
        self._progress_if_due()

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        """Counts, and writes a line if the last one is old enough."""
        self._counters.add(outcome, reward, num_tokens)
        if self._counters.clock() >= self._next_s:
            self._progress_if_due()

    def epoch_done(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Writes the epoch's line."""
        self._lines([_epoch_line(epoch, self._counters.num_epochs, metrics, self._counters.end_epoch(epoch))])

    def validation(self, epoch: int, report: dict[str, Any]) -> None:
        """Writes the validation's line."""
        self._lines([_validation_line(epoch, report)])

    def note(self, text: str) -> None:
        """Writes the text as one line."""
        self._lines([_one_line(text)])

    def close(self) -> None:
        """Flushes the stream."""
        self._lines([])

    def _progress_if_due(self) -> None:
        now = self._counters.clock()
        if now < self._next_s:
            return
        self._next_s = now + self._every_s
        self._lines([f"  {self._counters.place()}: {', '.join(self._counters.parts()) or 'running'}"])

    def _lines(self, lines: Sequence[str]) -> None:
        """Writes and flushes; a stream that is gone (a closed pipe) must not stop a run."""
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            for line in lines:
                self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


class RichProgress:
    """A live line on a terminal.

    Args:
        console: Where to draw; None: standard error.
        clock: Seconds; another one for tests.
    """

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic):
        self._console = console if console is not None else Console(stderr=True, highlight=False)
        self._counters = _Counters(clock)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # output that goes to a file must stay there
        )

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        """Shows the run's name, its folder and the settings that took effect, then the live line."""
        self._counters.num_epochs = num_epochs
        self._print(_start_line(run_id, folder), "bold")
        for line in _setting_lines(settings):
            self._print(line, "dim")
        self._live.start()

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Remembers where the run stands."""
        self._counters.begin_stage(epoch, stage, total)

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        """Counts."""
        self._counters.add(outcome, reward, num_tokens)

    def epoch_done(self, epoch: int, metrics: dict[str, Any]) -> None:
        """Prints the epoch's line above the live one."""
        self._print(_epoch_line(epoch, self._counters.num_epochs, metrics, self._counters.end_epoch(epoch)))

    def validation(self, epoch: int, report: dict[str, Any]) -> None:
        """Prints the validation's line above the live one."""
        self._print(_validation_line(epoch, report), "yellow" if report.get("avg_reward") is None else "cyan")

    def note(self, text: str) -> None:
        """Prints the text above the live line."""
        self._print(_one_line(text), "yellow")

    def close(self) -> None:
        """Takes the live line away."""
        self._live.stop()

    def _print(self, line: str, style: str = "") -> None:
        # Text, not str: what an agent or a folder is called must not be read as markup
        self._console.print(Text(line, style=style), soft_wrap=True)

    def _render(self) -> Table:
        counters, width = self._counters, self._console.width
        cells: list[Text | ProgressBar] = [Text(counters.place(), style="bold")]
        bar_width = 24 if width >= 110 else 12 if width >= 100 else 0
        if not counters.total:
            cells.append(Text(duration_text(counters.clock() - counters.stage_since_s) if counters.stage else ""))
        elif bar_width:
            done = min(counters.num_done, counters.total)
            cells.append(ProgressBar(total=counters.total, completed=done, width=bar_width))
        line = Table.grid(padding=(0, 1))
        for cell in cells:
            line.add_column(no_wrap=True, min_width=cell.cell_len if isinstance(cell, Text) else bar_width)
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(*cells, Text(", ".join(counters.parts())))
        return line


def default_progress(stream: TextIO | None = None, environment: Mapping[str, str] | None = None) -> RunProgress:
    """Returns the display that fits a stream: live on a terminal, plain lines elsewhere and under CI or TERM=dumb.

    Args:
        stream: None: standard error, so that standard output stays free for results.
        environment: None: the process's; `CI`, `TERM` and `NO_COLOR` are read.
    """
    stream = stream if stream is not None else sys.stderr
    environment = environment if environment is not None else os.environ
    in_ci = environment.get("CI", "").lower() not in ("", "0", "false")
    if in_ci or environment.get("TERM") == "dumb" or not stream.isatty():
        return PlainProgress(stream)
    return RichProgress(Console(file=stream, highlight=False, no_color=bool(environment.get("NO_COLOR"))))


def _start_line(run_id: str, folder: Path) -> str:
    return _one_line(f"{run_id} in {folder}")


def _setting_lines(settings: Sequence[tuple[str, str]]) -> list[str]:
    """Returns `  name   value` with all values in one column."""
    width = max((len(name) for name, _ in settings), default=0)
    return [f"  {name:<{width}}  {_one_line(value)}" for name, value in settings]


def _epoch_line(epoch: int, num_epochs: int, metrics: dict[str, Any], seconds: float) -> str:
    """Returns `epoch 3 (4/20): reward 0.512 [0.480, 0.544], 30 of 64 groups kept (reward 0.550), 12 s`."""
    parts = [f"reward {format_interval(metrics.get('avg_reward'), metrics.get('ci_low'), metrics.get('ci_high'))}"]
    if metrics.get("avg_reward") is None and metrics.get("loss") is not None:  # a dataset's rows have no reward
        parts = [f"loss {metrics['loss']:.3f}"]
    kept, total, filtered = (metrics.get(key) for key in ("num_groups_kept", "num_groups", "filtered_avg_reward"))
    if kept is not None and total is not None:
        parts.append(f"{kept} of {total} groups kept" + (f" (reward {filtered:.3f})" if filtered is not None else ""))
    share = metrics.get("curriculum_percentile")
    if share is not None and share < 1:
        parts.append(f"curriculum {share:.0%}")
    if metrics.get("num_missing"):
        parts.append(f"{metrics['num_missing']} missing")
    if metrics.get("num_skipped_steps"):
        parts.append(f"{metrics['num_skipped_steps']} optimizer steps refused: not finite")
    return f"epoch {epoch} ({epoch + 1}/{num_epochs}): {', '.join(parts)}, {duration_text(seconds)}"


def _validation_line(epoch: int, report: dict[str, Any]) -> str:
    """Returns `  validation after epoch 3: reward 0.512 [0.480, 0.544] on 200 examples`."""
    name = "baseline" if epoch < 0 else f"  validation after epoch {epoch}"
    figure = format_interval(report.get("avg_reward"), report.get("ci_low"), report.get("ci_high"))
    unscored = f" ({report['num_unscored']} unscored)" if report.get("num_unscored") else ""
    examples = f" on {report['num_examples']} examples" if report.get("num_examples") is not None else ""
    error = f": {_one_line(str(report['error']))}" if report.get("error") else ""
    return f"{name}: reward {figure}{examples}{unscored}{error}"


def _one_line(text: str) -> str:
    """Returns the text without line breaks and control characters, which could rewrite the screen."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
