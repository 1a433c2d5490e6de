"""How similar two texts are, from 0 to 1.

    fuzzy_match   2 M / T: characters of the longest common subsequence, twice, over those of both texts (`rapidfuzz`)
    bleu          BLEU of one sentence (Papineni 2002), runs of up to 4 words, brevity penalty; a count of 0 is smoothed
                  to 1 / 2^k for its k-th occurrence (Chen and Cherry 2014, method 3); shorter texts have shorter runs
    gleu          the lower of precision and recall of all runs of 1 to 4 words (Wu 2016, section 4.3)
    rouge_n       F1 of the runs of n words (Lin 2004)
    rouge_l       F1 of the longest common subsequence of words (Lin 2004)

Words are runs of letters and digits; upper and lower case are the same for rouge, as in its reference implementation.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from types import ModuleType

from reinforge.errors import ConfigError

WORD = re.compile(r"\w+|[^\w\s]")
PLAIN_WORD = re.compile(r"[^\W_]+")
MAX_ORDER = 4
MAX_WORDS = 4096  # longer texts are compared by this many words: the time of rouge_l grows with the square
MAX_CHARACTERS = 20_000  # the same for fuzzy_match
NEEDS_RAPIDFUZZ = ("fuzzy_match", "rouge_l")


def import_rapidfuzz(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"rapidfuzz.{module}")
    except ImportError as error:
        message = f"{' and '.join(NEEDS_RAPIDFUZZ)} need rapidfuzz, which is not installed ({error})"
        raise ConfigError(f"{message}; pip install 'reinforge[serve]'") from None


def compute_similarity(metric: str, text: str, reference: str) -> float:
    """Returns the similarity of two texts; two empty ones are equal."""
    if metric == "fuzzy_match":
        ratio = import_rapidfuzz("fuzz").ratio(text[:MAX_CHARACTERS], reference[:MAX_CHARACTERS])
        return float(ratio) / 100
    if metric in ("bleu", "gleu"):
        words, expected = _split(WORD, text), _split(WORD, reference)
    else:
        words, expected = _split(PLAIN_WORD, text.lower()), _split(PLAIN_WORD, reference.lower())
    if not words or not expected:
        return float(words == expected)
    if metric == "bleu":
        return _compute_bleu(words, expected)
    if metric == "gleu":
        return _compute_gleu(words, expected)
    if metric == "rouge_l":
        common = import_rapidfuzz("distance").LCSseq.similarity(words, expected)
        return _compute_f1(common, len(words), len(expected))
    order = int(metric.removeprefix("rouge_"))
    runs, expected_runs = _count_runs(words, order), _count_runs(expected, order)
    return _compute_f1((runs & expected_runs).total(), runs.total(), expected_runs.total())


def _split(pattern: re.Pattern[str], text: str) -> list[str]:
    return [match[0] for match in islice(pattern.finditer(text), MAX_WORDS)]


def _count_runs(words: Sequence[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + length]) for start in range(len(words) - length + 1))


def _compute_f1(common: int, found: int, expected: int) -> float:
    return 2 * common / (found + expected) if common else 0.0


def _compute_bleu(words: Sequence[str], expected: Sequence[str]) -> float:
    logs, smoothing = [], 1.0
    for order in range(1, min(MAX_ORDER, len(words), len(expected)) + 1):
        runs = _count_runs(words, order)
        common, total = (runs & _count_runs(expected, order)).total(), max(1, runs.total())
        if order == 1 and not common:
            return 0.0
        if not common:
            smoothing /= 2
        logs.append(math.log((common or smoothing) / total))
    penalty = min(1.0, math.exp(1 - len(expected) / len(words)))
    return penalty * math.exp(math.fsum(logs) / len(logs))


def _compute_gleu(words: Sequence[str], expected: Sequence[str]) -> float:
    common = found = wanted = 0
    for order in range(1, MAX_ORDER + 1):
        runs, expected_runs = _count_runs(words, order), _count_runs(expected, order)
        common += (runs & expected_runs).total()
        found, wanted = found + runs.total(), wanted + expected_runs.total()
    return common / max(found, wanted)
