"""Snapshots of a learner, for rollback and reset."""

from __future__ import annotations

import torch

from reinforge.engine.model.adapter_weights import read_scales, write_scales
from reinforge.engine.training.learner import Learner


class LearnerSnapshot:
    """A copy of a learner's weights, including its critic's, of its adapter's scale, and of its optimizer state."""

    @torch.no_grad()
    def __init__(self, learner: Learner):
        self._learner, self._num_steps = learner, learner.num_steps
        self._adapter, self._scales = learner.model.adapter, read_scales(learner.model, learner.model.adapter)
        self._stage = (learner.stage, learner.config, learner.stage_version)
        self._weights = {name: p.detach().clone() for name, p in learner.parameters.items()}
        self._moments = {name: value.clone() for name, value in learner.state().items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the weights and the optimizer state in place."""
        for name, parameter in self._learner.parameters.items():
            parameter.copy_(self._weights[name])
        write_scales(self._learner.model, self._adapter, self._scales)
        if self._learner.stage != self._stage[0]:
            self._learner.begin_stage(*self._stage)
        self._learner.restore(self._moments, self._num_steps)
        self._learner.gather_weights()
