"""The summary of a run: summary.json and the closing lines on the terminal."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from reinforge.adapters.hosted_model import HOSTED_MODEL
from reinforge.config.imports import PYTHON_OBJECT
from reinforge.errors import StorageError, boundary
from reinforge.evaluation.changes import MetricChange
from reinforge.evaluation.statistics import Improvement, format_interval
from reinforge.files import read_json_file, read_regular_file, replace_file, storage_boundary
from reinforge.registry import load_named
from reinforge.runs.checkpoints import list_adapters
from reinforge.runs.predictions import Prediction
from reinforge.runs.rows import BASELINE, MISSING, GuardEvent, PolicyVersion, ValidationRow, choose_best_validation
from reinforge.safe_text import to_printable
from reinforge.types.evaluation import MetricSummary, count_examples

if TYPE_CHECKING:
    from reinforge.evaluation.non_inferiority import NonInferiority

RunStatus = Literal["completed", "failed", "cancelled", "stopped"]

SCREEN_ROWS, SCREEN_WIDTH, LABEL = 24, 100, 14
"""Rows and columns of the screen that the closing lines fit, and the columns of a label."""
DETAILS = ("ignored", "tokens", "stages", "evaluator", "transfer", "episodes", "time", "preflight", "best", "guard")
"""Facts that are left out first where the screen is full."""
NEEDS_MATPLOTLIB = 'matplotlib is not installed; install it with pip install "reinforge[plot]"'
STAGE_NAMES = {"AWAIT": "train", "ADOPT": "publish"}
"""Stages whose name on the terminal differs from the one in the journal."""


def can_draw_plots() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a run was not promoted, in figures of this run, and what to change."""

    reason: str  # such as `no signal`
    evidence: str
    fix: str


@dataclass
class RunSummary:
    """How a run ended."""

    run_id: str  # name of the run
    status: RunStatus  # `stopped`: by a budget or a signal
    folder: Path  # the run folder; not part of `summary.json`
    reason: str = ""  # one sentence: the gate's reason if there is a verdict, else why the run ended
    baseline: MetricSummary | None = None  # the base model on `select`
    final: MetricSummary | None = None  # the model after the last epoch, or the last validated one, on `select`
    best: MetricSummary | None = None  # the best checkpoint on `select`
    confirm_base: MetricSummary | None = None  # the base model on `confirm`
    confirm_tuned: MetricSummary | None = None  # the best checkpoint on `confirm`
    improvement: Improvement | None = None  # tuned minus base on `confirm`
    promoted: bool | None = None  # whether the best checkpoint passed the gate; None: no verdict
    episodes: dict[str, int] = field(default_factory=dict)  # outcome -> number of episodes of the whole run
    tokens: dict[str, int] = field(default_factory=dict)  # number of `prompt`, `completion` and `trained` tokens
    wall_time_s: dict[str, float] = field(default_factory=dict)  # stage -> seconds
    policy_versions: list[PolicyVersion] = field(default_factory=list)  # every version of the weights, the oldest first
    checkpoint: str | None = None  # the best checkpoint, relative to the run folder
    config_sha256: str = ""  # hash of the resolved configuration
    evaluators: list[MetricChange] = field(default_factory=list)  # before and after, on `confirm` or else `select`
    warnings: list[str] = field(default_factory=list)  # what to know before the new model is used, one sentence each
    missing_reason: str | None = None  # the most common of the episodes that the environment failed; None: none did
    smoke: bool = False  # it was a quick test of the configuration (`--smoke`), whose metrics mean nothing
    can_resume: bool = True  # False if resuming it would end in the same way
    best_epoch: int | None = None  # epoch of `best`, -1 for the base model; None: unknown
    num_jobs: int | None = None  # training jobs of the whole run; None: unknown
    guards: list[GuardEvent] = field(default_factory=list)  # what the guards found, in the order of the epochs
    stages: dict[str, int] = field(default_factory=dict)  # of the pipeline, with their epochs, in order
    evaluators_sha256: dict[str, str] = field(default_factory=dict)  # hash of code, settings, judge's model
    predictions: list[Prediction] = field(default_factory=list)  # of a preflight, and what the run measured
    ignored: list[str] = field(default_factory=list)  # fields of the agent's requests that nothing used
    transfer: dict[str, Improvement] = field(default_factory=dict)  # by task that was not trained, on the gate's metric
    explanations: list[Explanation] = field(default_factory=list)  # why it was not promoted, the likeliest reason first
    non_inferiority: NonInferiority | None = None  # against `gate.reference`: of `confirm_tuned`, else of the base

    def as_dict(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "folder"}
        plain = {name: value.as_dict() if hasattr(value, "as_dict") else value for name, value in values.items()}
        versions = [version.as_dict() for version in self.policy_versions]
        lists: dict[str, Sequence[MetricChange | GuardEvent]] = {"evaluators": self.evaluators, "guards": self.guards}
        return {
            **plain,
            "policy_versions": versions,
            **{name: [each.as_dict() for each in rows] for name, rows in lists.items()},
            "predictions": list(map(asdict, self.predictions)),
            "explanations": list(map(asdict, self.explanations)),
            "transfer": {task: change.as_dict() for task, change in self.transfer.items()},
        }

    @property
    def num_updates(self) -> int | None:
        """Optimizer steps of the whole run; None: the backend does not report them."""
        counts = [version.num_updates for version in self.policy_versions]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None

    @property
    def is_incomplete(self) -> bool:
        return self.status != "completed"

    def record_best_so_far(self, validations: Sequence[ValidationRow], best: ValidationRow, metric: str) -> None:
        """Records the best validation of a run that ended early, and its last one, by the evaluator of the verdict."""
        self.baseline = self.baseline or validations[0].summaries.get(metric)
        self.final = self.final or (validations[-1].summaries.get(metric) if len(validations) > 1 else None)
        self.best, self.best_epoch = best.summaries.get(metric), best.epoch
        self.checkpoint = best.checkpoint if best.epoch != BASELINE else None

    def headline(self) -> str:
        """Returns how the run ended, to follow its name: `improved the agent`."""
        if self.status != "completed":
            how = {"failed": "failed", "cancelled": "was cancelled", "stopped": "stopped early"}[self.status]
            return f"{how}, and improved the agent" if self.promoted and not self.smoke else how
        if self.smoke:
            return "passed its smoke test: every stage works"
        if self.non_inferiority is not None:
            of_base = self.confirm_tuned is None
            text = self.non_inferiority.headline(self.promoted or of_base, has_warnings=bool(self.warnings))
            return f"did not improve the agent; the untouched base model {text}" if of_base else text
        if self.promoted:
            return "improved the agent" + (" (read the warning)" if self.warnings else "")
        if self.num_jobs == 0:
            return "trained nothing: no training job was submitted"
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
        folder = self.folder
        pairs = self._list_smoke_results() if self.smoke and not self.is_incomplete else self._list_results()
        pairs += [
            ("time", _format_time(self.wall_time_s)),
            ("tokens", _format_tokens(self.tokens, self.num_updates)),
            ("episodes", _format_episodes(self.episodes, self.missing_reason)),
            ("report", ", ".join(str(folder / name) for name in self._list_reports())),
        ]
        pairs += [("preflight", str(each)) for each in self.predictions]
        if self.promoted and not self.smoke:
            hint, adapters = "load it with from_pretrained", ", ".join(list_adapters(folder / "model"))
            if (folder / "model" / HOSTED_MODEL).is_file():
                hint = f"hosted by the service, under the name in {HOSTED_MODEL}"
            elif adapters:
                hint = f"adapters {adapters}: load each with from_pretrained"
            pairs.append(("model", f"{folder / 'model'} ({hint})"))
            if not (folder / "model" / HOSTED_MODEL).is_file():
                name = shlex.quote(str(folder))
                pairs.append(("next", f"reinforge serve {name} --compare; reinforge export {name}"))
        if self.status == "failed":
            pairs.append(("log", str(folder / "run.log")))
        if self.is_incomplete:
            pairs.append(("saved", f"{folder} (what the run has done so far)"))
            pairs += [("resume", describe_resume(folder))] if self.can_resume else []
            pairs += [("judge now", command)] if (command := self.find_verdict_command()) else []
        return pairs

    def find_verdict_command(self) -> str | None:
        """Returns the command that judges a run which stopped without a verdict; None: it has one, or there is none."""
        is_trained = self.checkpoint is not None or any(version.checkpoint for version in self.policy_versions[1:])
        is_open = self.status == "stopped" and self.promoted is None and is_trained and not self.stages
        if not is_open or is_from_python(self.folder):
            return None
        return f"reinforge runs verdict {shlex.quote(str(self.folder))}"

    def _list_reports(self) -> list[str]:
        page = ["report.html"] if (self.folder / "report.html").is_file() else []
        return [*page, "report.md", *(["reward_plot.png"] if can_draw_plots() else [])]

    def _list_results(self) -> list[tuple[str, str]]:
        reason = " ".join(self.reason.split())
        verdict = {True: "yes", False: "no", None: "no verdict"}[self.promoted]
        pairs = [("reward", self._format_reward())]
        if self.improvement is not None or not self.is_incomplete:
            pairs.append(("improvement", _format_improvement(self.improvement)))
        judged = self.non_inferiority.transfer if self.non_inferiority is not None else {}
        changes = {task: _format_improvement(change) for task, change in self.transfer.items()}
        pairs += [("transfer", f"{task} {text}") for task, text in {**changes, **judged}.items()]
        shown = self.confirm_tuned or self.baseline or self.final
        others = [change for change in self.evaluators if shown is None or change.metric != shown.metric]
        pairs += [("evaluator", str(change)) for change in others]
        pairs += [("warning", text) for text in self.warnings]
        pairs += [("guard", str(event)) for event in self.guards]
        pairs += [("ignored", ", ".join(self.ignored))] if self.ignored else []
        undecided = self.is_incomplete and self.promoted is None
        pairs.append(("reason", reason) if undecided else ("promoted", f"{verdict}: {reason}"))
        for each in self.explanations:
            pairs += [("why", f"{each.reason}: {each.evidence}"), ("try", each.fix)]
        pairs.append(("best", self.describe_best()))
        if self.stages:
            named = (f"{name} ({count} epoch{'s' * (count != 1)})" for name, count in self.stages.items())
            pairs.append(("stages", ", ".join(named)))
        return pairs

    def _describe_stage(self, epoch: int | None) -> str:
        """Returns ` (stage sft)` for the stage that an epoch belongs to; nothing without a pipeline."""
        last = BASELINE
        for name, count in self.stages.items():
            last += count
            if epoch is not None and BASELINE < epoch <= last:
                return f" (stage {name})"
        return ""

    def _list_smoke_results(self) -> list[tuple[str, str]]:
        """Returns what a run of `--smoke` did, without the metrics, which two examples do not support."""
        steps = self.num_updates
        trained = "trained" if steps is None else f"made {steps} optimizer step{'s' if steps != 1 else ''}"
        did = [
            "ran the agent",
            f"scored with {', '.join(change.metric for change in self.evaluators) or 'the evaluators'}",
            trained,
            *(["published the new weights"] if len(self.policy_versions) > 1 else []),
            "validated",
            "compared both models on confirm" if self.confirm_tuned is not None else "chose the base model",
        ]
        return [("did", ", ".join(did)), ("next", "run it without --smoke; metrics of two examples mean nothing")]

    def closing_lines(self, color: bool, max_rows: int | None = None) -> list[str]:
        """Returns how the run ended, what that is based on and what to do next.

        Args:
            max_rows: Leave out details, which `report.md` has, beyond so many rows of a terminal; None: leave out none.
        """
        tone = (
            "green" if self.promoted and self.status == "completed" else "red" if self.status == "failed" else "yellow"
        )
        head = to_printable(f"{self.run_id} {self.headline()}")
        lines = [click.style(head, fg=tone, bold=True) if color else head]
        for name, text in self.facts() if max_rows is None else fit_screen(self.facts(), max_rows):
            label = f"  {name:<{LABEL - 2}}"
            style = {"fg": "yellow", "bold": True} if name == "warning" else {"dim": True}
            lines.append((click.style(label, **style) if color else label) + to_printable(text))
        return lines

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: verdict, curve, and episodes before and after."""
        return str(load_named("reinforge.runs.notebook:format_summary")(self))

    def _format_reward(self) -> str:
        before: MetricSummary | None
        after: MetricSummary | None
        if self.confirm_base is not None and self.confirm_tuned is not None:
            before, after, split = self.confirm_base, self.confirm_tuned, "confirm"
        elif self.baseline is not None or self.final is not None:
            after = self.best if self.is_incomplete and self.checkpoint is not None else self.final
            before, split = self.baseline, "select"
        else:
            return "unknown: no evaluation finished"
        shown = next(summary for summary in (after, before) if summary is not None)
        best = ", the best validation so far" if self.is_incomplete and after is not None and after is self.best else ""
        on = count_examples(shown.num_examples, shown.num_clusters).replace(" ", f" {split} ", 1)
        where = f"{shown.metric} on {on}{format_unscored(shown, before=', ')}{best}"
        return f"{_format_mean(before)} -> {_format_mean(after)} ({where})"

    def describe_best(self) -> str:
        """Returns the best checkpoint with its reward on `select`; for a run that ended early also how to use it."""
        if self.checkpoint is None:
            is_trained = self.best_epoch is not None and self.best_epoch > BASELINE and self.num_jobs != 0
            if self.best is not None and is_trained:
                epoch = f"epoch {self.best_epoch}{self._describe_stage(self.best_epoch)}"
                where = f"the model after {epoch}, {_format_mean(self.best)} on select"
                return f"{where}; the backend saves no checkpoint of it"
            if self.is_incomplete and self.best is not None:
                return f"the base model, {_format_mean(self.best)} on select: no validated checkpoint is better"
            if self.num_jobs == 0:
                return "the base model, since nothing was trained"
            return "no checkpoint beat the base model" if self.best else "no checkpoint"
        text = f"{self.checkpoint}{self._describe_stage(self.best_epoch)}" + (
            f", {_format_mean(self.best)} on select" if self.best else ""
        )
        if not self.is_incomplete:
            return text
        chat = f"reinforge chat {shlex.quote(str(self.folder))}"
        return f"{text}; try it with `{chat}`, or load {self.folder / self.checkpoint} with from_pretrained"


def fit_screen(facts: Sequence[tuple[str, str]], max_rows: int) -> list[tuple[str, str]]:
    """Returns the facts that fit below a headline: first details go, then all reasons but the likeliest."""
    kept = list(facts)
    while 1 + sum(-(-(LABEL + len(to_printable(text))) // SCREEN_WIDTH) for _, text in kept) > max_rows - 2:
        names = [name for name, _ in kept]
        if found := next((name for name in DETAILS if name in names), None):
            del kept[len(names) - 1 - names[::-1].index(found)]
        elif names.count("why") > 1:
            last = len(names) - 1 - names[::-1].index("why")
            del kept[last : last + 2]
        else:
            break
    num_left_out = len(facts) - len(kept)
    return [*kept, ("more", f"{num_left_out} more lines are in report.md")] if num_left_out else kept


def write_summary(path: Path, summary: RunSummary) -> None:
    """Writes `summary.json`, whole or not at all; a number that is not finite is a `StorageError`."""
    with storage_boundary(path):
        text = json.dumps(summary.as_dict(), indent=2, allow_nan=False, default=str)
    replace_file(path, text + "\n")


def load_summary(folder: Path) -> RunSummary:
    with boundary(StorageError, f"cannot read {folder / 'summary.json'}"):
        values = read_json_file(folder / "summary.json")
        for name in ("baseline", "final", "best", "confirm_base", "confirm_tuned"):
            values[name] = MetricSummary(**values[name]) if values[name] else None
        values["transfer"] = {task: Improvement(**change) for task, change in values.get("transfer", {}).items()}
        values["improvement"] = Improvement(**values["improvement"]) if values["improvement"] else None
        if values.get("non_inferiority"):
            from reinforge.evaluation.non_inferiority import NonInferiority  # of a run with a reference alone

            values["non_inferiority"] = NonInferiority.from_dict(values["non_inferiority"])
        values["evaluators"] = [MetricChange.from_dict(row) for row in values.get("evaluators", [])]
        values["guards"] = [GuardEvent(**row) for row in values.get("guards", [])]
        values["explanations"] = [Explanation(**row) for row in values.get("explanations", [])]
        values["predictions"] = [Prediction(**row) for row in values.get("predictions", [])]
        values["policy_versions"] = [PolicyVersion.from_dict(row) for row in values["policy_versions"]]
        return RunSummary(folder=folder, **values)


def summarize_killed_run(folder: Path, validations: Sequence[ValidationRow], config: Mapping[str, Any]) -> RunSummary:
    """Returns what is known of a run whose process was killed before it wrote its summary."""
    summary, finetuning = RunSummary(folder.name, "stopped", folder), config.get("finetuning", {})
    gate_metric = (finetuning.get("gate") or {}).get("metric")
    stages = finetuning.get("pipeline") or {}
    summary.stages = {name: int(stage.get("num_epochs", 1)) for name, stage in stages.items()}
    best = choose_best_validation(validations, gate_metric)
    if best is not None:
        metric = gate_metric or (finetuning.get("reward_function") or {}).get("name", "")
        summary.record_best_so_far(validations, best, metric)
    return summary


def _format_mean(summary: MetricSummary | None) -> str:
    return format_interval(summary.mean, summary.ci_low, summary.ci_high) if summary else "unknown"


def _format_improvement(improvement: Improvement | None) -> str:
    if improvement is None:
        return "unknown: the two models were not compared on held-out examples"
    over = f"95 % interval over {count_examples(improvement.num_pairs, improvement.num_clusters)}"
    return f"{improvement}, {over}, {improvement.format_p_value()}"


def _format_time(wall_time_s: dict[str, float]) -> str:
    longest = sorted(wall_time_s.items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(
        f"{STAGE_NAMES.get(stage, stage.lower())} {format_duration(seconds)}" for stage, seconds in longest
    )
    return f"{format_duration(sum(wall_time_s.values()))} ({parts})" if parts else "unknown"


def _format_tokens(tokens: dict[str, int], num_updates: int | None) -> str:
    words = {"prompt": "prompt", "completion": "sampled", "trained": "trained"}
    parts = [f"{tokens[key]:,} {word}" for key, word in words.items() if key in tokens]
    steps = "" if num_updates is None else f"; {num_updates:,} optimizer step{'s' * (num_updates != 1)}"
    return f"{', '.join(parts) or 'unknown'}{steps}"


def format_unscored(summary: MetricSummary, before: str = "") -> str:
    """Returns `2 unscored: timeout: not finished after 60 s`, or an empty string if every example is scored."""
    if not summary.num_unscored:
        return ""
    reason = f": {summary.unscored_reason}" if summary.unscored_reason else ""
    return f"{before}{summary.num_unscored} unscored{reason}"


def _format_episodes(episodes: dict[str, int], reason: str | None) -> str:
    """Returns `1,200 (1,150 ok, 20 policy_error); dropped 30: 20 timeout, 10 judge_error`, and the main reason."""
    dropped = {name: count for name, count in episodes.items() if name in MISSING and count}
    scored = {name: count for name, count in episodes.items() if name not in MISSING and count}
    text = f"{sum(episodes.values()):,}" + (f" ({_format_counts(scored)})" if scored else "")
    text = f"{text}; dropped {sum(dropped.values()):,}" + (f": {_format_counts(dropped)}" if dropped else "")
    return f"{text}; the most common reason: {reason}" if dropped and reason else text


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


def describe_resume(folder: Path, num_more: int = 0, num_epochs: int = 0) -> str:
    """Returns what resumes a run, or adds to its epochs: a command, or the argument of the Python code that started it.

    Example: `reinforge finetune --resume runs/r`, or `reinforge.finetune(..., resume='runs/r')` where the agent is a
    function that only Python code can pass.
    """
    if is_from_python(folder):
        more = f", and epochs={num_epochs + num_more} instead of {num_epochs}" if num_more else ""
        return f"reinforge.finetune(..., resume={str(folder)!r}) with the same agent, dataset and reward{more}"
    return f"reinforge finetune --resume {shlex.quote(str(folder))}{f' --more {num_more}' if num_more else ''}"


def is_from_python(folder: Path) -> bool:
    """Returns True if a run's configuration names objects that no file can name, so that no command can resume it."""
    try:
        text = read_regular_file(folder / "config.yml").decode("utf-8")
        return PYTHON_OBJECT.search(text) is not None
    except (OSError, ValueError):
        return False
