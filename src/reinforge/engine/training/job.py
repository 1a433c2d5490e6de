"""One open job: the adapters that it may change, and snapshots to roll them back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reinforge.engine.model.adapters import read_scales, write_scales
from reinforge.engine.training.learner import Learner


class LearnerSnapshot:
    """A copy of a learner's weights, including its critic's, of its adapter's scale, and of its optimizer state.

    That of a sharded model is elsewhere (`scarce_memory.py`).
    """

    @torch.no_grad()
    def __init__(self, learner: Learner):
        self._learner, self._num_steps = learner, learner.num_steps
        self._adapter, self._scales = learner.model.adapter, read_scales(learner.model, learner.model.adapter)
        self._stage = (learner.stage, learner.config, learner.stage_version)
        copy = clone if learner.sharded is None else learner.sharded.copy_tensors
        self._weights, self._moments = copy(learner.parameters), copy(learner.state())

    @torch.no_grad()
    def restore(self) -> None:
        for name, parameter in self._learner.parameters.items():
            parameter.copy_(self._weights[name])
        write_scales(self._learner.model, self._adapter, self._scales)
        if self._learner.stage != self._stage[0]:
            self._learner.begin_stage(*self._stage)
        self._learner.restore(self._moments, self._num_steps)
        self._learner.gather_weights()


class EngineJob:
    """The adapters of one job, with snapshots from before it.

    A job is open, then ended. Until the new weights are published it can be rolled back, all adapters together.

    Attributes:
        is_open: True until the job has ended.
    """

    def __init__(self, adapters: tuple[str, ...]):
        self.adapters, self.is_open = adapters, True
        self._snapshots: dict[str, LearnerSnapshot] = {}

    def __str__(self) -> str:
        return ", ".join(self.adapters)

    @property
    def is_changed(self) -> bool:
        return bool(self._snapshots)

    def take_snapshot(self, adapter: str, learner: Learner) -> None:
        """Takes a snapshot of an adapter before its first change; later calls do nothing."""
        if adapter not in self._snapshots:
            self._snapshots[adapter] = LearnerSnapshot(learner)

    def drop_snapshot(self, adapter: str) -> None:
        self._snapshots.pop(adapter, None)

    def restore(self) -> None:
        for snapshot in self._snapshots.values():
            snapshot.restore()


def clone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
