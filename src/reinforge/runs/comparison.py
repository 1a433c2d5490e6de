"""Compares two runs: their trained models on the same examples, and their configurations.

both have the same confirm examples   -> paired: the interval of the differences, example by example
else                                  -> unpaired: the interval of the difference of the means, and a sentence
a run without confirm episodes        -> the last validation of both (select), which also chose the checkpoints
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from reinforge.config.dump import Change, compare_configs
from reinforge.errors import ConfigError, Problem, ReinforgeError
from reinforge.evaluation.statistics import (
    MAX_P_VALUE,
    Improvement,
    compute_paired_difference,
    compute_unpaired_difference,
    list_names,
    summarize,
)
from reinforge.files import read_regular_file
from reinforge.runs.episodes import ComparedExample
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.rows import BASELINE, MISSING, EpisodeHead
from reinforge.runs.run_folder import RunOverview, list_runs, read_config, read_overview
from reinforge.types.evaluation import MetricSummary, count_examples

CONFIRM, SELECT = "confirm", "select"
SCORING = ("eval.evaluators", "finetuning.reward_function", "finetuning.gate.num_samples")
"""Settings that decide what a score means, besides the models that evaluators ask."""
NUM_DIGITS = 8  # digits of a hash that are shown
EVALUATORS = "evaluators"  # the fact of a run that holds evaluator -> hash of what decides its scores
CLUSTERS = "clusters"
"""The fact of a run that holds example id -> its conversation or prompt, of held-out examples that share one."""


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One evaluator on the trained models of two runs; the difference is second minus first."""

    metric: str
    first: MetricSummary
    second: MetricSummary
    difference: Improvement
    is_comparable: bool = True  # False: the evaluator of this name is not the same in both runs

    def describe_difference(self) -> tuple[str, str]:
        """Returns the difference with its interval, and the p-value, for a table."""
        if not self.is_comparable:
            return "not comparable", ""
        return str(self.difference), self.difference.format_p_value()


@dataclass
class RunComparison:
    """Two runs side by side."""

    first: RunOverview
    second: RunOverview
    split: str = CONFIRM  # the examples: `confirm` or `select`
    is_paired: bool = False  # both ran on the same examples
    pairing: str = ""  # what was compared and how, in a sentence
    metrics: list[ComparedMetric] = field(default_factory=list)  # every evaluator that both have, the verdict's first
    examples: list[ComparedExample] = field(default_factory=list)
    """Of the first metric, the most improved first; if paired."""
    changes: list[Change] = field(default_factory=list)  # settings that differ, from the first run to the second
    notes: list[str] = field(default_factory=list)  # what to know before the metrics are believed, one sentence each

    def conclude(self) -> str:
        if not self.metrics:
            return "The two runs have no score in common."
        found = self.metrics[0]
        first, second, metric = self.first.folder.name, self.second.folder.name, found.metric
        if not found.is_comparable:
            return (
                f"{first} and {second} were scored by different evaluators named {metric}: they cannot be compared. "
                f"--score_with {second} scores the outputs of both again."
            )
        low, high = found.difference.ci_low, found.difference.ci_high
        if low is None or high is None:
            return f"The spread of {metric} is unknown, so no difference can be shown."
        if (low > 0 or high < 0) and found.difference.p_value > MAX_P_VALUE:
            chance = f"{found.difference} may be due to chance, {found.difference.format_p_value()}"
            return f"No difference in {metric} was shown: {chance}."
        if low > 0:
            return f"{second} is better in {metric}: {found.difference}."
        if high < 0:
            return f"{first} is better in {metric}: {second} differs by {found.difference}."
        return f"No difference in {metric} was shown: its 95 % interval {found.difference} includes 0."

    def as_dict(self) -> dict[str, Any]:
        return {
            "first": self.first.as_dict(),
            "second": self.second.as_dict(),
            "split": self.split,
            "paired": self.is_paired,
            "pairing": self.pairing,
            "conclusion": self.conclude(),
            "metrics": [asdict(row) for row in self.metrics],
            "examples": [asdict(row) for row in self.examples],
            "changes": [str(change) for change in self.changes],
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Rescored:
    """Scores of both runs' recorded outputs by the evaluators of one of them."""

    judge: str
    scores: list[dict[str, dict[str, float | None]]]
    """For each run, the key of an episode -> evaluator -> its score; None: it has none."""


@dataclass(frozen=True)
class Arm:
    """The episodes of one run that are compared."""

    reader: JournalReader
    heads: Sequence[EpisodeHead]

    @property
    def ids(self) -> list[str]:
        return sorted({head.example_id for head in self.heads})

    @property
    def keys(self) -> dict[str, str]:
        return {head.example_id: head.key for head in reversed(self.heads)}

    def read_scores(self, metric: str) -> dict[str, float]:
        """Returns example id -> mean score of its episodes, without those that failed outside the policy."""
        found: dict[str, list[float]] = {}
        for head in self.heads:
            if head.outcome not in MISSING and (score := head.scores.get(metric)) is not None:
                found.setdefault(head.example_id, []).append(score)
        return {example: statistics.fmean(scores) for example, scores in found.items()}

    def read_prompts(self) -> list[Any] | None:
        """Returns what the first call of each example's first episode was asked, in the order of the examples.

        None: no call of an example was recorded.
        """
        keys, prompts = self.keys, []
        for example in self.ids:
            row = self.reader.find_episode(keys[example])
            if row is None or not row.data["calls"]:
                return None
            call = row.data["calls"][0]
            prompts.append((call["messages"], call.get("prompt")))
        return prompts


def compare_runs(first: Path, second: Path, rescored: Rescored | None = None) -> RunComparison:
    """Returns two runs side by side; differences are second minus first.

    Args:
        rescored: Scores that replace the recorded ones.

    Raises:
        ConfigError: Both are the same run, or one has no evaluated episodes.
        StorageError: A journal cannot be read.
    """
    if first.resolve() == second.resolve():
        newest = [shlex.quote(run.name) for run in list_runs(first.parent)[-2:]]
        fix = f"; the two newest: reinforge runs compare {' '.join(newest)}" if len(newest) > 1 else ""
        raise ConfigError(Problem("", f"{first.name} would be compared with itself", f"name two runs{fix}"))
    found = RunComparison(read_overview(first), read_overview(second))
    found.split, arms = read_arms(first, second)
    again = _count_changed_scores(arms, rescored) if rescored is not None else []
    if rescored is not None:
        arms = [
            replace(arm, heads=[replace(head, scores=scores.get(head.key, {})) for head in arm.heads])
            for arm, scores in zip(arms, rescored.scores, strict=True)
        ]
    found.is_paired, found.pairing = _decide_pairing(found, arms)
    found.metrics = [row for metric in _list_metrics(found, arms) if (row := _compare_metric(metric, arms, found))]
    if found.is_paired and found.metrics:
        found.examples = _compare_examples(found.metrics[0].metric, arms)
    found.notes = _list_notes(found, arms)
    try:
        before, after = (read_regular_file(each / "config.yml").decode() for each in (first, second))
        found.changes = compare_configs(before, after)
    except (OSError, ValueError, ReinforgeError) as error:
        found.notes.append(f"The configurations cannot be compared: {error}")
    if rescored is not None:
        found.notes = [
            f"Both runs' outputs were scored again by the evaluators of {rescored.judge}.",
            *again,
            *found.notes,
        ]
        return found
    scoring = _find_scoring_changes(found)
    changed = _find_changed_evaluators(found, scoring)
    found.metrics = [replace(row, is_comparable=row.metric not in changed) for row in found.metrics]
    found.examples = [] if changed and changed[0] == found.metrics[0].metric else found.examples
    notes = [f"The two runs are scored differently: {', '.join(scoring)}."] if scoring else []
    if changed:
        what = "Its code, its settings or its judge" if len(changed) == 1 else "Their code, settings or judges"
        notes.insert(0, f"{', '.join(changed)} cannot be compared. {what} changed between the runs.")
    found.notes = [*notes, *found.notes]
    return found


def find_obstacles(runs: Sequence[RunOverview]) -> dict[str, list[str]]:
    """Returns what makes scores of runs incomparable: what differs -> what it is in each run; empty: not recorded.

    Example: `{"base model": ["small", "large"]}`. Data and evaluators are told apart by the first digits of their hash.
    """
    facts = [run.record.facts if run.record is not None else {} for run in runs]
    configs = [read_config(run.folder) for run in runs]
    blocks = [each if isinstance(each := known.get(EVALUATORS), dict) else {} for known in facts]
    found = {
        "base model": [str(get_block(config, "finetuning", "policy").get("model") or "") for config in configs],
        "reward": [str(get_block(config, "finetuning", "reward_function").get("name") or "") for config in configs],
        "data": [str(known.get("data_sha256") or "")[:NUM_DIGITS] for known in facts],
    }
    for name in dict.fromkeys(name for block in blocks for name in block):
        found[f"evaluator {name}"] = [str(block.get(name) or "")[:NUM_DIGITS] for block in blocks]
    return {what: values for what, values in found.items() if len({value for value in values if value}) > 1}


def list_settings(runs: Sequence[RunOverview]) -> dict[str, list[Any]]:
    """Returns the settings that differ: path -> its value in each run, `ABSENT` where it has none.

    Raises an `OSError`, a `ValueError` or a `ReinforgeError` if a configuration cannot be read.
    """
    first, *others = (read_regular_file(run.folder / "config.yml").decode() for run in runs)
    found: dict[str, list[Any]] = {}
    for number, other in enumerate(others, 1):
        for change in compare_configs(first, other):
            found.setdefault(change.path, [change.old] * len(runs))[number] = change.new
    return found


def read_arms(first: Path, second: Path) -> tuple[str, list[Arm]]:
    """Returns the split on which two runs are compared, and the episodes of each."""
    arms = [Arm(reader, reader.last_heads("confirm_tuned")) for reader in map(JournalReader, (first, second))]
    if all(arm.heads for arm in arms):
        return CONFIRM, arms
    return SELECT, [_read_last_validation(folder) for folder in (first, second)]


def _count_changed_scores(arms: Sequence[Arm], rescored: Rescored) -> list[str]:
    """Returns that the run whose evaluators these are got other scores at the time, if it did."""
    notes = []
    for arm, scores in zip(arms, rescored.scores, strict=True):
        known = [head for head in arm.heads if arm.reader.folder.name == rescored.judge and head.key in scores]
        if changed := sum(any(head.scores.get(k) != v for k, v in scores[head.key].items()) for head in known):
            notes.append(
                f"{changed:,} of {len(known):,} outputs of {rescored.judge} got other scores than in the run: its "
                "evaluators are noisy, or need more than the recorded output."
            )
    return notes


def _read_last_validation(folder: Path) -> Arm:
    reader = JournalReader(folder)
    for row in reversed(reader.validations()):
        if heads := reader.episode_heads("validate", row.epoch):
            return Arm(reader, heads)
    problem = f"{folder.name} has no evaluated episodes"
    raise ConfigError(Problem("", problem, f"`reinforge runs show {folder}` shows what happened to it"))


def _decide_pairing(found: RunComparison, arms: Sequence[Arm]) -> tuple[bool, str]:
    """Returns whether both ran on the same examples, and a sentence about it."""
    names, clusters = (found.first.folder.name, found.second.folder.name), _read_clusters(found)
    counts = [count_examples(len(arm.ids), len(set(list_names(arm.ids, clusters)))) for arm in arms]
    counts = [count.replace(" ", f" {found.split} ", 1) for count in counts]
    what = "the trained models on" if found.split == CONFIRM else "the last validations on"
    unpaired = f"Compared unpaired, by the means alone: {what} {counts[0]} and {counts[1]}"
    if arms[0].ids != arms[1].ids:
        shared = len(set(arms[0].ids) & set(arms[1].ids))
        return False, f"{unpaired}, of which {shared:,} have an id that both use. The interval is wider for it."
    paired = f"Compared example by example: {what} the same {counts[0]}"
    records = [run.record.facts.get("data_sha256") if run.record else None for run in (found.first, found.second)]
    if records[0] is not None and records[0] == records[1]:
        return True, f"{paired}."
    try:
        prompts = arms[0].read_prompts()
        are_equal = prompts is not None and prompts == arms[1].read_prompts()
    except ReinforgeError:  # a damaged episode
        are_equal = False
    if are_equal:
        return True, (
            f"{paired}. The datasets of {names[0]} and {names[1]} differ elsewhere; these examples have equal ids and "
            "prompts, and their expected answers were not compared."
        )
    return False, (
        f"{unpaired}. Their ids are equal, but the prompts differ or were not recorded, so the examples may differ."
    )


def _list_metrics(found: RunComparison, arms: Sequence[Arm]) -> list[str]:
    names = [list(dict.fromkeys(name for head in arm.heads for name in head.scores)) for arm in arms]
    shared = [name for name in names[0] if name in names[1]]
    tuned = [run.summary.confirm_tuned for run in (found.second, found.first) if run.summary is not None]
    verdict = next((each.metric for each in tuned if each is not None), None) or _find_verdict_metric(found.second)
    return sorted(shared, key=lambda name: name != verdict)


def _find_verdict_metric(run: RunOverview) -> str | None:
    config = read_config(run.folder)
    gate, reward = (get_block(config, "finetuning", name) for name in ("gate", "reward_function"))
    return gate.get("metric") or reward.get("name")


def get_block(config: Any, *path: str) -> dict[str, Any]:
    """Returns a block of a configuration that may have been edited; empty: it has none."""
    for name in path:
        config = config.get(name) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def _compare_metric(metric: str, arms: Sequence[Arm], found: RunComparison) -> ComparedMetric | None:
    scores = [arm.read_scores(metric) for arm in arms]
    if found.is_paired:
        ids = scores[0].keys() & scores[1].keys()
        scores = [{example: each[example] for example in ids} for each in scores]
    if not all(scores):
        return None
    clusters = _read_clusters(found)
    first, second = (
        summarize(metric, each, len(arm.ids), clusters=clusters) for each, arm in zip(scores, arms, strict=True)
    )
    if found.is_paired:
        return ComparedMetric(metric, first, second, compute_paired_difference(scores[0], scores[1], clusters=clusters))
    return ComparedMetric(metric, first, second, compute_unpaired_difference(scores[0], scores[1], clusters))


def _compare_examples(metric: str, arms: Sequence[Arm]) -> list[ComparedExample]:
    first, second = (arm.read_scores(metric) for arm in arms)
    keys = [arm.keys for arm in arms]
    examples = [
        ComparedExample(example, first[example], second[example], (keys[0][example], keys[1][example]))
        for example in first.keys() & second.keys()
    ]
    return sorted(examples, key=ComparedExample.rank)


def _list_notes(found: RunComparison, arms: Sequence[Arm]) -> list[str]:
    notes = []
    if found.split == SELECT:
        notes.append(
            "At least one run was not evaluated on confirm, so this is the select split, on which checkpoints were "
            "chosen: it flatters both."
        )
    for run, arm in zip((found.first, found.second), arms, strict=True):
        name = run.folder.name
        if run.status != "completed":
            notes.append(f"{name} is {run.status}.")
        if found.split == SELECT and arm.heads[0].epoch == BASELINE:
            notes.append(f"{name} was validated before training only: these are the scores of its base model.")
        for metric in [row.metric for row in found.metrics[:1]]:
            total = len(arm.ids)
            if num_missing := total - len(arm.read_scores(metric)):
                notes.append(f"{num_missing:,} of {total:,} examples have no {metric} in {name} and are left out.")
    if changed := _find_changed_code(found):
        notes.append(f"The code differs in {', '.join(changed)}.")
    return notes


def _find_changed_evaluators(found: RunComparison, scoring: Sequence[str]) -> list[str]:
    """Returns the compared evaluators that are not the same in both runs, by their recorded hashes.

    Where a run recorded none, by the settings that differ.
    """
    records = [
        run.record.facts.get(EVALUATORS) if run.record is not None else None for run in (found.first, found.second)
    ]
    first, second = (each if isinstance(each, dict) else {} for each in records)
    names = [row.metric for row in found.metrics]
    return [
        name
        for name in names
        if (
            first[name] != second[name]
            if name in first and name in second
            else any(f"{path}.".startswith((f"eval.evaluators.{name}.", "llms.")) for path in scoring)
        )
    ]


def _find_changed_code(found: RunComparison) -> list[str]:
    recorded: list[dict[str, str]] = []
    for run in (found.first, found.second):
        provenance = (run.record.facts.get("provenance") if run.record is not None else None) or {}
        files = {path: digest for path, digest in provenance.get("files", {}).items() if path.endswith(".py")}
        recorded.append({**files, **provenance.get("functions", {})})
    first, second = recorded
    return sorted(name for name in first.keys() & second.keys() if first[name] != second[name])


def _read_clusters(found: RunComparison) -> dict[str, str]:
    records = [run.record for run in (found.first, found.second) if run.record is not None]
    return {example: name for record in records for example, name in (record.facts.get(CLUSTERS) or {}).items()}


def _find_scoring_changes(found: RunComparison) -> list[str]:
    """Returns the settings that differ and decide what a score means, those of judge models included."""
    paths = set(SCORING)
    for run in (found.first, found.second):
        config = read_config(run.folder)
        texts = _list_texts(get_block(config, "eval", "evaluators"))
        paths |= {f"llms.{name}" for name in get_block(config, "llms") if name in texts}
    return [
        change.path
        for change in found.changes
        if any(change.path == path or change.path.startswith(f"{path}.") for path in paths)
    ]


def _list_texts(value: Any) -> set[str]:
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return {text for part in parts for text in _list_texts(part)}
    return {value} if isinstance(value, str) else set()
