"""Counts changes of weights, whoever makes them: a sampler that keeps copies and caches must notice each of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer


class WeightChanges:
    """Counts changes of parameters: steps of any torch optimizer, and operations in place.

    torch counts operations in place itself (`_version`), but not the steps of fused optimizers; a hook counts those.

    Args:
        parameters: The parameters to watch.
    """

    def __init__(self, parameters: Iterable[Parameter]):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._parameters = list(parameters)
        self._ids = set(map(id, self._parameters))
        self._num_steps = 0
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
        return self._num_steps + sum(parameter._version for parameter in self._parameters)

    def close(self) -> None:
        """Stops watching."""
        self._hook.remove()
