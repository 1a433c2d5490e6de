"""Losses: pure functions of one `TokenBatch`, looked up by name.

    @register_loss("my_loss")
    def my_loss(batch: TokenBatch, logprobs_BT: Tensor, *, scale: float = 1.0) -> LossOutput: ...

`logprobs_BT` has log p of each trained token under the current weights. A loss that reads what its batch does not have,
such as log-probs of a reference or the other sample of a pair, raises an error.
The learner does the averaging: the loss of an optimizer step is sum_t w_s l_t / sum_t w_s over all trained tokens of
the step, w_s the sample's weight, so the split into micro-batches does not change it. A loss of one number per sample
becomes sum_s w_s l_s / sum_s w_s.
The built-in losses are in the modules of `FAMILIES`; this module has the registry and shared parts.
Shapes: B samples, T tokens.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from reinforge.engine.token_batch import TokenBatch
from reinforge.errors import ConfigError, Problem, describe_error, did_you_mean
from reinforge.types.sample import LossSpec

FAMILIES = (
    "reinforge.engine.losses.policy_gradient",
    "reinforge.engine.losses.preference",
    "reinforge.engine.losses.token_weighted",
)
"""Modules that register losses; imported on the first lookup."""


@dataclass(slots=True)
class LossOutput:
    """What a loss returns."""

    loss: Tensor
    """`[B, T]` loss of each token, read where `loss_mask` is True; `[B]` loss of each sample; or one number, weighted
    by the sum of the batch's sample weights."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> `[B, T]`, `[B]` or one number, without gradient; the learner reports their means over a step's trained
    tokens, samples or micro-batches."""


Loss = Callable[..., Any]
"""`loss(batch, logprobs_BT, **params)` returns a `LossOutput`, a tensor, or a tuple of a tensor and metrics."""

_LOSSES: dict[str, Loss] = {}


def register_loss(name: str) -> Callable[[Loss], Loss]:
    """Registers `loss(batch, logprobs_BT, **params)` under a name for `LossSpec.name`."""

    def register(loss: Loss) -> Loss:
        _LOSSES[name] = loss
        return loss

    return register


def as_loss_output(output: LossOutput | Tensor | tuple[Tensor, Mapping[str, Any]]) -> LossOutput:
    """Returns a loss function's result as a `LossOutput`; the metrics of a tuple may be plain numbers."""
    if isinstance(output, Tensor):
        return LossOutput(output)
    if isinstance(output, tuple):
        return LossOutput(output[0], {name: torch.as_tensor(value) for name, value in output[1].items()})
    return output


def find_loss(spec: LossSpec) -> Loss:
    """Returns the loss that a spec names: a registered one, or `package.module:function`, which is imported.

    The second form keeps torch out of the module that defines a user's algorithm.

    Raises:
        ConfigError: No loss has that name, or the loss does not take these parameters.
    """
    for family in FAMILIES:
        if spec.name not in _LOSSES and ":" not in spec.name:
            importlib.import_module(family)
    loss = _import_loss(spec.name) if ":" in spec.name else _LOSSES.get(spec.name)
    if loss is None:
        names = ", ".join(sorted(_LOSSES))
        message = f'no loss named "{spec.name}"{did_you_mean(spec.name, _LOSSES)}'
        fix = f"use one of: {names}, or name a function of your own as package.module:function"
        raise ConfigError(Problem("finetuning.algorithm", message, fix))
    allowed = _list_parameters(loss)
    unknown = [name for name in spec.params if allowed is not None and name not in allowed]
    if allowed is not None and unknown:
        message = f'the loss "{spec.name}" has no parameter "{unknown[0]}"{did_you_mean(unknown[0], allowed)}'
        raise ConfigError(
            Problem("finetuning.algorithm", message, f"its parameters are: {', '.join(allowed) or 'none'}")
        )
    return loss


def _list_parameters(loss: Loss) -> list[str] | None:
    """Returns the names of a loss's parameters, including `**params: Unpack[SomeTypedDict]`; None: it takes any."""
    names = []
    for parameter in inspect.signature(loss).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_KEYWORD:
            if "Unpack" not in str(parameter.annotation):
                return None
            [shared] = get_args(get_type_hints(loss)[parameter.name])
            names += list(shared.__annotations__)
    return names


def _import_loss(name: str) -> Any:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:
        raise ConfigError(
            Problem("finetuning.algorithm", f'the loss "{name}" cannot be imported: {describe_error(error)}')
        ) from error


@register_loss("cross_entropy")
def cross_entropy(batch: TokenBatch, logprobs_BT: Tensor) -> LossOutput:
    """Returns the negative log-likelihood of supervised fine-tuning, l_t = -log p(t)."""
    return LossOutput(-logprobs_BT)


def kl_to_reference(batch: TokenBatch, logprobs_BT: Tensor, estimator: str = "k3") -> Tensor:
    """Returns an estimate of KL(p, p_ref) at each token sampled from p, `[B, T]` (Schulman, "Approximating KL
    divergence", 2020).

    With d = log p - log p_ref: k1 = d, unbiased with high variance; k2 = d^2 / 2, biased with low variance;
    k3 = exp(-d) - 1 + d, unbiased and never negative. On policy, only k2 has the gradient of the divergence in the
    mean; the mean gradient of k1 is zero, so k1 belongs in a reward.

    Raises:
        ConfigError: The batch has no reference log-probs, or the estimator is unknown.
    """
    if batch.ref_logprobs is None:
        raise ConfigError("this loss needs ref_logprobs; set needs = Needs(ref_logprobs=True) on the algorithm")
    d_BT = torch.where(batch.loss_mask, logprobs_BT - batch.ref_logprobs, 0.0)
    if estimator == "k1":
        return d_BT
    if estimator == "k2":
        return d_BT**2 / 2
    if estimator == "k3":
        return (-d_BT).exp() - 1 + d_BT
    raise ConfigError(f'unknown KL estimator "{estimator}"; use k1, k2 or k3')


def mean_by_sample(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns the mean over each sample's trained tokens, `[B]`."""
    return torch.where(mask_BT, values_BT, 0.0).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)
