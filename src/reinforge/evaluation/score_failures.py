"""Reports the first failures of each evaluator at once, while the run still goes on.

The episodes of a stage may take an hour; an evaluator with a bug fails on the first of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from reinforge.evaluation.reasons import shorten_line, without_numbers

MAX_KINDS = 3
"""Different failures of one evaluator that are reported at once; later ones are only counted."""


class ScoreFailures:
    """Reports each kind of failure of an evaluator when it first happens.

    Args:
        note: Shows a line to the user.
    """

    def __init__(self, note: Callable[[str], None] = lambda text: None):
        self.note = note
        self._kinds: dict[str, set[str]] = defaultdict(set)

    def report(self, evaluator: str, example_id: str, reason: str) -> None:
        """Reports a missing score, unless the evaluator has failed in this way before.

        Args:
            reason: Why there is no score: the exception with its file and line, if it raised one.
        """
        kinds, kind = self._kinds[evaluator], without_numbers(reason)
        if kind in kinds or len(kinds) >= MAX_KINDS:
            return
        kinds.add(kind)
        head = f"evaluator {evaluator} has no score for example {shorten_line(example_id, 40)}: {shorten_line(reason)}"
        self.note(head if len(kinds) > 1 else f"{head}; such scores are tried again, then missing, never 0")
