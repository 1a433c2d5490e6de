"""Validations of a run, and the best checkpoint among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def choose_best(validations: Sequence[dict[str, Any]], metric: str | None = None) -> dict[str, Any] | None:
    """Returns the validation with the highest figure on `select`, the baseline (epoch -1) included; ties: the earliest.

    Example: rewards `{-1: 0.40, 0: None, 1: 0.55, 2: 0.55}` by epoch -> the one of epoch 1. None means that nothing
    could be scored; if the best has epoch -1, no checkpoint beat the base.

    Args:
        validations: As `EvaluationReport.as_validation` gives them, with `epoch`, `version` and `checkpoint`.
        metric: The gate's metric; it is used if any validation knows it, else `avg_reward`.
    """
    by_metric = metric is not None and any(metric in (row.get("metrics") or {}) for row in validations)

    def figure(row: dict[str, Any]) -> float | None:
        value = (row.get("metrics") or {}).get(metric) if by_metric else row.get("avg_reward")
        return value if value is not None and math.isfinite(value) else None

    scored = [(value, row) for row in validations if (value := figure(row)) is not None]
    if not scored:
        return None
    return min(scored, key=lambda pair: (-pair[0], pair[1]["epoch"]))[1]


BASELINE = -1
"""The epoch of everything that happens before the first one."""
