"""Which samples of a job make which optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, pairwise

from reinforge.config.policy import BatchConfig
from reinforge.engine.training.collate import group_pairs
from reinforge.types.sample import TrainingSample
from reinforge.types.seeding import stable_random


def plan_steps(samples: Sequence[TrainingSample], settings: BatchConfig, seed: int, epoch: int) -> list[list[int]]:
    """Returns the samples' indices for each optimizer step, reshuffled in each iteration; pairs are never split.

    Example: 5 samples, batch_size 2 -> 3 steps of 2, 2 and 1 samples.

    Args:
        samples: The job's samples; those without trained tokens or weight are left out.
        settings: How many steps, and how often.
        seed: Of the order.
    """
    usable = [i for i, sample in enumerate(samples) if sample.num_trained and sample.weight > 0]
    units = [[usable[i] for i in unit] for unit in group_pairs([samples[i] for i in usable])]
    num_steps = settings.steps_per_job or math.ceil(len(usable) / settings.batch_size)
    num_steps = min(num_steps, len(units))
    steps = []
    for number in range(settings.num_iterations):
        order = units.copy()
        stable_random(seed, "shuffle", epoch, number).shuffle(order)
        bounds = [round(step * len(order) / num_steps) for step in range(num_steps + 1)] if num_steps else []
        steps += [sorted(chain(*order[a:b])) for a, b in pairwise(bounds)]
    return steps
