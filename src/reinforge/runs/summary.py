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
from reinforge.files import replace_file, storage_boundary
from reinforge.runs.plot import can_draw_plots
from reinforge.runs.rows import PolicyVersion
from reinforge.runs.saved_model import list_adapters
from reinforge.types.evaluation import MetricSummary
from reinforge.types.trajectory import Outcome

RunStatus = Literal["completed", "failed", "cancelled", "stopped"]

STAGE_NAMES = {"AWAIT": "train", "ADOPT": "publish"}
"""Stages whose name on the terminal differs from the one in the journal."""

_MISSING = [outcome.value for outcome in Outcome if outcome.is_missing]


@dataclass
class RunSummary:
    """How a run ended.

    Attributes:
        run_id: Name of the run.
        status: `stopped`: by a budget or a signal.
        folder: The run folder; not part of `summary.json`.
        reason: One sentence: the gate's reason if there is a verdict, else why the run ended.
        baseline: The base model on `select`.
        final: The model after the last epoch on `select`.
        best: The best checkpoint on `select`.
        confirm_base, confirm_tuned: Base model and best checkpoint on `confirm`.
        improvement: Tuned minus base on `confirm`.
        promoted: Whether the best checkpoint passed the gate; None: no verdict.
        episodes: Outcome -> number of episodes of the whole run.
        tokens: Number of `prompt`, `completion` and `trained` tokens.
        wall_time_s: Stage -> seconds.
        policy_versions: Every version of the weights, the oldest first.
        checkpoint: The best checkpoint, relative to the run folder.
        config_sha256: Hash of the resolved configuration.
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
    policy_versions: list[PolicyVersion] = field(default_factory=list)
    checkpoint: str | None = None
    config_sha256: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns what `summary.json` holds."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "folder"}
        plain = {name: value.as_dict() if hasattr(value, "as_dict") else value for name, value in values.items()}
        return {**plain, "policy_versions": [version.as_dict() for version in self.policy_versions]}

    @property
    def num_updates(self) -> int | None:
        """Optimizer steps of the whole run; None: the backend does not report them."""
        counts = [version.num_updates for version in self.policy_versions]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None

    @property
    def is_incomplete(self) -> bool:
        """True if the run did not reach its end."""
        return self.status != "completed"

    def headline(self) -> str:
        """Returns how the run ended, to follow its name: `improved the agent`."""
        if self.status != "completed":
            return {"failed": "failed", "cancelled": "was cancelled", "stopped": "stopped early"}[self.status]
        if self.promoted:
            return "improved the agent"
        if self.num_updates == 0:
            return "trained nothing: no optimizer step was made"
        if self.promoted is None:
            return "finished without a verdict"
        low, high = (self.improvement.ci_low, self.improvement.ci_high) if self.improvement else (None, None)
        if low is not None and low > 0:
            return "improved the agent, but did not pass the gate"
        if high is not None and high < 0:
            return "made the agent worse"
        return "shows no improvement on held-out examples"

    def facts(self) -> list[tuple[str, str]]:
        """Returns the summary as pairs of name and text, for the terminal and for `report.md`."""
        folder, reason = self.folder, " ".join(self.reason.split())
        verdict = {True: "yes", False: "no", None: "no verdict"}[self.promoted]
        pairs = [("reward", self._format_reward())]
        if self.improvement is not None or not self.is_incomplete:
            pairs.append(("improvement", _format_improvement(self.improvement)))
        undecided = self.is_incomplete and self.promoted is None
        pairs += [
            ("reason", reason) if undecided else ("promoted", f"{verdict}: {reason}"),
            ("best", self._format_best()),
            ("time", _format_time(self.wall_time_s)),
            ("tokens", _format_tokens(self.tokens, self.num_updates)),
            ("episodes", _format_episodes(self.episodes)),
            ("report", f"{folder / 'report.md'}" + (f", {folder / 'reward_plot.png'}" if can_draw_plots() else "")),
        ]
        if self.promoted:
            hint, adapters = "load it with from_pretrained", ", ".join(list_adapters(folder / "model"))
            if (folder / "model" / HOSTED_MODEL).is_file():
                hint = f"hosted by the service, under the name in {HOSTED_MODEL}"
            elif adapters:
                hint = f"adapters {adapters}: load each with from_pretrained"
            pairs.append(("model", f"{folder / 'model'} ({hint})"))
        if self.status == "failed":
            pairs.append(("log", str(folder / "run.log")))
        if self.is_incomplete:
            pairs.append(("saved", f"{folder} (episodes, metrics and checkpoints so far)"))
        return pairs

    def closing_lines(self, color: bool) -> list[str]:
        """Returns the last lines of a run on the terminal, at most ten.

        Args:
            color: Style the headline and the names with ANSI colours.
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

    def _format_reward(self) -> str:
        before: MetricSummary | None
        after: MetricSummary | None
        if self.confirm_base is not None and self.confirm_tuned is not None:
            before, after, split = self.confirm_base, self.confirm_tuned, "confirm"
        elif self.baseline is not None or self.final is not None:
            before, after, split = self.baseline, self.final, "select"
        else:
            return "unknown: no evaluation finished"
        shown = next(summary for summary in (after, before) if summary is not None)
        unscored = f", {shown.num_unscored} unscored" if shown.num_unscored else ""
        where = f"({shown.metric} on {shown.num_examples} {split} examples{unscored})"
        return f"{_format_mean(before)} -> {_format_mean(after)} {where}"

    def _format_best(self) -> str:
        if self.checkpoint is None:
            return "no checkpoint beat the base model" if self.best else "no checkpoint"
        return f"{self.checkpoint}" + (f", {_format_mean(self.best)} on select" if self.best else "")


def write_summary(path: Path, summary: RunSummary) -> None:
    """Writes `summary.json`, whole or not at all.

    Raises:
        StorageError: It cannot be written, or holds a number that is not finite, which JSON does not know.
    """
    with storage_boundary(path):
        text = json.dumps(summary.as_dict(), indent=2, allow_nan=False, default=str)
    replace_file(path, text + "\n")


def load_summary(folder: Path) -> RunSummary:
    """Returns the summary of a run that has ended.

    Raises:
        StorageError: It cannot be read.
    """
    with boundary(StorageError, f"cannot read {folder / 'summary.json'}"):
        values = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        for name in ("baseline", "final", "best", "confirm_base", "confirm_tuned"):
            values[name] = MetricSummary(**values[name]) if values[name] else None
        values["improvement"] = Improvement(**values["improvement"]) if values["improvement"] else None
        values["policy_versions"] = [PolicyVersion.from_dict(row) for row in values["policy_versions"]]
        return RunSummary(folder=folder, **values)


def _format_mean(summary: MetricSummary | None) -> str:
    return format_interval(summary.mean, summary.ci_low, summary.ci_high) if summary else "unknown"


def _format_improvement(improvement: Improvement | None) -> str:
    if improvement is None:
        return "unknown: the two models were not compared on held-out examples"
    p_value = "p < 0.001" if improvement.p_value < 0.001 else f"p = {improvement.p_value:.3f}"
    return f"{improvement}, 95 % interval over {improvement.num_pairs} examples, {p_value}"


def _format_time(wall_time_s: dict[str, float]) -> str:
    longest = sorted(wall_time_s.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(
        f"{STAGE_NAMES.get(stage, stage.lower())} {format_duration(seconds)}" for stage, seconds in longest
    )
    return f"{format_duration(sum(wall_time_s.values()))} ({parts})" if parts else "unknown"


def _format_tokens(tokens: dict[str, int], num_updates: int | None) -> str:
    words = {"prompt": "prompt", "completion": "sampled", "trained": "trained"}
    parts = [f"{tokens[key]:,} {word}" for key, word in words.items() if key in tokens]
    steps = "" if num_updates is None else f"; {num_updates:,} optimizer steps"
    return f"{', '.join(parts) or 'unknown'}{steps}"


def _format_episodes(episodes: dict[str, int]) -> str:
    """Returns `1,200 (1,150 ok, 20 policy_error); dropped 30: 20 timeout, 10 judge_error`."""
    dropped = {name: count for name, count in episodes.items() if name in _MISSING and count}
    scored = {name: count for name, count in episodes.items() if name not in _MISSING and count}
    text = f"{sum(episodes.values()):,}" + (f" ({_format_counts(scored)})" if scored else "")
    return f"{text}; dropped {sum(dropped.values()):,}" + (f": {_format_counts(dropped)}" if dropped else "")


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def format_duration(seconds: float) -> str:
    """Returns `0.4 s`, `12 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
