"""What the HTML report of a run shows, read from its journal: curves, changed examples, groups, episodes, settings."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from reinforge.config.dump import Change, find_changed_settings
from reinforge.errors import ConfigError, ReinforgeError
from reinforge.files import read_regular_file
from reinforge.runs.episodes import ComparedExample, choose_changed
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.page.chats import TokenTexts, TrainedTokens
from reinforge.runs.rows import EpisodeHead, EpisodeRow, EpochMetrics, ValidationRow
from reinforge.runs.run_folder import RUNNING, RunOverview, read_config, read_overview
from reinforge.runs.summary import RunSummary, summarize_killed_run

MAX_EXAMPLES = 8  # changed examples of each direction whose chats are shown
NUM_PAIRS = 3  # examples on the first screen, with the answers before and after training
NUM_GROUPS, NUM_EPISODES, MAX_REASONS = 3, 3, 20
MAX_SURPRISE = 1000  # episodes among which the most surprising ones are searched


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """The episodes of one example that were compared with each other in training."""

    example_id: str
    epoch: int
    episodes: list[EpisodeHead]

    @property
    def rewards(self) -> list[float]:
        return [head.reward for head in self.episodes if head.reward is not None]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rewards)


@dataclass
class PageContent:
    """Everything that the page shows."""

    overview: RunOverview
    summary: RunSummary
    metrics: list[EpochMetrics]
    validations: list[ValidationRow]
    metric: str = ""  # the evaluator of the verdict; empty: there was none
    examples: list[ComparedExample] = field(default_factory=list)  # of the verdict, the most improved first
    pairs: list[ComparedExample] = field(default_factory=list)  # some of them: the largest gains, the largest loss
    groups: list[EpisodeGroup] = field(default_factory=list)  # some of the last epoch, the widest spread first
    chosen: dict[str, list[EpisodeHead]] = field(default_factory=dict)  # titles and the episodes below them
    rows: dict[str, EpisodeRow] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)  # mean reward of each shown episode's group, by key
    outcomes: list[tuple[str, str, int]] = field(default_factory=list)  # outcome, reason, count; the most common first
    settings: list[Change] = field(default_factory=list)
    config: str = ""
    texts: TokenTexts = field(default_factory=TokenTexts)
    trained: TrainedTokens = field(default_factory=TrainedTokens)
    is_running: bool = False


def read_content(folder: Path, summary: RunSummary | None = None) -> PageContent:
    """Returns what the HTML report of a run shows; `summary` is read from the folder if it is None."""
    content, reader, config = read_figures(read_overview(folder), summary), JournalReader(folder), read_config(folder)
    content.outcomes = reader.count_outcomes()[:MAX_REASONS]
    content.texts = TokenTexts.find(folder, config)
    content.trained = TrainedTokens.read(config)
    _choose_groups(content, reader)
    _choose_episodes(content, reader)
    _read_rows(content, reader, _list_keys(content))
    return content


def read_figures(overview: RunOverview, summary: RunSummary | None = None) -> PageContent:
    """Returns the metrics and settings that the HTML report of a run shows, without its episodes."""
    folder, reader = overview.folder, JournalReader(overview.folder)
    validations = reader.validations()
    shown = summary or overview.summary or summarize_killed_run(folder, validations, read_config(folder))
    content = PageContent(overview, shown, reader.metrics(10**9), validations)
    content.is_running = summary is None and overview.status == RUNNING
    content.config = _read_text(folder / "config.yml")
    with contextlib.suppress(ConfigError, ValueError):  # a component is not installed here, or the file was edited
        content.settings = find_changed_settings(content.config)
    _choose_examples(content, reader)
    _read_rows(content, reader, [key for example in content.pairs for key in example.keys])
    return content


def _read_text(path: Path) -> str:
    try:
        return read_regular_file(path).decode("utf-8", "replace")
    except OSError:
        return ""


def _choose_examples(content: PageContent, reader: JournalReader) -> None:
    tuned = content.summary.confirm_tuned
    if tuned is None:
        return
    content.metric = tuned.metric
    arms = [_group_by_example(reader.last_heads(phase)) for phase in ("confirm_base", "confirm_tuned")]
    for example in sorted(arms[0].keys() & arms[1].keys()):
        means = [_compute_mean(head.scores.get(tuned.metric) for head in arm[example]) for arm in arms]
        if means[0] is not None and means[1] is not None:
            keys = arms[0][example][0].key, arms[1][example][0].key
            content.examples.append(ComparedExample(example, means[0], means[1], keys))
    content.examples.sort(key=ComparedExample.rank)
    better, worse = choose_changed(content.examples, NUM_PAIRS)
    unchanged = [example for example in content.examples if not example.change]
    content.pairs = [*better[:2], *worse[:1], *better[2:], *worse[1:], *unchanged][:NUM_PAIRS]


def _group_by_example(heads: Iterable[EpisodeHead]) -> dict[str, list[EpisodeHead]]:
    grouped: dict[str, list[EpisodeHead]] = {}
    for head in heads:
        grouped.setdefault(head.example_id, []).append(head)
    return grouped


def _compute_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _choose_groups(content: PageContent, reader: JournalReader) -> None:
    last = max((row.epoch for row in content.metrics), default=None)
    if last is None:
        return
    found: dict[tuple[int, str], list[EpisodeHead]] = {}
    for head in reader.episode_heads("collect", last):
        found.setdefault((head.round, head.example_id), []).append(head)
    groups = [
        EpisodeGroup(example, last, heads)
        for (_, example), heads in found.items()
        if sum(head.reward is not None for head in heads) > 1
    ]
    groups.sort(key=lambda group: (-statistics.pstdev(group.rewards), group.example_id))
    content.groups = groups[:NUM_GROUPS]
    for group in content.groups:
        content.baselines |= {head.key: group.mean for head in group.episodes}


def _choose_episodes(content: PageContent, reader: JournalReader) -> None:
    """Chooses the best, the worst and the most surprising episodes of the newest model that was evaluated."""
    validated = (reader.episode_heads("validate", row.epoch) for row in content.validations[::-1])
    for evaluated in itertools.chain([reader.last_heads("confirm_tuned")], validated):
        heads = [head for head in evaluated if head.reward is not None]
        if heads:
            break
    else:
        return
    ranked = sorted(heads, key=lambda head: (-(head.reward or 0.0), head.key))
    every = max(1, -(-len(heads) // MAX_SURPRISE))
    surprises = {head.key: _measure_surprise(reader, head) for head in heads[::every]}
    known = [head for head in heads if surprises.get(head.key) is not None]
    known.sort(key=lambda head: (-(surprises[head.key] or 0.0), head.key))
    content.chosen = {
        "Best": ranked[:NUM_EPISODES],
        "Worst": ranked[::-1][:NUM_EPISODES],
        "Most surprising to the model": known[:NUM_EPISODES],
    }


def _measure_surprise(reader: JournalReader, head: EpisodeHead) -> float | None:
    """Returns the mean of -log p of the episode's sampled tokens, in nats; None: not recorded, or damaged."""
    try:
        row = reader.find_episode(head.key)
    except ReinforgeError:
        return None
    calls = row.data["calls"] if row is not None else []
    logprobs = [value for call in calls for value in call["logprobs"] or () if value is not None]
    return -statistics.fmean(logprobs) if logprobs else None


def _list_keys(content: PageContent) -> list[str]:
    keys = [head.key for heads in content.chosen.values() for head in heads]
    keys += [head.key for group in content.groups for head in group.episodes]
    changed = choose_changed(content.examples, MAX_EXAMPLES)
    return keys + [key for examples in changed for example in examples for key in example.keys]


def _read_rows(content: PageContent, reader: JournalReader, keys: Iterable[str]) -> None:
    for key in dict.fromkeys(keys):
        try:
            row = reader.find_episode(key)
        except ReinforgeError:  # a damaged row is not shown; `runs verify` tells of it
            continue
        if row is not None:
            content.rows[key] = row
