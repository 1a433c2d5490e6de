"""A copy of a model that serves the published version while a job trains the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from reinforge.engine.model.adapters import read_scales, write_scales
from reinforge.engine.model.causal_model import CausalModel


class ServedCopy:
    """A copy of a model, `model`, which the sampler samples from: only the weights that jobs train are its own."""

    def __init__(self, model: CausalModel, adapters: Sequence[str]):
        self._trained = model
        self.model = model.make_served_copy(_find_trained(model, adapters))

    def make_turns(self, run_for: Callable[[float], None]) -> SamplerTurns:
        """Returns what gives the sampler its turns, from what lets it sample for some seconds."""
        return SamplerTurns(run_for)

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


class SamplerTurns:
    """Lets the sampler work as long as the last part of a computation took; called in its thread between the parts."""

    def __init__(self, run_for: Callable[[float], None], clock: Callable[[], float] = time.monotonic):
        self._run_for, self._clock = run_for, clock
        self._since_s: float | None = None

    @contextmanager
    def share_thread(self) -> Iterator[None]:
        """Measures the computation inside the block, which may give the sampler turns."""
        before, self._since_s = self._since_s, self._clock()
        try:
            yield
        finally:
            self._since_s = before

    def __call__(self) -> None:
        """Gives the sampler its turn; does nothing outside `share_thread`."""
        if self._since_s is not None:
            self._run_for(self._clock() - self._since_s)
            self._since_s = self._clock()
