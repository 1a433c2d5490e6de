"""The algorithm of a pipeline: each epoch is trained by the algorithm of its stage.

stages sft (epochs 0 and 1) and grpo (from epoch 2)   =>  for_epoch(1) is SFT, for_epoch(2) is GRPO
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.interfaces import Algorithm
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample
from reinforge.types.trajectory import TrajectoryGroup


class StagedAlgorithm(Algorithm):
    """Chooses by the epoch, among stages that each begin at an epoch; needs what any stage needs."""

    def __init__(self, stages: Sequence[tuple[int, Algorithm]]):
        self.stages = list(stages)
        algorithms = [algorithm for _, algorithm in self.stages]
        self.loss = algorithms[0].loss
        old = [each.needs.old_logprobs for each in algorithms]
        self.needs = Needs(
            old_logprobs=True if True in old else "inexact" if "inexact" in old else False,
            ref_logprobs=any(each.needs.ref_logprobs for each in algorithms),
            values=any(each.needs.values for each in algorithms),
        )
        self.offline = all(each.offline for each in algorithms)

    def for_epoch(self, epoch: int | None) -> Algorithm:
        first, algorithm = self._find_stage(epoch or 0)
        return algorithm.for_epoch(None if epoch is None else epoch - first)

    def get_loss(self, epoch: int) -> LossSpec:
        return self._find_stage(epoch)[1].loss

    def _find_stage(self, epoch: int) -> tuple[int, Algorithm]:
        return [pair for pair in self.stages if pair[0] <= epoch][-1]

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of the first stage; a job asks the algorithm of its epoch."""
        return self.for_epoch(0).build_samples(groups)

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        return self.for_epoch(0).credit(samples)
