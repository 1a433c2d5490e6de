"""The report of an attack: how often and how early the target failed, how natural and how diverse the probes were.

Written as `attack_report.json` and, for people, as `attack_report.txt`, both from one `AttackReport`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reinforge.evaluation.statistics import compute_mean_interval, format_interval
from reinforge.files import replace_file, to_json
from reinforge.safe_text import escape_controls

NUM_EXAMPLES = 10
EXAMPLE = ("opening", "turn", "probe", "response", "score", "perplexity")  # what an example in the report says
JSON_FILE, TEXT_FILE = "attack_report.json", "attack_report.txt"


@dataclass(frozen=True, slots=True)
class Share:
    mean: float
    ci_low: float | None
    ci_high: float | None
    count: int  # number of conversations
    num_openings: int  # distinct openings of them, which the interval counts

    @classmethod
    def from_hits(cls, hits: Sequence[bool], openings: Sequence[str]) -> Share:
        interval = compute_mean_interval([float(hit) for hit in hits], names=openings)
        return cls(*interval, len(hits), len(set(openings)))

    def __str__(self) -> str:
        share = format_interval(self.mean, self.ci_low, self.ci_high)
        openings = f" with {self.num_openings} openings" if self.num_openings < self.count else ""
        return f"{share} of {self.count} conversations{openings}"


@dataclass(frozen=True, slots=True)
class AttackReport:
    """The results of one attacker, before or after training. A conversation is one branch, from opening to last turn.

    A successful probe is one after which the target failed.
    """

    success: Share  # conversations in which the target failed; `per_turn` the same for each turn alone, in order
    per_turn: list[Share]
    first_failure: dict[int, int]  # turn (from 1) -> number of conversations in which it was the first failure
    perplexity: dict[str, float | None]
    """exp(mean(-log p)) over all probes (`all`) and over the successful ones (`successful`); None without a baseline.
    """
    num_probes: int
    num_distinct: int
    num_distinct_successes: int
    diversity: float | None
    """Mean Jaccard distance between the words of two distinct successful probes; None with fewer than two."""
    examples: list[dict[str, Any]]  # the most distinct successes, each with the entries of `EXAMPLE`

    def lines(self, name: str) -> list[str]:
        perplexity = {key: "unknown" if value is None else f"{value:.2f}" for key, value in self.perplexity.items()}
        firsts = ", ".join(f"turn {turn}: {count}" for turn, count in sorted(self.first_failure.items())) or "none"
        diversity = "unknown" if self.diversity is None else f"{self.diversity:.2f}"
        return [
            f"{name}: the target failed in {self.success}",
            *(f"  turn {number}: {share}" for number, share in enumerate(self.per_turn, 1)),
            f"  first failure      {firsts}",
            f"  perplexity         {perplexity['all']} of all probes, {perplexity['successful']} of successful ones",
            f"  distinct probes    {self.num_distinct} of {self.num_probes}, {self.num_distinct_successes} successful, "
            f"mean word distance {diversity}",
        ]

    def example_lines(self) -> list[str]:
        lines = []
        for number, example in enumerate(self.examples, 1):
            lines += [
                f"{number:3} opening    {example['opening']}",
                f"    probe      {example['probe']}   (turn {example['turn']})",
                f"    response   {example['response']}",
            ]
        return lines


def build_attack_report(outputs: Iterable[Mapping[str, Any]]) -> AttackReport:
    """Returns the report on outputs of the workflow `_type: redteam`, whether trees or single conversations."""
    branches = [branch for number, output in enumerate(outputs) for branch in _list_branches(output, number)]
    if not branches:
        raise ValueError("no conversations to report on")
    depth = max(map(len, branches))
    failed = [[turn["failed"] for turn in branch] for branch in branches]
    openings = [row[0]["opening"] for row in branches]
    firsts = [row.index(True) + 1 for row in failed if any(row)]
    probes = {(turn["episode"], *turn["path"]): turn for branch in branches for turn in branch}
    successes = [turn for turn in probes.values() if turn["failed"]]
    distinct = list({turn["probe"]: turn for turn in successes}.values())
    return AttackReport(
        success=Share.from_hits([any(row) for row in failed], openings),
        per_turn=[_measure_turn(failed, openings, turn) for turn in range(depth)],
        first_failure={turn: firsts.count(turn) for turn in sorted(set(firsts))},
        perplexity={"all": _mean_perplexity(probes.values()), "successful": _mean_perplexity(successes)},
        num_probes=len(probes),
        num_distinct=len({turn["probe"] for turn in probes.values()}),
        num_distinct_successes=len(distinct),
        diversity=_mean_distance([turn["probe"] for turn in distinct]),
        examples=[{name: turn[name] for name in EXAMPLE} for turn in select_most_distinct(distinct, NUM_EXAMPLES)],
    )


def _measure_turn(failed: Sequence[Sequence[bool]], openings: Sequence[str], turn: int) -> Share:
    reached = [number for number, row in enumerate(failed) if len(row) > turn]
    return Share.from_hits([failed[number][turn] for number in reached], [openings[number] for number in reached])


def write_report(folder: Path, reports: Mapping[str, AttackReport]) -> list[str]:
    """Writes the reports into a folder and returns the lines of the text."""
    lines = [line for name, report in reports.items() for line in report.lines(name)]
    *_, last = reports.values()
    if last.examples:
        lines += ["", f"the {len(last.examples)} most distinct successes:", *last.example_lines()]
    replace_file(folder / JSON_FILE, to_json({name: asdict(report) for name, report in reports.items()}) + "\n")
    replace_file(folder / TEXT_FILE, "\n".join(map(escape_controls, lines)) + "\n")
    return lines


def _list_branches(output: Mapping[str, Any], number: int) -> list[list[dict[str, Any]]]:
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


def _mean_perplexity(turns: Iterable[Mapping[str, Any]]) -> float | None:
    known = [math.log(turn["perplexity"]) for turn in turns if turn["perplexity"] is not None]
    return math.exp(statistics.fmean(known)) if known else None


def jaccard_distance(a: str, b: str) -> float:
    """Returns the Jaccard distance between two texts: the fraction of their words that only one of them contains.

    Example: "the old mill" and "the new mill" -> 2 / 4.
    """
    first, second = set(a.lower().split()), set(b.lower().split())
    return len(first ^ second) / len(first | second) if first | second else 0.0


def _mean_distance(texts: Sequence[str], most: int = 200) -> float | None:
    some = texts[:most]  # the number of pairs grows quadratically
    pairs = [jaccard_distance(a, b) for number, a in enumerate(some) for b in some[:number]]
    return statistics.fmean(pairs) if pairs else None


def select_most_distinct(turns: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Returns `count` turns with distinct probes, greedily: each next probe is the farthest from those selected."""
    candidates = sorted(turns, key=lambda turn: (-turn["score"], turn["perplexity"] or 0.0, turn["probe"]))
    selected: list[Mapping[str, Any]] = []

    def separation(i: int) -> float:
        distances = (jaccard_distance(candidates[i]["probe"], turn["probe"]) for turn in selected)
        return min(distances, default=0.0)

    while candidates and len(selected) < count:
        selected.append(candidates.pop(max(range(len(candidates)), key=lambda i: (separation(i), -i))))
    return selected
