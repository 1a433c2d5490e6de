"""The most common reason why episodes or scores are missing, to print beside their count.

reasons ["tool_error: no row 3", "tool_error: no row 8", "timeout: ..."]  =>  "tool_error: no row 3 (2 of 3)"

Reasons that differ only in their numbers count as one, and the first of them is shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from reinforge.errors import show
from reinforge.safe_text import to_one_line
from reinforge.types.episode import EpisodeRecord

MAX_REASON_CHARACTERS = 240
MAX_KINDS = 100  # different reasons that are told apart; an agent may fail differently each time, and a run may be long
_NUMBER = re.compile(r"\d+")


class ReasonCounts:
    """Counts reasons, from the counts that `as_dict` returned before."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}
        for reason, count in (counts or {}).items():
            self.add(reason, count)

    def add(self, reason: str, count: int = 1) -> None:
        text = reason[: 4 * MAX_REASON_CHARACTERS]  # cleaned where it is shown: this is called for every episode
        kind = without_numbers(text)
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = text = "other reasons"
        self._counts[kind] = self._counts.get(kind, 0) + count
        self._first.setdefault(kind, text)

    def find_commonest(self) -> str | None:
        """Returns the most common reason in one short line, with its share if there are others; None: no reason."""
        if not self._counts:
            return None
        total, kind = sum(self._counts.values()), max(self._counts, key=self._counts.__getitem__)
        count, text = self._counts[kind], shorten_line(self._first[kind])
        return text if count == total else f"{text} ({count:,} of {total:,})"

    def as_dict(self) -> dict[str, int]:
        return {self._first[kind]: count for kind, count in self._counts.items()}


def without_numbers(reason: str) -> str:
    """Returns a reason without its numbers: what reasons of one kind have in common."""
    return _NUMBER.sub("#", reason[: 4 * MAX_REASON_CHARACTERS])


def find_commonest_reason(reasons: Iterable[str]) -> str | None:
    """Returns the most common of several reasons in one line, with its share if there are others; None: no reason."""
    counts = ReasonCounts()
    for reason in reasons:
        counts.add(reason)
    return counts.find_commonest()


def describe_failure(record: EpisodeRecord) -> str:
    return f"{record.outcome}: {record.reason}"


def find_missing_reason(records: Sequence[EpisodeRecord]) -> str | None:
    """Returns the most common reason among the episodes that the environment failed; None: none is missing."""
    return find_commonest_reason(describe_failure(record) for record in records if record.outcome.is_missing)


def find_unscored_reason(records: Sequence[EpisodeRecord], metric: str) -> str | None:
    """Returns the most common reason why one evaluator has no score of an episode; None: it has scored all."""
    reasons = []
    for record in records:
        output = record.scores.get(metric)
        if record.outcome.is_missing:
            reasons.append(describe_failure(record))
        elif output is not None and output.error is not None:
            reasons.append(output.error)
    return find_commonest_reason(reasons)


def shorten_line(text: object, limit: int = MAX_REASON_CHARACTERS) -> str:
    """Returns a string in one line of at most `limit` characters, without control characters and secrets."""
    line = to_one_line(show(text)[: 4 * limit])
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


MAX_REPORTED_KINDS = 3  # different failures of one evaluator that are reported at once; later ones are only counted


class ScoreFailures:
    """Reports each kind of failure of an evaluator when it first happens."""

    def __init__(self, note: Callable[[str], None] = lambda text: None):
        self.note = note
        self._kinds: dict[str, set[str]] = defaultdict(set)

    def report(self, evaluator: str, example_id: str, reason: str) -> None:
        kinds, kind = self._kinds[evaluator], without_numbers(reason)
        if kind in kinds or len(kinds) >= MAX_REPORTED_KINDS:
            return
        kinds.add(kind)
        head = f"evaluator {evaluator} has no score for example {shorten_line(example_id, 40)}: {shorten_line(reason)}"
        self.note(head if len(kinds) > 1 else f"{head}; such scores are tried again, then missing, never 0")
