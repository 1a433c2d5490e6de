"""Snapshots of a learner, for rollback and reset."""

from __future__ import annotations

import torch

from reinforge.engine.training.learner import Learner


class LearnerSnapshot:
    """A copy of a learner's weights, including its critic's, and of its optimizer state."""

    @torch.no_grad()
    def __init__(self, learner: Learner):
        self._learner, self._num_steps = learner, learner.num_steps
        self._stage = (learner.stage, learner.config, learner.stage_version)
        self._weights = {name: p.detach().clone() for name, p in learner.parameters.items()}
        self._moments = {name: value.clone() for name, value in learner.state().items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the weights and the optimizer state in place."""
        for name, parameter in self._learner.parameters.items():
            parameter.copy_(self._weights[name])
        if self._learner.stage != self._stage[0]:
            self._learner.begin_stage(*self._stage)
        self._learner.restore(self._moments, self._num_steps)
        self._learner.gather_weights()
