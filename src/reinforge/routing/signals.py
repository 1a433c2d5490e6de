"""Confidence signals: numbers by which good replies of a small model can be told from bad ones before they are sent.

    mean_logprob    mean log-prob of the reply's tokens
    min_logprob     log-prob of its least likely token
    entropy         minus the mean entropy in nats over the most likely tokens of each position, where they are known
    agreement       share of further samples that give the same answer
    evaluator       score of an evaluator that needs no expected answer

In each, more is more confident. A router needs their order only, so none is turned into a probability.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from reinforge.bounded import decode_json
from reinforge.files import to_json
from reinforge.types.request import ModelReply

SIGNALS = ("mean_logprob", "min_logprob", "entropy", "agreement", "evaluator")
NUM_THRESHOLDS = 50
AGREEMENT = "agreement"
"""Name of the metric that is 1.0 if `simplify_reply` is equal for two replies."""


def measure_confidence(
    reply: ModelReply, samples: Sequence[Any] = (), evaluator: float | None = None
) -> dict[str, float]:
    """Returns the signals of a reply that can be computed, by name.

    Args:
        samples: Further, cheap samples of the same request, as `simplify_reply` takes them.
        evaluator: The score of an evaluator that needs no expected answer.

    Example: token log-probs -0.1 and -0.5, samples "yes", "Yes " and "no" of the reply "yes" ->
    {"mean_logprob": -0.3, "min_logprob": -0.5, "agreement": 2 / 3}.
    """
    found = dict[str, float]()
    content = reply.tokens.content if reply.tokens is not None else []
    logprobs = [token.logprob for token in content]
    if logprobs and all(map(math.isfinite, logprobs)):
        found |= {"mean_logprob": math.fsum(logprobs) / len(logprobs), "min_logprob": min(logprobs)}
    if content and all(token.top_logprobs for token in content):
        entropies = [_compute_entropy([top.logprob for top in token.top_logprobs]) for token in content]
        found["entropy"] = -math.fsum(entropies) / len(entropies)
    if samples:
        own = simplify_reply([reply.message])
        found["agreement"] = sum(simplify_reply(each) == own for each in samples) / len(samples)
    if evaluator is not None:
        found["evaluator"] = evaluator
    return found


def _compute_entropy(logprobs: Sequence[float]) -> float:
    """Returns the entropy of the most likely tokens; the rest of the probability counts as one token.

    Example: p = 0.5, 0.25 and 0.25 left -> 0.5 log 2 + 0.5 log 4 = 1.04.
    """
    shares = [math.exp(value) for value in logprobs]
    shares.append(max(0.0, 1 - math.fsum(shares)))
    return -math.fsum(share * math.log(share) for share in shares if share > 0)


def normalize_answer(text: str) -> str:
    """Returns what is equal for equal answers: JSON with its keys in order, or words in lower case."""
    try:
        return json.dumps(decode_json(text), sort_keys=True)
    except ValueError:
        return " ".join(text.casefold().split())


def simplify_reply(reply: Any) -> str:
    """Returns what replies that agree have in common: the calls of tools in any order, or what they say.

    Args:
        reply: A string, or messages of which the last one is the reply.
    """
    if isinstance(reply, list) and reply and isinstance(reply[-1], Mapping) and "role" in reply[-1]:
        calls = [each["function"] for each in reply[-1].get("tool_calls") or ()]
        if calls:
            return json.dumps(sorted([str(each["name"]), normalize_answer(str(each["arguments"]))] for each in calls))
        reply = reply[-1].get("content")
    text = reply if isinstance(reply, str) else to_json(reply)
    return normalize_answer(text.strip().removeprefix("```json").removeprefix("```").removesuffix("```"))


@dataclass(frozen=True, slots=True)
class SignalRow:
    """One request of `select`: the signals of the student's reply, and whether it was as good as the teacher's."""

    signals: Mapping[str, float]
    is_good: bool


@dataclass(frozen=True, slots=True)
class SignalChoice:
    """The signal to route by."""

    name: str
    auroc: dict[str, float] = field(default_factory=dict)  # of every signal; 0.5: it says nothing
    thresholds: tuple[float, ...] = ()  # to calibrate, the strictest first


def choose_signal(rows: Sequence[SignalRow]) -> SignalChoice:
    """Returns the signal that best tells good replies from bad ones: that with the largest area under the ROC curve.

    Its thresholds are quantiles over `rows`, so rows of `select` leave those of the calibration untouched.

    Raises:
        ValueError: No signal is known in every row.
    """
    names = [name for name in SIGNALS if rows and all(name in row.signals for row in rows)]
    if not names:
        raise ValueError("no confidence signal is known in every row: sample with log-probs, or take several samples")
    labels = [row.is_good for row in rows]
    auroc = {name: compute_auroc([row.signals[name] for row in rows], labels) for name in names}
    best = max(names, key=auroc.__getitem__)
    return SignalChoice(best, auroc, choose_thresholds([row.signals[best] for row in rows]))


def compute_auroc(confidences: Sequence[float], labels: Sequence[bool]) -> float:
    """Returns the share of pairs of a good and a bad reply in which the good one is more confident; ties count half.

    Example: 0.9 and 0.4 of good replies, 0.4 and 0.1 of bad ones -> (1 + 1 + 0.5 + 1) / 4. Without such a pair: 0.5.
    """
    values, is_good = np.asarray(confidences, dtype=np.float64), np.asarray(labels, dtype=bool)
    good, bad = values[is_good], np.sort(values[~is_good])
    if not good.size or not bad.size:
        return 0.5
    below = np.searchsorted(bad, good, side="left") + np.searchsorted(bad, good, side="right")
    return float(below.mean() / (2 * bad.size))


def choose_thresholds(confidences: ArrayLike, count: int = NUM_THRESHOLDS) -> tuple[float, ...]:
    """Returns at most `count` quantiles of confidences, the largest first, each of them one of the confidences."""
    found = np.quantile(np.asarray(confidences, dtype=np.float64), np.linspace(0, 1, count), method="higher")
    return tuple(np.unique(found)[::-1].tolist())
