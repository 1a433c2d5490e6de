"""The baseline of KTO: how far the policy is from the reference, by replies to other prompts, over a whole step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from reinforge.errors import EngineError
from reinforge.types.sample import FloatArray, TrainingSample


def sum_kl(
    samples: Sequence[TrainingSample], compute: Callable[[Sequence[TrainingSample]], list[FloatArray]]
) -> tuple[float, float]:
    """Returns sum_s w_s d_s and sum_s w_s over some of the samples of a step, those of one process.

    d_s is the sum over s.mismatched of log p / p_ref; it has no gradient.

    Args:
        samples: The samples; w_s are their weights.
        compute: Returns log-probs under the weights from before the step, `[T]` each; called also with no samples.
    """
    pairs = [(sample.weight, sample.mismatched) for sample in samples if sample.mismatched is not None]
    total = weights = 0.0
    rows = compute([mismatched for _, mismatched in pairs])
    for (weight, mismatched), logprobs in zip(pairs, rows, strict=True):
        if mismatched.ref_logprobs is None:
            raise EngineError("mismatched samples need ref_logprobs; score the samples with Needs(ref_logprobs=True)")
        distance = np.sum(logprobs - mismatched.ref_logprobs, where=mismatched.loss_mask, dtype=np.float64)
        total += weight * float(distance)
        weights += weight
    return total, weights


def combine_kl(parts: Sequence[tuple[float, float]]) -> float | None:
    """Returns max(0, sum_s w_s d_s / sum_s w_s) from the sums of a step's parts; None without any mismatched sample.

    It covers the whole step, so it does not depend on micro-batches, nor on how many processes share the step.

    Example: (0.6, 2.0) and (0.2, 2.0) -> 0.2
    """
    total, weights = (sum(column) for column in zip(*parts, strict=True))
    return float(np.maximum(total / weights, 0.0)) if weights else None  # of NaN it is NaN, and the step is skipped
