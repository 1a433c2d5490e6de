"""A copy of a model that serves the published version while a job trains the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reinforge.engine.model.adapters import read_scales, write_scales
from reinforge.engine.model.causal_model import CausalModel


class ServedCopy:
    """A copy of a model, `model`, which the sampler samples from: only the weights that jobs train are its own."""

    def __init__(self, model: CausalModel, adapters: Sequence[str]):
        self._trained = model
        self.model = model.make_served_copy(_find_trained(model, adapters))

    @torch.no_grad()
    def update(self, adapter: str) -> None:
        """Copies an adapter's trained weights; runs in the sampler's thread, between two steps."""
        self._trained.use_adapter(adapter)
        served = dict(self.model.module.named_parameters())
        for name, parameter in self._trained.trained_parameters.items():
            served[name].copy_(parameter)
        write_scales(self.model, adapter, read_scales(self._trained, adapter))


def _find_trained(model: CausalModel, adapters: Sequence[str]) -> list[torch.nn.Parameter]:
    """Returns the parameters that the jobs of these adapters change; without adapters, all."""
    found: list[torch.nn.Parameter] = []
    for name in reversed(adapters):  # the first one stays active
        model.use_adapter(name)
        found += model.trained_parameters.values()
    return found
