"""The best of a run's validations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reinforge.runs.rows import ValidationRow


def choose_best_validation(validations: Sequence[ValidationRow], metric: str | None = None) -> ValidationRow | None:
    """Returns the validation with the highest score, the baseline (epoch -1) included; of equals the earliest.

    Example: rewards `{-1: 0.40, 0: None, 1: 0.55, 2: 0.55}` by epoch -> the row of epoch 1. None: no validation has a
    score. If the best has epoch -1, no checkpoint beat the base model.

    Args:
        metric: The gate's metric; used if any validation has it, else `avg_reward`.
    """
    by_metric = metric is not None and any(metric in row.metrics for row in validations)

    def score(row: ValidationRow) -> float | None:
        value = row.metrics.get(metric) if by_metric and metric is not None else row.avg_reward
        return value if value is not None and math.isfinite(value) else None

    scored = [(value, row) for row in validations if (value := score(row)) is not None]
    if not scored:
        return None
    return min(scored, key=lambda pair: (-pair[0], pair[1].epoch))[1]
