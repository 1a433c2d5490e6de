"""Parses a verifier's message: a decision, or none, in which case the message is a question.

accept                     accept     a line with nothing but the word, markup aside: **Accept.**
I reject.                  reject     or the word with "I" before it
Cell 3 is blue.            reject     or a line that begins with decision, verdict or answer, then the word,
Decision: reject, sorry               then nothing or a mark
I do not accept            None       a word inside a sentence is not a decision: it may be negated, asked or quoted
Decision: not accept       None
Decision: accept or none?  None       two different words are not a decision
accept, and below it       None       nor are two lines that disagree; labeled lines take precedence
reject
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from reinforge.multiagent.dialogue import Decision

_AROUND = " \t*_`\"'#>()[]{}<~-"
_LABEL = r"(?:(?:my|the|final)\s+)*(?:decision|verdict|answer)\b(?:\s+is\b)?[\W_]*(?:i\s+)?"
_STOPS = r"(?=\s*(?:$|[^\w\s?/|]))"
MAX_LISTED_WORDS = 12


def read_decision(text: str, words: Mapping[str, Decision]) -> Decision | None:
    decided = {words[word] for word in find_decision_words(text, words)}
    return next(iter(decided)) if len(decided) == 1 else None


def find_decision_words(text: str, words: Mapping[str, Decision]) -> set[str]:
    """Returns the words of a message that decide; several may agree, or contradict each other."""
    word = "|".join(re.escape(each) for each in sorted(words, key=len, reverse=True))
    labeled, alone = set[str](), set[str]()
    for line in text.lower().splitlines():
        line = line.strip(_AROUND)
        if found := re.match(rf"{_LABEL}({word}){_STOPS}(.*)", line):
            others = {words[other] for other in re.findall(rf"\b({word})\b", found[2])}
            if not others - {words[found[1]]} and "?" not in found[2]:
                labeled.add(found[1])
        elif found := re.fullmatch(rf"(?:i\s+)?({word})[\s.!*_]*", line):
            alone.add(found[1])
    return labeled or alone


def list_decision_words(values: Mapping[str, float]) -> str:
    """Returns the words of a scale for a prompt, from the one that rejects most.

    Example: {"agree": 1, "disagree": -1, "undecided": 0} -> "disagree, undecided or agree"; with more than 12 words:
    "0, 1, ... or 100".
    """
    words = sorted(values, key=lambda word: values[word])
    if len(words) > MAX_LISTED_WORDS:
        return f"{words[0]}, {words[1]}, ... or {words[-1]}"
    return f"{', '.join(words[:-1])} or {words[-1]}"
