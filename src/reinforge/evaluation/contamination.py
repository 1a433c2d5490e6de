"""Finds near-duplicate texts, and held-out examples that repeat a training example under another id.

The similarity of two texts is the Jaccard index of their runs of five words (shared runs / all runs). Case, spacing and
sentence punctuation do not count; numbers and operators do. A text of fewer than five words is one run.

    "What is 3 + 4?"     "what is 3 + 4"    =>  1.0
    "What is 3 + 4?"     "What is 3 - 4?"   =>  0.0: one run each, and they differ
    "a b c d e f"        "a b c d e g"      =>  0.33: of abcde, bcdef and bcdeg, they share one

Two sets can only reach a threshold t if they share one of the rarest `size - ceil(t * size) + 1` runs of each, so an
index of those finds all candidates (Bayardo et al., "Scaling Up All Pairs Similarity Search", 2007); they are then
compared exactly.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from reinforge.bounded import encode_any
from reinforge.types.evaluation import EvalInputItem

WORDS_PER_RUN = 5
THRESHOLD = 0.8
MAX_CANDIDATES = 50
"""Texts with which one text is compared at most, those with most rare runs in common first, and texts that the index
keeps for a run: they bound the time on a dataset that repeats one text thousands of times."""
MIN_TEXTS = 5
BOILERPLATE_SHARE = 0.8
"""Runs of words in more than this share of a dataset's texts are its template, and say nothing about one example."""
MAX_COPIES, SHARED_SHARE = 3, 0.2
"""A question that more examples share than both of these allow is not the question of one example."""

_TOKEN = re.compile(
    r"\d+(?:[.,]\d+)*"  # numbers with their decimal point
    r"|[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]"  # scripts without spaces between words
    r"|[^\W\d\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]+"
    r"|[^\w\s.,;:!?\"'`“”‘’…。、，！？；：]"  # operators and brackets
)

_BASE, _PRIME = 1_000_003, 2**61 - 1
"""Runs of words are compared by a polynomial hash, which keeps a large dataset in memory."""

Runs = frozenset[int]


def find_near_duplicates(texts: Sequence[str], threshold: float = THRESHOLD) -> list[tuple[int, int, float]]:
    """Returns pairs `(first, second, similarity)` of similar texts, by index, with `first < second`, in that order.

    Texts that are equal but for case, spacing and punctuation are paired with the first of them only: three equal texts
    give (0, 1, 1.0) and (0, 2, 1.0). Empty texts are in no pair.
    """
    runs = [split_runs(text) for text in texts]
    first_with: dict[Runs, int] = {}
    pairs: list[tuple[int, int, float]] = []
    for index, found in enumerate(runs):
        if found and (first := first_with.setdefault(found, index)) != index:
            pairs.append((first, index, 1.0))
    distinct = list(first_with.values())
    search = SimilaritySearch([runs[index] for index in distinct], threshold)
    for index in distinct:
        pairs += [(distinct[other], index, similarity) for other, similarity in search.add(runs[index])]
    return sorted(pairs)


def split_runs(text: str) -> Runs:
    """Returns hashes of the runs of five words of a string; of its only run if it is shorter; without words, none."""
    words = [_hash_word(word) for word in _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())]
    if len(words) <= WORDS_PER_RUN:
        return frozenset([_hash_run(words)] if words else [])
    return frozenset(_hash_run(words[start : start + WORDS_PER_RUN]) for start in range(len(words) - WORDS_PER_RUN + 1))


@lru_cache(maxsize=2**17)
def _hash_word(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(encode_any(word), digest_size=7).digest()) + 1


def _hash_run(words: Sequence[int]) -> int:
    total = 0
    for word in words:
        total = (total * _BASE + word) % _PRIME
    return total


class SimilaritySearch:
    """Finds the sets of runs that are similar to a given one; `sets` are all that will be added."""

    def __init__(self, sets: Sequence[Runs], threshold: float) -> None:
        self.threshold = threshold
        self._num_with = Counter(run for each in sets for run in each)
        self._sets: list[Runs] = []
        self._index: dict[int, list[int]] = {}

    def add(self, runs: Runs) -> list[tuple[int, float]]:
        """Adds a set; returns the similar ones among those added before, as `find` does."""
        rarest = self._choose_rarest(runs)
        similar = self._find(runs, rarest)
        for run in rarest:
            places = self._index.setdefault(run, [])
            if len(places) < MAX_CANDIDATES:
                places.append(len(self._sets))
        self._sets.append(runs)
        return similar

    def find(self, runs: Runs) -> list[tuple[int, float]]:
        """Returns the similar sets, as position in the order of adding and similarity."""
        return self._find(runs, self._choose_rarest(runs))

    def _find(self, runs: Runs, rarest: Sequence[int]) -> list[tuple[int, float]]:
        shared: Counter[int] = Counter()
        for run in rarest:
            shared.update(self._index.get(run, ()))
        candidates = sorted(shared, key=lambda at: (-shared[at], at))[:MAX_CANDIDATES]
        scored = [(at, measure_similarity(runs, self._sets[at])) for at in sorted(candidates)]
        return [(at, similarity) for at, similarity in scored if similarity >= self.threshold]

    def _choose_rarest(self, runs: Runs) -> list[int]:
        wanted = len(runs) - math.ceil(self.threshold * len(runs) - 1e-9) + 1
        return sorted(sorted(runs), key=self._num_with.__getitem__)[:wanted] if runs else []


def measure_similarity(one: Runs, other: Runs) -> float:
    """Returns the Jaccard index: shared elements / all elements; 0.0 if both are empty."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared) if shared else 0.0


@dataclass(frozen=True)
class Repetition:
    id: str
    split: str
    train_id: str
    similarity: float


def is_trained_on(split: str) -> bool:
    return split.partition(" ")[0] == "train"


def find_repetitions(splits: Mapping[str, Sequence[EvalInputItem]], threshold: float = THRESHOLD) -> list[Repetition]:
    """Returns the held-out examples whose question is that of a training example, or nearly.

    Only what the agent is asked is compared, without system prompts: neither ids nor expected answers. Runs of words
    that most examples have (the template of the prompt) are left out, and so are questions that many examples share,
    such as the one rule of a game: there something else makes the example. Every split is held out, but `train` and
    those of a pipeline's stages.
    """
    items = [(name, item) for name, examples in splits.items() for item in examples]
    runs = read_runs([item for _, item in items])
    train = [(item, each) for (name, item), each in zip(items, runs, strict=True) if is_trained_on(name)]
    search = SimilaritySearch([each for _, each in train], threshold)
    for _, each in train:
        search.add(each)
    found = []
    for (name, item), each in zip(items, runs, strict=True):
        similar = [] if is_trained_on(name) else search.find(each)
        if similar:
            at, similarity = max(similar, key=lambda pair: (pair[1], -pair[0]))
            found.append(Repetition(str(item.id), name, str(train[at][0].id), similarity))
    return found


def group_near_duplicates(items: Sequence[EvalInputItem], threshold: float = THRESHOLD) -> list[list[str]]:
    """Returns groups of two or more ids whose questions are similar, directly or through others of the group."""
    ordered = sorted(items, key=lambda item: str(item.id))
    runs = read_runs(ordered)
    search = SimilaritySearch(runs, threshold)
    first_of = list(range(len(runs)))

    def find_first(at: int) -> int:
        while first_of[at] != at:
            at = first_of[at]
        return at

    for position, each in enumerate(runs):
        for other, _ in search.add(each):
            low, high = sorted((find_first(other), find_first(position)))
            first_of[high] = low
    groups: dict[int, list[str]] = defaultdict(list)
    for position, item in enumerate(ordered):
        groups[find_first(position)].append(str(item.id))
    return [group for group in groups.values() if len(group) > 1]


def find_equal_questions(items: Sequence[EvalInputItem]) -> list[list[str]]:
    """Returns the ids of examples with the same question: equal but for case, spacing and punctuation.

    The one rule of a game, which many examples share, is not a question: what else the row holds makes the example.
    Where rows are equal in all but their id, it is.
    """
    id_key = find_id_key(items)
    by_question: dict[Any, list[EvalInputItem]] = defaultdict(list)
    for item in items:
        text = read_question(item.input_obj)
        by_question[split_runs(text) or text].append(item)
    limit = max(MAX_COPIES, SHARED_SHARE * len(items))
    found = []
    for same in by_question.values():
        if len(same) <= limit:
            found.append([str(item.id) for item in same])
            continue
        by_row: dict[str, list[str]] = defaultdict(list)
        for item in same:
            row = item.full_dataset_entry
            rest = {key: value for key, value in row.items() if key != id_key} if isinstance(row, Mapping) else row
            by_row[repr((rest, item.expected_output_obj))].append(str(item.id))
        found += by_row.values()
    return found


def find_id_key(items: Sequence[EvalInputItem]) -> str | None:
    """Returns the column with the id of each example, `id` if several are equal to it; None: the rows have none."""
    rows = [(str(item.id), item.full_dataset_entry) for item in items]
    first = rows[0][1] if rows else None
    names = ["id", *first] if isinstance(first, Mapping) else []
    return next((n for n in names if all(isinstance(row, Mapping) and str(row.get(n)) == i for i, row in rows)), None)


def read_runs(items: Sequence[EvalInputItem]) -> list[Runs]:
    """Returns the runs of each example's question, without the template; none of one that many examples share."""
    runs = [split_runs(read_question(item.input_obj)) for item in items]
    counts = Counter(runs)
    limit = max(MAX_COPIES, SHARED_SHARE * len(runs))
    return _strip_template([each if counts[each] <= limit else frozenset() for each in runs])


def read_question(value: Any) -> str:
    """Returns what the agent is asked as one text: of chat messages, all contents but those of system messages."""
    return " ".join(_read_texts(value))


def _read_texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if value.get("role") not in ("system", "developer"):
            for key in _choose_keys(value):
                yield from _read_texts(value[key])
    elif isinstance(value, Sequence):
        for each in value:
            yield from _read_texts(each)
    elif value is not None:
        yield str(value)


def _choose_keys(value: Mapping[Any, Any]) -> list[Any]:
    """Returns the keys with text: of a chat message its content, of a part of one its text, else all."""
    if "role" in value and "content" in value:
        return ["content"]
    if value.get("type") == "text" and "text" in value:
        return ["text"]
    return sorted(value, key=str)


def _strip_template(sets: list[Runs]) -> list[Runs]:
    """Returns the sets without the runs that most of them have; a set that would be empty stays whole."""
    distinct = {each for each in sets if each}
    if len(distinct) < MIN_TEXTS:
        return sets
    num_with = Counter(run for each in distinct for run in each)
    common = {run for run, count in num_with.items() if count > BOILERPLATE_SHARE * len(distinct)}
    return [(each - common) or each for each in sets]
