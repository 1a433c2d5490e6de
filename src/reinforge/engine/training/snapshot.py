"""What one learner can be put back to."""

from __future__ import annotations

import torch

from reinforge.engine.training.learner import Learner


class Snapshot:
    """The weights of one learner, its critic's too, and its optimizer as they are when this is made."""

    @torch.no_grad()
    def __init__(self, learner: Learner):
        self._learner, self._num_steps = learner, learner.num_steps
        self._weights = {name: p.detach().clone() for name, p in learner.parameters.items()}
        self._moments = {name: value.clone() for name, value in learner.state().items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, in place."""
        for name, parameter in self._learner.parameters.items():
            parameter.copy_(self._weights[name])
        self._learner.restore(self._moments, self._num_steps)
