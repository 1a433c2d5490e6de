"""Progress in a notebook: one output that is updated in place, then one with the verdict, the curve and episodes.

A notebook keeps every line that is written, so the plain lines of a long run would fill it. IPython instead replaces
an output that has a display id.
"""

from __future__ import annotations

import html
import importlib
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from reinforge.runs.progress import Clock, PlainProgress
from reinforge.runs.summary import RunSummary

MAX_LINES = 20  # lines of epochs and validations that are shown; the earlier ones are in `training_metrics.jsonl`


class Display(Protocol):
    """Shows an output: `IPython.display.display`."""

    def __call__(self, bundle: dict[str, str], *, raw: bool, display_id: str, update: bool) -> Any:
        """Shows an output, or replaces the one with the same id if `update`; `bundle` has the content by MIME type."""


def find_display() -> Display | None:
    """Returns the display of the notebook that runs this code; None: it runs in no notebook.

    IPython in a terminal has no kernel, and its outputs cannot be replaced.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    return cast(Display, importlib.import_module("IPython.display").display)


class NotebookProgress(PlainProgress):
    """Shows a run in one output: its name, the latest lines, and what it is doing now."""

    def __init__(self, display: Display, every_s: float = 0.5, clock: Clock = time.monotonic):
        super().__init__(io.StringIO(), every_s, clock)
        self._display, self._name = display, ""
        self._title, self._settings = "", list[tuple[str, str]]()
        self._lines, self._now, self._is_closed = list[str](), "", False
        self._num_lines = 0

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        self._counters.num_epochs = num_epochs
        self._title, self._settings = f"run {run_id} in {folder}", list(settings)
        self._draw()

    def close(self) -> None:
        self._is_closed = True
        self._draw()

    def show_summary(self, summary: RunSummary) -> None:
        text = "\n".join(summary.closing_lines(color=False))
        self._show(f"reinforge-{summary.run_id}-{id(self)}-summary", format_summary(summary), text, update=False)

    def _write(self, lines: Sequence[str]) -> None:
        self._lines, self._num_lines = [*self._lines, *lines][-MAX_LINES:], self._num_lines + len(lines)
        if self._is_closed or self._counters.clock() >= self._next_s:
            self._draw()

    def refresh(self) -> None:
        if self._counters.clock() >= self._next_s:
            self._draw()

    def _draw(self) -> None:
        self._next_s = self._counters.clock() + self._every_s
        hidden = self._num_lines - len(self._lines)
        lines = [*([f"({hidden} earlier lines: see training_metrics.jsonl)"] if hidden else []), *self._lines]
        if not self._is_closed and self._counters.stage:
            lines.append(self.format_line())
        width = max((len(name) for name, _ in self._settings), default=0)
        settings = "\n".join(f"{name:<{width}}  {value}" for name, value in self._settings)
        folded = f"<details><summary>settings</summary>{_format_block(settings)}</details>" if settings else ""
        content = f"<b>{html.escape(self._title)}</b>{folded}{_format_block(chr(10).join(lines))}"
        is_new, self._name = not self._name, self._name or f"reinforge-{id(self)}-{time.time_ns()}"
        self._show(self._name, content, "\n".join([self._title, *lines]), update=not is_new)

    def _show(self, name: str, content: str, text: str, *, update: bool) -> None:
        """Shows an output; a notebook that is gone must not stop the run."""
        try:
            self._display({"text/html": content, "text/plain": text}, raw=True, display_id=name, update=update)
        except Exception:  # noqa: BLE001  a front end may fail in any way; the run continues without it
            self._display = _show_nothing


def _show_nothing(bundle: dict[str, str], *, raw: bool, display_id: str, update: bool) -> None: ...


def format_summary(summary: RunSummary) -> str:
    """Returns how a run ended as HTML, in a frame, so that the notebook's styles and those of the page stay apart."""
    try:
        from reinforge.runs.page.page import format_excerpt  # for a summary that is shown

        page = html.escape(format_excerpt(summary))
    except Exception:  # noqa: BLE001  the run folder was moved or is damaged: the summary itself is known
        return _format_block("\n".join(summary.closing_lines(color=False)))
    return f'<iframe sandbox srcdoc="{page}" title="run" style="width: 100%; height: 40rem; border: 0"></iframe>'


def _format_block(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'
