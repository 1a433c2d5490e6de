"""The summary of a run: summary.json and the closing lines on the terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import click

from reinforge.adapters.openai_model import HOSTED_MODEL
from reinforge.errors import StorageError, boundary
from reinforge.evaluation.statistics import Improvement, format_interval
from reinforge.files import replace_file, writing
from reinforge.runs.saved_model import adapters_in
from reinforge.types.evaluation import MetricSummary
from reinforge.types.trajectory import Outcome

RunStatus = Literal["completed", "failed", "cancelled", "stopped"]


_MISSING = [outcome.value for outcome in Outcome if outcome.is_missing]


@dataclass
class RunSummary:
    """One run, as it ended.

    Attributes:
        run_id: Its name.
        status: `stopped` is a budget or a signal.
        folder: The run folder; not written.
        reason: One sentence: the gate's reason where there was a verdict, else why the run ended.
        baseline: The base model on `select`.
        final: The model after the last epoch, on `select`.
        best: The best checkpoint on `select`.
        confirm_base, confirm_tuned: The two arms of the verdict on `confirm`.
        improvement: Tuned minus base on `confirm`.
        promoted: None: no verdict.
        episodes: Outcome -> number of episodes, over the whole run.
        tokens: `prompt`, `completion` and `trained`.
        wall_time_s: Stage -> seconds.
        policy_versions: `version`, `fingerprint` and `num_updates` (steps of the job that made it), oldest first.
        checkpoint: The best checkpoint, relative to the folder.
        config_sha256: Of the resolved configuration.
    """

    run_id: str
    status: RunStatus
    folder: Path
    reason: str = ""
    baseline: MetricSummary | None = None
    final: MetricSummary | None = None
    best: MetricSummary | None = None
    confirm_base: MetricSummary | None = None
    confirm_tuned: MetricSummary | None = None
    improvement: Improvement | None = None
    promoted: bool | None = None
    episodes: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    wall_time_s: dict[str, float] = field(default_factory=dict)
    policy_versions: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: str | None = None
    config_sha256: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns what `summary.json` holds (design.md, section 7)."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "folder"}
        return {name: value.as_dict() if hasattr(value, "as_dict") else value for name, value in values.items()}

    @property
    def num_updates(self) -> int | None:
        """Optimizer steps over the whole run; None where the backend does not tell."""
        counts = [version.get("num_updates") for version in self.policy_versions]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None

    @property
    def is_cut_short(self) -> bool:
        """True where the run did not reach its verdict."""
        return self.status != "completed"

    def headline(self) -> str:
        """Returns how the run ended, in a few words."""
        if self.status != "completed":
            return {"failed": "failed", "cancelled": "was cancelled", "stopped": "stopped before its end"}[self.status]
        if self.promoted:
            return "made the agent better"
        if self.num_updates == 0:
            return "learned nothing: no update was made"
        if self.promoted is None:
            return "trained, but there is no verdict"
        low, high = (self.improvement.ci_low, self.improvement.ci_high) if self.improvement else (None, None)
        if low is not None and low > 0:
            return "improved, but not as the gate asks"
        if high is not None and high < 0:
            return "made the agent worse"
        return "learned nothing that shows on examples it has not seen"

    def facts(self) -> list[tuple[str, str]]:
        """Returns the summary as pairs of name and text, for the terminal and the report alike."""
        folder, reason = self.folder, " ".join(self.reason.split())
        verdict = {True: "yes", False: "no", None: "no verdict"}[self.promoted]
        pairs = [("reward", self._reward_text())]
        if self.improvement is not None or not self.is_cut_short:
            pairs.append(("improvement", _improvement_text(self.improvement)))
        undecided = self.is_cut_short and self.promoted is None
        pairs += [
            ("reason", reason) if undecided else ("promoted", f"{verdict}: {reason}"),
            ("best", self._best_text()),
            ("time", _time_text(self.wall_time_s)),
            ("tokens", _tokens_text(self.tokens, self.num_updates)),
            ("episodes", _episodes_text(self.episodes)),
            ("report", f"{folder / 'report.md'}, {folder / 'reward_plot.png'}"),
        ]
        if self.promoted:
            what, several = "from_pretrained loads it", ", ".join(adapters_in(folder / "model"))
            if (folder / "model" / HOSTED_MODEL).is_file():
                what = f"{HOSTED_MODEL} names it; the service holds it"
            elif several:
                what = f"the adapters {several}: from_pretrained loads each"
            pairs.append(("model", f"{folder / 'model'} ({what})"))
        if self.status == "failed":
            pairs.append(("log", str(folder / "run.log")))
        if self.is_cut_short:
            pairs.append(("kept", f"{folder} (episodes, metrics and checkpoints up to then)"))
        return pairs

    def closing_lines(self, color: bool) -> list[str]:
        """Returns the lines that end a run on the terminal, ten of them or fewer.

        Args:
            color: Mark the headline and the names with ANSI colours.
        """
        tone = (
            "green" if self.promoted and self.status == "completed" else "red" if self.status == "failed" else "yellow"
        )
        head = f"{self.run_id} {self.headline()}"
        lines = [click.style(head, fg=tone, bold=True) if color else head]
        for name, text in self.facts():
            label = f"  {name:<12}"
            lines.append((click.style(label, dim=True) if color else label) + text)
        return lines

    def _reward_text(self) -> str:
        before: MetricSummary | None
        after: MetricSummary | None
        if self.confirm_base is not None and self.confirm_tuned is not None:
            before, after, split = self.confirm_base, self.confirm_tuned, "confirm"
        elif self.baseline is not None or self.final is not None:
            before, after, split = self.baseline, self.final, "select"
        else:
            return "unknown: no evaluation was finished"
        shown = next(figures for figures in (after, before) if figures is not None)
        unscored = f", {shown.num_unscored} unscored" if shown.num_unscored else ""
        where = f"({shown.metric} on {shown.num_examples} {split} examples{unscored})"
        return f"{_figure_text(before)} -> {_figure_text(after)} {where}"

    def _best_text(self) -> str:
        if self.checkpoint is None:
            return "no checkpoint beat the base model" if self.best else "no checkpoint"
        return f"{self.checkpoint}" + (f", {_figure_text(self.best)} on select" if self.best else "")


def write_summary(path: Path, summary: RunSummary) -> None:
    """Writes `summary.json` whole or not at all.

    Raises:
        StorageError: It cannot be written, or holds a number that JSON cannot (NaN).
    """
    with writing(path):
        text = json.dumps(summary.as_dict(), indent=2, allow_nan=False, default=str)
    replace_file(path, text + "\n")


def load_summary(folder: Path) -> RunSummary:
    """Returns the summary that a run wrote.

    Raises:
        StorageError: It cannot be read.
    """
    with boundary(StorageError, f"reading {folder / 'summary.json'}"):
        values = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        for name in ("baseline", "final", "best", "confirm_base", "confirm_tuned"):
            values[name] = MetricSummary(**values[name]) if values[name] else None
        values["improvement"] = Improvement(**values["improvement"]) if values["improvement"] else None
        return RunSummary(folder=folder, **values)


def _figure_text(figures: MetricSummary | None) -> str:
    return format_interval(figures.mean, figures.ci_low, figures.ci_high) if figures else "unknown"


def _improvement_text(improvement: Improvement | None) -> str:
    if improvement is None:
        return "unknown: the two models were not compared"
    p_value = "p < 0.001" if improvement.p_value < 0.001 else f"p = {improvement.p_value:.3f}"
    return f"{improvement}, 95 % interval over {improvement.num_pairs} examples, {p_value}"


def _time_text(wall_time_s: dict[str, float]) -> str:
    longest = sorted(wall_time_s.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{stage.lower()} {duration_text(seconds)}" for stage, seconds in longest)
    return f"{duration_text(sum(wall_time_s.values()))} ({parts})" if parts else "unknown"


def _tokens_text(tokens: dict[str, int], num_updates: int | None) -> str:
    words = {"prompt": "prompt", "completion": "sampled", "trained": "trained"}
    parts = [f"{tokens[key]:,} {word}" for key, word in words.items() if key in tokens]
    steps = "" if num_updates is None else f"; {num_updates:,} optimizer steps"
    return f"{', '.join(parts) or 'unknown'}{steps}"


def _episodes_text(episodes: dict[str, int]) -> str:
    """Returns `1,200 (1,150 ok, 20 policy_error); dropped 30: 20 timeout, 10 judge_error`."""
    dropped = {name: count for name, count in episodes.items() if name in _MISSING and count}
    scored = {name: count for name, count in episodes.items() if name not in _MISSING and count}
    text = f"{sum(episodes.values()):,}" + (f" ({_counts(scored)})" if scored else "")
    return f"{text}; dropped {sum(dropped.values()):,}" + (f": {_counts(dropped)}" if dropped else "")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def duration_text(seconds: float) -> str:
    """Returns `0.4 s`, `12 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
