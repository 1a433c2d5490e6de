"""Optimizers by name, their state for checkpoints, and float32 master copies of low-precision weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from reinforge.config.policy import OptimizerConfig

logger = logging.getLogger(__name__)

MASTER_PREFIX = "master"  # prefix of a parameter's name under which its float32 copy is saved


def make_optimizer(settings: OptimizerConfig, groups: list[dict[str, Any]]) -> Optimizer:
    rate, eps = settings.peak, settings.eps
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


def get_state_keys(settings: OptimizerConfig) -> set[str]:
    """Returns the names of the tensors that an optimizer keeps for each parameter, found by a step on one number.

    Example: adamw -> {step, exp_avg, exp_avg_sq}; sgd -> {}; sgd with momentum -> {momentum_buffer}.
    """
    number = nn.Parameter(torch.zeros(()))
    number.grad = torch.zeros(())
    optimizer = make_optimizer(settings, [{"params": [number]}])
    optimizer.step()
    return set(_select_tensors(optimizer.state[number]))


def get_optimizer_state(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the optimizer's state tensors by name: `exp_avg.NAME` and the like."""
    return {
        f"{key}.{name}": value
        for name, parameter in parameters.items()
        for key, value in _select_tensors(optimizer.state.get(parameter, {})).items()
    }


def restore_optimizer_state(
    optimizer: Optimizer, settings: OptimizerConfig, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    """Restores what `get_optimizer_state` returned; another optimizer's state is ignored, with a warning."""
    expected = get_state_keys(settings)
    saved_keys = [name for name in dict.fromkeys(key.partition(".")[0] for key in state) if name != MASTER_PREFIX]
    if saved_keys and set(saved_keys) != expected:
        wanted, saved = (", ".join(sorted(names)) or "nothing" for names in (expected, saved_keys))
        logger.warning(
            "the checkpoint has another optimizer's state (%s; %s needs %s): starting with an empty state",
            saved,
            settings.name,
            wanted,
        )
        return
    for name, parameter in parameters.items():
        tensors = {key: state[f"{key}.{name}"] for key in saved_keys if f"{key}.{name}" in state}
        if tensors:
            optimizer.state[parameter] = {
                key: _copy_to_device(value, key, parameter, fused=bool(optimizer.defaults.get("fused")))
                for key, value in tensors.items()
            }


def _select_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _copy_to_device(value: Tensor, key: str, parameter: nn.Parameter, *, fused: bool) -> Tensor:
    """Returns a copy on the device that the optimizer expects: `step` is on the CPU unless kernels are fused."""
    if key == "step":
        return value.to(parameter.device if fused else "cpu", copy=True)
    return value.to(parameter.device, parameter.dtype, copy=True)


class MasterWeights:
    """Float32 copies of low-precision parameters; the optimizer updates the copies.

    bfloat16 has 8 bits of mantissa: an update below 1/512 of a weight rounds to nothing, and at the learning rates of
    fine-tuning every update is that small. On the copy, updates add up until the weight rounds to its next value
    (mixed precision training, arXiv:1710.03740, section 3.1). Gradients of micro-batches are summed in float32 for the
    same reason. Parameters of 32 bits or more have no copy, so this costs them nothing.

    Args:
        parameters: The trained parameters, by name.

    Attributes:
        optimized: What the optimizer updates, by name: the copy, or the parameter itself.
        copies: The copies, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.parameters = parameters
        self.copies = {name: nn.Parameter(p.detach().float()) for name, p in parameters.items() if p.dtype.itemsize < 4}
        self.optimized = {**parameters, **self.copies}

    def take_gradients(self) -> None:
        """Adds the parameters' gradients to those of their copies and clears them."""
        for name, copy in self.copies.items():
            grad, self.parameters[name].grad = self.parameters[name].grad, None
            if grad is not None:
                copy.grad = grad.float() if copy.grad is None else copy.grad.add_(grad)

    def clear_gradients(self) -> None:
        for parameter in (*self.parameters.values(), *self.copies.values()):
            parameter.grad = None

    @torch.no_grad()
    def store(self) -> None:
        for name, copy in self.copies.items():
            self.parameters[name].copy_(copy)

    def state(self) -> dict[str, Tensor]:
        return {f"{MASTER_PREFIX}.{name}": copy.detach() for name, copy in self.copies.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores the copies as `state` returned them; a missing one keeps the value of its weight."""
        for name, copy in self.copies.items():
            if f"{MASTER_PREFIX}.{name}" in state:
                copy.copy_(state[f"{MASTER_PREFIX}.{name}"])
