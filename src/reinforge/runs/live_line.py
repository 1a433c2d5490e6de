"""The live line of a run on a terminal, with a bar; below the permanent lines of epochs and validations."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reinforge.runs.progress import (
    BAR,
    Clock,
    StatusLine,
    format_epoch,
    format_settings,
    format_start,
    format_validation,
)
from reinforge.runs.rows import EpochMetrics, ValidationRow
from reinforge.safe_text import to_one_line


class LiveLine(StatusLine):
    """Draws a live line on a terminal, or on another `console`."""

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic):
        super().__init__(clock)
        self._console = console if console is not None else Console(stderr=True, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=4,
            transient=True,
            # output that is redirected to a file must stay there
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        """Shows the run's name, its folder and the settings that took effect."""
        super().start(run_id, folder, num_epochs, settings)
        self._print(format_start(run_id, folder), "bold")
        for line in format_settings(settings):
            self._print(line, "dim")

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        super().stage(epoch, stage, total)
        self._live.start()

    def epoch_done(self, metrics: EpochMetrics) -> None:
        self._print(format_epoch(metrics, self._counters.num_epochs, self._counters.end_epoch()))

    def validation(self, row: ValidationRow) -> None:
        self._print(format_validation(row), "yellow" if row.avg_reward is None else "cyan")

    def note(self, text: str) -> None:
        self._print(to_one_line(text), "yellow")

    def close(self) -> None:
        self._live.stop()

    def _print(self, line: str, style: str = "") -> None:
        # Text, not str: names and folders must not be parsed as markup
        self._console.print(Text(line, style=style), soft_wrap=True)

    def _render(self) -> Table:
        counters, line = self._counters, Table.grid(padding=(0, 1))
        found, cells = counters.estimate(), list[ProgressBar | Text]()
        if found is not None:
            width = BAR if self._console.width >= 80 else BAR // 2
            line.add_column(min_width=width)
            cells.append(ProgressBar(total=1.0, completed=found[0], width=width))
        text = Text(f"{found[0]:>4.0%} " if found is not None else "")
        text.append(counters.format_position(), style="bold")
        text.append(f" {', '.join(counters.format_counts())}")
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(*cells, text)
        return line


def open_live_line(stream: TextIO, clock: Clock, *, no_color: bool) -> LiveLine:
    return LiveLine(Console(file=stream, highlight=False, no_color=no_color), clock)
