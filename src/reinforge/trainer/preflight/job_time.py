"""What a training job takes by its size, from two jobs of different sizes on the sampled episodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.algorithms.curriculum import split_by_signal
from reinforge.errors import JobFailed
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.interfaces import TrainerAdapter
from reinforge.rollout.episode import attach_captured_tokens
from reinforge.trainer import versions
from reinforge.trainer.setup.parts import Parts
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup

SMALL_JOB = 4
"""How many times fewer groups the smaller job has."""
NAME = "preflight"


@dataclass(frozen=True, slots=True)
class JobTime:
    """What a training job takes: `fixed_s + groups * group_s`.

    Attributes:
        fixed_s: Seconds of a job of any size: optimizer steps, fingerprints.
    """

    fixed_s: float
    group_s: float


def fit_job_time(small: tuple[int, float], large: tuple[int, float]) -> JobTime:
    """Returns the line through a small and a large job.

    Example: 2 groups in 3 s and 10 groups in 7 s -> 0.5 s per group and 2 s; 2 groups in 3 s alone -> 1.5 s and 0.
    """
    (few, few_s), (many, many_s) = small, large
    slope = (many_s - few_s) / (many - few) if many > few else 0.0
    fixed_s = many_s - many * slope
    if slope <= 0 or fixed_s <= 0:  # one job only, or another program was in the way
        return JobTime(0.0, many_s / max(1, many))
    return JobTime(fixed_s, slope)


async def time_jobs(parts: Parts, evaluation: DatasetEvaluation) -> JobTime | None:
    """Trains a small and a larger job on what the builder collects for epoch 0; None: nothing can be trained."""
    await parts.trajectory_builder.start_run(NAME, {"epoch": 0})
    collection = await parts.trajectory_builder.finalize(NAME, {"epoch": 0})
    attach_captured_tokens(collection, evaluation.find_call)
    algorithm, least = parts.algorithm.for_epoch(0), parts.config.curriculum_learning.min_reward_diff
    kept = split_by_signal(collection.groups, least, algorithm.needs_groups, algorithm.has_signal).kept
    if not kept:
        return None
    few = max(1, len(kept) // SMALL_JOB)
    try:
        small_s = await _time_job(parts.adapter, kept[:few])
        return fit_job_time((few, small_s), (len(kept), await _time_job(parts.adapter, kept)))
    except JobFailed:  # such as a group that has no credit alone
        return None


async def _time_job(adapter: TrainerAdapter, groups: Sequence[TrajectoryGroup]) -> float:
    """Trains on groups and returns the seconds."""
    started, key = time.monotonic(), f"{NAME}/{len(groups)}"
    trajectories = [group.trajectories for group in groups]
    collection = TrajectoryCollection(trajectories=trajectories, run_id=NAME, epoch=0, job_key=key)
    versions.refuse_failed([await adapter.wait_until_complete(await adapter.submit(collection))])
    return time.monotonic() - started
