"""Optimizers by name, what they keep for each parameter, and float32 copies of weights that have fewer bits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from reinforge.config.schema import OptimizerConfig

logger = logging.getLogger(__name__)

COPY = "master"
"""Stands before a parameter's name where its float32 copy is saved."""


def make_optimizer(settings: OptimizerConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """Returns the optimizer that is configured, for groups of parameters on one device."""
    rate, eps = settings.learning_rate, settings.eps
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    match settings.name:
        case "adamw":
            return AdamW(groups, lr=rate, betas=settings.betas, eps=eps, fused=fused)
        case "adam":
            return Adam(groups, lr=rate, betas=settings.betas, eps=eps, fused=fused)
        case "sgd":
            return SGD(groups, lr=rate, momentum=settings.momentum)
        case "rmsprop":
            return RMSprop(groups, lr=rate, alpha=settings.smoothing, eps=eps, momentum=settings.momentum)
        case "adagrad":
            return Adagrad(groups, lr=rate, eps=eps)


def slots_of(settings: OptimizerConfig) -> set[str]:
    """Returns the names of what an optimizer keeps for each parameter, found by one step on a single number.

    Example: adamw -> {step, exp_avg, exp_avg_sq}; sgd -> {}; sgd with momentum -> {momentum_buffer}.
    """
    number = nn.Parameter(torch.zeros(()))
    number.grad = torch.zeros(())
    optimizer = make_optimizer(settings, [{"params": [number]}])
    optimizer.step()
    return set(_tensors(optimizer.state[number]))


def state_of(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns everything that an optimizer keeps: `exp_avg.NAME` and the like."""
    return {
        f"{key}.{name}": value
        for name, parameter in parameters.items()
        for key, value in _tensors(optimizer.state.get(parameter, {})).items()
    }


def restore_state(
    optimizer: Optimizer, settings: OptimizerConfig, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    """Puts back what `state_of` returned; where that is another optimizer's, this one starts anew, with a warning."""
    expected = slots_of(settings)
    found = [name for name in dict.fromkeys(key.partition(".")[0] for key in state) if name != COPY]
    if found and set(found) != expected:
        kept, held = (", ".join(sorted(names)) or "nothing" for names in (expected, found))
        logger.warning("%s keeps %s, and the checkpoint holds %s: it starts anew", settings.name, kept, held)
        return
    for name, parameter in parameters.items():
        slots = {key: state[f"{key}.{name}"] for key in found if f"{key}.{name}" in state}
        if slots:
            optimizer.state[parameter] = {
                key: _placed(value, key, parameter, fused=bool(optimizer.defaults.get("fused")))
                for key, value in slots.items()
            }


def _tensors(slots: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in slots.items() if isinstance(value, Tensor)}


def _placed(value: Tensor, key: str, parameter: nn.Parameter, *, fused: bool) -> Tensor:
    """Returns a copy where the optimizer expects it: a count of steps is on the CPU unless kernels are fused."""
    if key == "step":
        return value.to(parameter.device if fused else "cpu", copy=True)
    return value.to(parameter.device, parameter.dtype, copy=True)


class MasterWeights:
    """Float32 copies of parameters that have fewer bits; the optimizer moves the copies.

    bfloat16 has 8 bits: a move below 1/512 of a weight rounds to none, and at fine-tuning's rates every move is. On
    the copy they add up until the weight rounds to its next value (mixed precision training, arXiv:1710.03740,
    section 3.1). Gradients of micro-batches are summed in float32 for the same reason. Parameters of 32 bits or more
    are moved themselves, and all of this costs nothing.

    Args:
        parameters: What is trained, by name.

    Attributes:
        moved: What the optimizer moves, by name: the copy, or the parameter itself.
        copies: The copies, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.parameters = parameters
        self.copies = {name: nn.Parameter(p.detach().float()) for name, p in parameters.items() if p.dtype.itemsize < 4}
        self.moved = {**parameters, **self.copies}

    def take_gradients(self) -> None:
        """Adds the parameters' gradients to those of their copies and clears them."""
        for name, copy in self.copies.items():
            found, self.parameters[name].grad = self.parameters[name].grad, None
            if found is not None:
                copy.grad = found.float() if copy.grad is None else copy.grad.add_(found)

    def clear_gradients(self) -> None:
        """Forgets the gradients of parameters and copies."""
        for parameter in (*self.parameters.values(), *self.copies.values()):
            parameter.grad = None

    @torch.no_grad()
    def store(self) -> None:
        """Rounds the copies into their parameters."""
        for name, copy in self.copies.items():
            self.parameters[name].copy_(copy)

    def state(self) -> dict[str, Tensor]:
        """Returns the copies as `master.NAME`."""
        return {f"{COPY}.{name}": copy.detach() for name, copy in self.copies.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Puts the copies back as `state` returned them; one that is missing stays the weight itself."""
        for name, copy in self.copies.items():
            if f"{COPY}.{name}" in state:
                copy.copy_(state[f"{COPY}.{name}"])
