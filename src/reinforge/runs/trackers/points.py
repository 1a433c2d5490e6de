"""The metrics of a run under the names that dashboards know, by optimizer step.

    epoch 3 after 40 steps       =>  step 40: reward/mean, entropy, completions/mean_length, ...
    the validation after it      =>  step 40: validation/reward, validation/<evaluator>
    the baseline                 =>  step 0

Only what was measured is sent: an unknown value has no point.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reinforge.runs.rows import BASELINE, EpochMetrics, ValidationRow
from reinforge.runs.summary import STAGE_NAMES, RunSummary

JOB_NAMES = {
    "loss": "loss",
    "lr": "learning_rate",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "kl_ref": "kl",
    "approx_kl": "approx_kl",
    "clip_fraction": "clip_ratio/region_mean",
    "clip_fraction_low": "clip_ratio/low_mean",
    "clip_fraction_high": "clip_ratio/high_mean",
    "mismatch": "mismatch/mean",
    "mismatch_kl": "mismatch_kl/mean",
    "ratio": "ratio/mean",
    "tis_weight": "tis_weight/mean",
    "policy_version": "policy_version",
    "num_tokens": "tokens/trained",
    "num_updates": "steps/made",
    "num_skipped_steps": "steps/skipped",
    "canary_difference": "canary/max_difference",
    "canary_k3": "canary/k3",
}
"""Metrics of a training job -> their names on a dashboard; others are sent as `job/<name>`."""


def name_epoch_metrics(row: EpochMetrics) -> dict[str, float]:
    """Returns the metrics of an epoch that are known, by their names on a dashboard."""
    groups = row.num_groups or None
    values: dict[str, Any] = {
        "epoch": row.epoch,
        "reward/mean": row.avg_reward,
        "reward/std": row.reward_std,
        "reward/kept_mean": row.filtered_avg_reward,
        **{f"reward/{name}": value for name, value in row.scores.items()},
        "completions/mean_length": row.completion_tokens,
        "completions/clipped_ratio": row.clipped_share,
        "frac_reward_zero_std": _divide(row.num_groups_zero_variance, groups),
        "groups/kept_ratio": _divide(row.num_groups_kept, groups),
        "episodes/missing": row.num_missing,
        "curriculum": row.curriculum_percentile,
        **{JOB_NAMES.get(name, f"job/{name}"): value for name, value in row.job.items()},
    }
    return keep_numbers(values)


def name_validation_metrics(row: ValidationRow) -> dict[str, float]:
    own = {f"validation/{name}": value for name, value in row.metrics.items()}
    return keep_numbers({**own, "validation/reward": row.avg_reward, "validation/unscored": row.num_unscored})


def name_results(summary: RunSummary) -> dict[str, float]:
    """Returns the figures of the verdict, by their names on a dashboard; empty: there is none."""
    if summary.improvement is None:
        return {}
    arms = {"base": summary.confirm_base, "tuned": summary.confirm_tuned}
    values: dict[str, Any] = {f"verdict/{name}": arm.mean for name, arm in arms.items() if arm is not None}
    improvement = summary.improvement
    values |= {
        "verdict/improvement": improvement.mean_difference,
        "verdict/ci_low": improvement.ci_low,
        "verdict/ci_high": improvement.ci_high,
        "verdict/promoted": None if summary.promoted is None else int(summary.promoted),
    }
    return keep_numbers(values)


def name_times(seconds_by_stage: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each stage: `{"AWAIT": 3.2}` -> `{"time/train": 3.2}`."""
    return {f"time/{STAGE_NAMES.get(stage, stage.lower())}": seconds for stage, seconds in seconds_by_stage.items()}


def keep_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers, under names that every dashboard takes: letters, digits and `_-./ `."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {re.sub(r"[^\w\-./ ]", "_", name): float(value) for name, value in numbers.items() if math.isfinite(value)}


def _divide(count: int | None, total: int | None) -> float | None:
    return None if count is None or total is None else count / total


@dataclass
class StepCount:
    """Counts the optimizer steps of a run, epoch by epoch; a job of a backend that reports none counts as one step.

    Attributes:
        steps: Steps so far.
    """

    steps: int = 0

    def __post_init__(self) -> None:
        self._after = {BASELINE: self.steps}

    def add(self, row: EpochMetrics) -> int:
        """Returns the number of steps after an epoch; adding the same epoch again changes nothing."""
        if row.epoch not in self._after:
            made = row.job.get("num_updates")
            has_job = bool(row.job) or bool(row.num_groups_kept)
            self.steps += made if isinstance(made, int) else int(has_job)
            self._after[row.epoch] = self.steps
        return self._after[row.epoch]

    def find(self, epoch: int) -> int:
        """Returns the number of steps after an epoch; for one that is not known, those so far."""
        return self._after.get(epoch, self.steps)
