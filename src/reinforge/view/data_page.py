"""The page of a run's data: its splits, how difficult their examples are, and warnings about repeated examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from xml.etree.ElementTree import Element

from reinforge.runs.page.elements import Content, Line, Point, build, build_section, build_table, draw_chart
from reinforge.runs.rows import list_guard_events
from reinforge.runs.run_folder import RunOverview
from reinforge.view.documents import build_anchor, build_link, build_run_path
from reinforge.view.episode_table import EpisodeTable, name_epoch, name_split

MAX_EXAMPLES = 25  # the most difficult examples that are listed
CLASSES = {"always solved": "line-3", "sometimes": "line-1", "never": "line-2"}
CONTAMINATION = "contamination"  # the guard that searches for held-out examples that repeat a training example
Counts = dict[str, dict[int, list[int]]]
"""Example -> epoch -> how many of its episodes solved it, and how many have a reward; in the order of the run."""


def build_data_page(overview: RunOverview, table: EpisodeTable) -> list[Content]:
    rewards = [episode.reward for episode in table if episode.reward is not None]
    limit = (min(rewards) + max(rewards)) / 2 if rewards else 0.0
    phases: dict[str, Counts] = {}
    for each in table:
        counts = phases.setdefault(each.phase, {}).setdefault(each.example_id, {}).setdefault(each.epoch, [0, 0])
        if each.reward is not None:
            counts[0] += each.reward > limit
            counts[1] += 1
    shown = [(phase, phases[phase]) for phase in ("collect", "validate") if phase in phases]
    return [
        _build_splits(phases, table),
        *(_build_difficulty(name_split(phase), counts, limit) for phase, counts in shown),
        *(_build_examples(overview.folder.name, phase, counts, table) for phase, counts in shown),
        _build_repetitions(overview),
    ]


def _build_splits(phases: Mapping[str, Counts], table: EpisodeTable) -> Element:
    rows = [
        (name_split(phase), f"{len(counts):,}", f"{table.phases[phase]:,}", f"{len(_list_epochs(counts)):,}")
        for phase, counts in phases.items()
    ]
    header, caption = ("split", "examples", "episodes", "epochs or validations"), "Examples that episodes ran on so far"
    return build_section("Splits", build_table(header, rows, caption), id="splits")


def _list_epochs(counts: Counts) -> list[int]:
    return sorted({epoch for found in counts.values() for epoch in found})


def classify(solved: int, total: int) -> str:
    """Returns the class of an example that k of n episodes solved: 0, 4 -> `never`; 1, 4 -> `sometimes`."""
    return "never" if solved == 0 else "always solved" if solved == total else "sometimes"


def _build_difficulty(split: str, counts: Counts, limit: float) -> Element:
    rows, points = [], {name: [] for name in CLASSES}  # type: ignore[var-annotated]
    for epoch in _list_epochs(counts):
        classes = Counter(classify(*found[epoch]) for found in counts.values() if epoch in found and found[epoch][1])
        rows.append((name_epoch(epoch), *(f"{classes[name]:,}" for name in CLASSES), f"{classes.total():,}"))
        for name in CLASSES:
            points[name].append(Point(epoch, classes[name] / max(1, classes.total())))
    lines = [Line(name, style, points[name]) for name, style in CLASSES.items()]
    title = f"Difficulty, {split}"
    text = f"An episode solves its example with a reward above {limit:.3g}, halfway from the lowest to the highest."
    chart = draw_chart(f"{title}: share of the examples by epoch", lines) if len(rows) > 1 else None
    shown = build_table(("epoch", *CLASSES, "examples"), rows, "Examples by how often they were solved")
    return build_section(title, build("p", text), chart, shown, id=f"difficulty-{split}")


def _build_examples(name: str, phase: str, counts: Counts, table: EpisodeTable) -> Element:
    totals = {each: [sum(part) for part in zip(*found.values(), strict=True)] for each, found in counts.items()}
    hardest = [each for each, (_, total) in totals.items() if total]
    hardest = sorted(hardest, key=lambda each: (totals[each][0] / totals[each][1], -totals[each][1], each))
    hardest = hardest[:MAX_EXAMPLES]
    shown = {each.example_id: each for each in table if each.phase == phase}
    table.read_excerpts(shown[each] for each in hardest)
    rows: list[tuple[Content, ...]] = []
    for each in hardest:
        link = build_link(build_run_path(name, "episodes"), phase=phase, example=each)
        found, excerpt = list(counts[each].values()), table.excerpt(shown[each])
        solved = [f"{k:,} of {n:,}" for k, n in (found[0], found[-1], totals[each])]
        rows.append((build_anchor(each, link), excerpt.question, excerpt.expected, *solved))
    header = ("example", "question", "expected", "solved at first", "solved at last", "solved in all")
    split = name_split(phase)
    caption = "The examples that were solved least often"
    return build_section(f"Difficult examples, {split}", build_table(header, rows, caption), id=f"examples-{split}")


def _build_repetitions(overview: RunOverview) -> Element:
    events = list_guard_events(overview.record.stages) if overview.record is not None else []
    found = [build("p", f"{event.text}.") for event in events if event.guard.startswith(CONTAMINATION)]
    nothing = (
        "The run has not warned of held-out examples that nearly repeat a training example. Datasets above 20,000 "
        "examples are not searched when a run starts; `reinforge data dedupe` searches any file."
    )
    return build_section("Near-duplicates and contamination", found or build("p", nothing), id="repetitions")
