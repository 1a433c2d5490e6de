"""What a test of evaluators found: scores of real answers, and of answers that deserve no reward."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from reinforge.evaluation.reasons import find_commonest_reason, shorten_line

EXPECTED, REAL = "expected", "real"
"""Kinds of answers that are no attack: the dataset's, and those that were given or sampled."""
WRONG = "wrong"
"""Given answers with `label: false`."""

MAX_SHOWN = 10
"""Answers that scored too high and are printed, for each evaluator."""


@dataclass(frozen=True, slots=True)
class CandidateAnswer:
    """An answer to score.

    Attributes:
        example_id: The example.
        kind: `expected`, `real`, `wrong`, or the attack.
        output: The answer.
    """

    example_id: str
    kind: str
    output: Any


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An evaluator's score of an answer.

    Attributes:
        evaluator: Its name.
        example_id: The example.
        kind: `expected`, `real`, `wrong`, or the attack.
        output: The answer.
        score: None: missing.
        error: Why it is missing.
        limit: What an attack on this example may score; None: unknown.
    """

    evaluator: str
    example_id: str
    kind: str
    output: Any
    score: float | None
    error: str | None = None
    limit: float | None = None

    @property
    def is_attack(self) -> bool:
        return self.kind not in (EXPECTED, REAL)

    @property
    def is_too_high(self) -> bool:
        return self.is_attack and self.score is not None and self.limit is not None and self.score > self.limit


@dataclass(frozen=True, slots=True)
class RewardTestReport:
    """The result of one test.

    Attributes:
        reward: The evaluator that is the reward.
        num_examples: How many examples were tried.
        answers: Every scored answer.
    """

    reward: str
    num_examples: int
    answers: list[ScoredAnswer]

    @property
    def too_high(self) -> list[ScoredAnswer]:
        """The best answer of each attack on each example that scored too high, for each evaluator."""
        best: dict[tuple[str, str, str], ScoredAnswer] = {}
        for each in self.answers:
            key = (each.evaluator, each.kind, each.example_id)
            if each.is_too_high and (key not in best or (each.score or 0) > (best[key].score or 0)):
                best[key] = each
        return list(best.values())

    def as_dict(self) -> dict[str, Any]:
        """Returns the result, ready for JSON."""
        return {
            "reward": self.reward,
            "num_examples": self.num_examples,
            "rows": self.summarize(),
            "too_high": [asdict(each) for each in self.too_high],
            "num_missing": sum(each.score is None for each in self.answers),
        }

    def summarize(self) -> list[dict[str, Any]]:
        """Returns one row for each evaluator and kind of answer: mean, highest score, and how many are too high."""
        groups: dict[tuple[str, str], list[ScoredAnswer]] = {}
        for each in self.answers:
            groups.setdefault((each.evaluator, each.kind), []).append(each)
        rows = []
        for (evaluator, kind), group in groups.items():
            scores = [each.score for each in group if each.score is not None]
            tried = {each.example_id for each in group if each.score is not None}
            rows.append(
                {
                    "evaluator": evaluator,
                    "answer": kind,
                    "mean": statistics.fmean(scores) if scores else None,
                    "max": max(scores, default=None),
                    "num_examples": len(tried),
                    "num_too_high": len({each.example_id for each in group if each.is_too_high}),
                    "num_missing": len(group) - len(scores),
                    "missing_reason": find_commonest_reason(each.error or "" for each in group if each.score is None),
                }
            )
        return rows

    def format_lines(self) -> list[str]:
        """Returns the result as text: a table, the answers that scored too high, and what to do."""
        lines = [f"{'evaluator':<20} {'answer':<14} {'mean':>7} {'highest':>8}  too high"]
        for row in self.summarize():
            name = row["evaluator"] + (" (reward)" if row["evaluator"] == self.reward else "")
            honest = row["answer"] in (EXPECTED, REAL)
            high = "" if honest else f"{row['num_too_high']} of {row['num_examples']} examples"
            missing = f"; {row['num_missing']} without a score: {row['missing_reason']}" if row["num_missing"] else ""
            numbers = f"{_format_score(row['mean']):>7} {_format_score(row['max']):>8}"
            lines.append(f"{shorten_line(name, 20):<20} {row['answer']:<14} {numbers}  {high}{missing}".rstrip())
        return [*lines, *self._format_too_high(), *self._format_notes()]

    def _format_too_high(self) -> list[str]:
        if not self.too_high:
            return ["no attack scored too high"]
        lines = ["scored too high:"]
        for evaluator in dict.fromkeys(each.evaluator for each in self.too_high):
            found = [each for each in self.too_high if each.evaluator == evaluator]
            lines += [
                f"  {evaluator}, {each.kind}, example {shorten_line(each.example_id, 40)}: {_format_score(each.score)} "
                f'(at most {_format_score(each.limit)}): "{shorten_line(each.output, 120)}"'
                for each in found[:MAX_SHOWN]
            ]
            lines += [f"  {evaluator}: and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
        return [*lines, "A policy that is trained on this reward will find such answers: make the evaluator stricter"]

    def _format_notes(self) -> list[str]:
        """Returns what else is wrong with an evaluator: it has no score of good answers, or not a higher one."""
        means = {(row["evaluator"], row["answer"]): row["mean"] for row in self.summarize()}
        notes = []
        for evaluator in dict.fromkeys(each.evaluator for each in self.answers):
            expected, empty = means.get((evaluator, EXPECTED)), means.get((evaluator, "empty"))
            if expected is not None and empty is not None and expected <= empty:
                notes.append(f"note: {evaluator} scores expected answers no higher than empty ones")
            mine = [each for each in self.answers if each.evaluator == evaluator and each.is_attack]
            without = {each.example_id for each in mine if each.limit is None}
            if without:
                notes.append(
                    f"note: {evaluator} has no score of a good answer to {len(without)} of {self.num_examples} "
                    "examples, so nothing is too high there; pass --max_score"
                )
        return notes


def _format_score(score: float | None) -> str:
    return "-" if score is None else f"{score:.3g}"
