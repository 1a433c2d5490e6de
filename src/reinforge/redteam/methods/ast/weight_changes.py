"""Counts changes of weights, whichever code makes them: a sampler that keeps copies and caches must notice each one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer


SAMPLE_SIZE = 64
"""About so many numbers of each parameter are compared."""


class WeightChanges:
    """Counts changes of parameters: steps of any torch optimizer, and operations in place.

    torch counts operations in place itself (`_version`), but not the steps of fused optimizers; a hook counts those. It
    counts no change through `parameter.data` either, as a loop without optimizer makes it: a sample of the numbers of
    each parameter shows those.

    Args:
        parameters: The parameters to watch.
    """

    def __init__(self, parameters: Iterable[Parameter]):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._parameters = list(parameters)
        self._ids = set(map(id, self._parameters))
        self._num_steps = self._num_unseen = 0
        self._sample = self._take_sample()
        watcher = weakref.ref(self)  # torch keeps the hook for good if `close` is not called

        def count_step(optimizer: Optimizer, *_: Any) -> None:
            if (changes := watcher()) is not None:
                changes._count_step(optimizer)

        self._hook = register_optimizer_step_post_hook(count_step)

    def _count_step(self, optimizer: Optimizer) -> None:
        if any(id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"]):
            self._num_steps += 1

    def count(self) -> int:
        """Returns a number that grows with every change."""
        import torch

        sample = self._take_sample()
        if any(not torch.equal(one, other) for one, other in zip(sample, self._sample, strict=True)):
            self._num_unseen += 1
            self._sample = sample
        return self._num_steps + self._num_unseen + sum(parameter._version for parameter in self._parameters)

    def _take_sample(self) -> list[Tensor]:
        flat = [parameter.detach().reshape(-1) for parameter in self._parameters]
        return [values[:: max(1, values.numel() // SAMPLE_SIZE)].clone() for values in flat]

    def close(self) -> None:
        """Stops watching."""
        self._hook.remove()
