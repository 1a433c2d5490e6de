"""Finds held-out examples that ask in other words what a training example asks, by sentence embeddings.

    "How do I reset my password?"    "How can I reset my password?"    =>  found
    "What is 3 + 4?"                 "What is 3 + 5?"                  =>  similar, but not found

They are found if the cosine similarity reaches the threshold and the numbers are the same, in the same order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from reinforge.errors import EngineError, ReinforgeError, boundary
from reinforge.evaluation import contamination
from reinforge.evaluation.contamination import Repetition, is_trained_on
from reinforge.types.evaluation import EvalInputItem

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Returns an embedding of length 1 for each string, `[N, D]`; zeros for one that cannot be compared."""
THRESHOLD, UNTOLD = 0.9, "held-out and training examples are not compared by meaning"
MAX_ROWS, MAX_CHARACTERS = 3_000, 200_000  # half a minute on one core of a laptop

_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[+*/×÷^<>=]|[-−](?=\s*\d)")
_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_VALUES = {word: str(value) for value, word in enumerate(_WORDS, 2)}


def search_by_meaning(
    splits: Mapping[str, Sequence[EvalInputItem]], known: Sequence[Repetition], load: Callable[[], Embed] | None = None
) -> tuple[list[Repetition], str]:
    """Returns held-out examples that repeat a training example by meaning and are not known; or none, and why.

    A question that many examples share is not compared, nor is the template of the prompt. `load`: all-MiniLM-L6-v2.
    """
    items = [(name, item) for name, examples in splits.items() for item in examples]
    items = [each for each, runs in zip(items, contamination.read_runs([i for _, i in items]), strict=True) if runs]
    texts = strip_template([contamination.read_question(item.input_obj) for _, item in items])
    by_numbers: dict[tuple[str, ...], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for at, (name, _) in enumerate(items):
        by_numbers[read_numbers(texts[at])][is_trained_on(name)].append(at)
    groups = [(held_out, train) for held_out, train in by_numbers.values() if held_out and train]
    compared = [at for held_out, train in groups for at in held_out + train]
    num_characters = sum(len(texts[at]) for at in compared)
    if len(compared) > MAX_ROWS or num_characters > MAX_CHARACTERS:
        return [], f"{UNTOLD}: it takes too long for {len(compared):,} examples with {num_characters:,} characters"
    if not groups:
        return [], ""
    try:
        with boundary(EngineError, "the embeddings failed"):
            if load is None:
                from reinforge.engine.sentence_embeddings import load_embedder  # torch

                load = load_embedder
            embeddings = dict(zip(compared, load()([texts[at] for at in compared]), strict=True))
    except ReinforgeError as error:  # the run does not need them
        return [], f"{UNTOLD}: {error}"
    found = []
    for held_out, train in groups:
        similarity_HT = np.array([embeddings[at] for at in held_out]) @ np.array([embeddings[at] for at in train]).T
        for (name, item), scores in zip([items[at] for at in held_out], similarity_HT, strict=True):
            if scores[best := int(scores.argmax())] >= THRESHOLD:
                found.append(Repetition(str(item.id), name, str(items[train[best]][1].id), float(scores[best])))
    told = {(each.split, each.id) for each in known}
    new = [each for each in found if (each.split, each.id) not in told]
    num_held_out = sum(len(each) for name, each in splits.items() if not is_trained_on(name))
    if new and len(found) > max(contamination.MAX_COPIES, contamination.SHARED_SHARE * num_held_out):
        return [], f"{UNTOLD}: {len(found)} of {num_held_out} are similar, as if made from one template"
    return new, ""


def read_numbers(text: str) -> tuple[str, ...]:
    """Returns the numbers and operators in a string: "2 of three" -> ("2", "3"), "3 - 4" -> ("3", "-", "4")."""
    tokens = (token.casefold() for token in _TOKEN.findall(text))
    return tuple(_VALUES.get(token, token) for token in tokens if token in _VALUES or not token.isalpha())


def strip_template(texts: Sequence[str]) -> list[str]:
    """Returns strings without the words that all begin and end with, if none of them is then empty."""
    words = [text.split() for text in texts]
    for _ in range(2 if len({*texts}) >= contamination.MIN_TEXTS else 0):  # the beginning, then the end
        num_shared = sum(1 for _ in takewhile(lambda column: len({*column}) == 1, zip(*words, strict=False)))
        words = [each[num_shared:][::-1] for each in words]
    return [" ".join(each) for each in words] if all(words) else list(texts)
