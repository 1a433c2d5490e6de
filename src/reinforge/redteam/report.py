"""What an attack found: how often, how soon, how naturally and how variously the target failed, with examples.

`attack_report.json` for programs and `attack_report.txt` to read; both are made from one `AttackReport`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reinforge.evaluation.statistics import format_interval, mean_interval
from reinforge.files import replace_file, to_json

NUM_EXAMPLES = 10
JSON_FILE, TEXT_FILE = "attack_report.json", "attack_report.txt"


@dataclass(frozen=True, slots=True)
class Share:
    """A share of conversations with its 95 % Wilson interval.

    Attributes:
        mean: The share.
        ci_low, ci_high: The interval's ends.
        count: Conversations.
    """

    mean: float
    ci_low: float | None
    ci_high: float | None
    count: int

    @classmethod
    def of(cls, hits: Sequence[bool]) -> Share:
        """Returns the share of True."""
        return cls(*mean_interval([float(hit) for hit in hits]), len(hits))

    def __str__(self) -> str:
        return f"{format_interval(self.mean, self.ci_low, self.ci_high)} of {self.count}"


@dataclass(frozen=True, slots=True)
class AttackReport:
    """What one arm of an attack found; a conversation is one branch of a tree, from the opening to its last turn.

    Attributes:
        success: Conversations in which the target failed.
        per_turn: The same of each turn by itself, the first one first.
        first_failure: Turn, from 1 -> conversations whose first failure it was.
        perplexity: exp of the mean of -log p over all probes, and over those after which the target failed; None where
            no baseline said.
        num_probes, num_distinct, num_distinct_successes: Probes; different texts among them, and among those after
            which the target failed.
        diversity: Mean over pairs of different successful probes of the share of their words that they do not have in
            common (Jaccard distance); None with fewer than two.
        examples: The most distinct successes, `{"opening", "turn", "probe", "response", "score", "perplexity"}`.
    """

    success: Share
    per_turn: list[Share]
    first_failure: dict[int, int]
    perplexity: dict[str, float | None]
    num_probes: int
    num_distinct: int
    num_distinct_successes: int
    diversity: float | None
    examples: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Returns the report, ready for JSON."""
        return asdict(self)

    def lines(self, name: str) -> list[str]:
        """Returns the report for a person."""
        perplexity = {key: "unknown" if value is None else f"{value:.2f}" for key, value in self.perplexity.items()}
        firsts = ", ".join(f"turn {turn}: {count}" for turn, count in sorted(self.first_failure.items())) or "none"
        diversity = "unknown" if self.diversity is None else f"{self.diversity:.2f}"
        return [
            f"{name}: the target failed in {self.success} conversations",
            *(f"  turn {number}: {share}" for number, share in enumerate(self.per_turn, 1)),
            f"  first failure      {firsts}",
            f"  perplexity         {perplexity['all']} of all probes, {perplexity['successful']} of the successful",
            f"  different probes   {self.num_distinct} of {self.num_probes}, {self.num_distinct_successes} successful, "
            f"words that two of these do not share {diversity}",
        ]

    def example_lines(self) -> list[str]:
        """Returns the examples for a person."""
        lines = []
        for number, example in enumerate(self.examples, 1):
            lines += [
                f"{number:3} opening    {example['opening']}",
                f"    probe      {example['probe']}   (turn {example['turn']})",
                f"    response   {example['response']}",
            ]
        return lines


def attack_report(outputs: Iterable[Mapping[str, Any]]) -> AttackReport:
    """Returns the report on what the workflow `_type: redteam` returned, trees and single conversations alike.

    Args:
        outputs: `{"opening", "threshold", "turns"}` of each episode.

    Raises:
        ValueError: There is none.
    """
    branches = [branch for number, output in enumerate(outputs) for branch in _branches(output, number)]
    if not branches:
        raise ValueError("there is no conversation to report on")
    depth = max(map(len, branches))
    failed = [[turn["failed"] for turn in branch] for branch in branches]
    firsts = [row.index(True) + 1 for row in failed if any(row)]
    probes = {(turn["episode"], *turn["path"]): turn for branch in branches for turn in branch}
    successes = [turn for turn in probes.values() if turn["failed"]]
    distinct = list({turn["probe"]: turn for turn in successes}.values())
    return AttackReport(
        success=Share.of([any(row) for row in failed]),
        per_turn=[Share.of([row[i] for row in failed if len(row) > i]) for i in range(depth)],
        first_failure={turn: firsts.count(turn) for turn in sorted(set(firsts))},
        perplexity={"all": _perplexity(probes.values()), "successful": _perplexity(successes)},
        num_probes=len(probes),
        num_distinct=len({turn["probe"] for turn in probes.values()}),
        num_distinct_successes=len(distinct),
        diversity=_diversity([turn["probe"] for turn in distinct]),
        examples=[_example(turn) for turn in most_distinct(distinct, NUM_EXAMPLES)],
    )


def write_report(folder: Path, reports: Mapping[str, AttackReport]) -> list[str]:
    """Writes the reports of all arms into a folder; returns the text's lines.

    Args:
        folder: The run's.
        reports: By the name of the arm, such as `before` and `after`; examples are of the last one.
    """
    lines = [line for name, report in reports.items() for line in report.lines(name)]
    *_, last = reports.values()
    shown = ["", f"the {len(last.examples)} most different successes:", *last.example_lines()] if last.examples else []
    replace_file(folder / JSON_FILE, to_json({name: report.as_dict() for name, report in reports.items()}) + "\n")
    replace_file(folder / TEXT_FILE, "\n".join([*lines, *shown]) + "\n")
    return [*lines, *shown]


def _branches(output: Mapping[str, Any], number: int) -> list[list[dict[str, Any]]]:
    """Returns every path from the opening to a last turn, as its turns."""
    turns = {
        tuple(turn["path"]): {
            **turn,
            "episode": number,
            "opening": output["opening"],
            "turn": len(turn["path"]),
            "failed": turn["score"] >= output["threshold"],
        }
        for turn in output["turns"]
    }
    inner = {path[:-1] for path in turns}
    return [[turns[path[: end + 1]] for end in range(len(path))] for path in turns if path not in inner]


def _perplexity(turns: Iterable[Mapping[str, Any]]) -> float | None:
    known = [math.log(turn["perplexity"]) for turn in turns if turn["perplexity"] is not None]
    return math.exp(statistics.fmean(known)) if known else None


def distance(a: str, b: str) -> float:
    """Returns the share of the words of two texts that only one of them has (Jaccard distance).

    Example: "the old mill" and "the new mill" -> 2 / 4.
    """
    first, second = set(a.lower().split()), set(b.lower().split())
    return len(first ^ second) / len(first | second) if first | second else 0.0


def _diversity(texts: Sequence[str], most: int = 200) -> float | None:
    some = texts[:most]  # pairs grow with the square
    pairs = [distance(a, b) for number, a in enumerate(some) for b in some[:number]]
    return statistics.fmean(pairs) if pairs else None


def most_distinct(turns: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Returns `count` turns whose probes differ most: each next one is farthest from all that were taken."""
    left = sorted(turns, key=lambda turn: (-turn["score"], turn["perplexity"] or 0.0, turn["probe"]))
    taken: list[Mapping[str, Any]] = []
    while left and len(taken) < count:
        best = max(
            range(len(left)),
            key=lambda i: (min((distance(left[i]["probe"], t["probe"]) for t in taken), default=0.0), -i),
        )
        taken.append(left.pop(best))
    return taken


def _example(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {name: turn[name] for name in ("opening", "turn", "probe", "response", "score", "perplexity")}
