"""An optimizer with parameter groups, gradient clipping, a learning rate schedule and float32 master copies.

The caller runs `take_gradients` after each backward pass, `optimizer_step` at the end of a step, and `clear_gradients`
after it; or `apply`, where gradients add up over several calls. A step whose gradient is not finite is skipped and
changes no parameter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from reinforge.config.policy import CriticConfig, OptimizerConfig, ScheduleConfig
from reinforge.crash import crash_point
from reinforge.engine.model.heads import CRITIC_PREFIX
from reinforge.engine.training.optimizers import (
    MasterWeights,
    get_optimizer_state,
    make_optimizer,
    restore_optimizer_state,
)
from reinforge.errors import EngineError
from reinforge.types.sample import AdamSettings

logger = logging.getLogger(__name__)

BUCKET_NUMBERS = 2**24
"""Numbers of one message between processes: 64 MiB in float32, so that no second copy of all gradients is made."""


class ScheduledOptimizer:
    """Trains a set of parameters from their gradients.

    Args:
        parameters: The parameters by name; the critic's names begin with `value_head.`.

    Attributes:
        parameters: The trained parameters by name, including the critic's.
        masters: Float32 copies of low-precision parameters, which the optimizer updates in their place.
        num_steps: Optimizer steps made since the weights were loaded.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerConfig,
        schedule: ScheduleConfig,
        critic: CriticConfig | None = None,
    ):
        self.parameters = dict(parameters)
        self.configure(settings, schedule, critic or CriticConfig())

    def configure(self, settings: OptimizerConfig, schedule: ScheduleConfig, critic: CriticConfig) -> None:
        self._settings, self._schedule, self._critic = settings, schedule, critic
        self.reset()

    def reset(self) -> None:
        """Drops the optimizer's state and step count; master copies are made again from the current weights."""
        settings, self.num_steps = self._settings, 0
        self.masters = MasterWeights(self.parameters)
        optimized = self.masters.optimized
        self._policy_parameters = [p for name, p in optimized.items() if not name.startswith(CRITIC_PREFIX)]
        self._critic_parameters = [p for name, p in optimized.items() if name.startswith(CRITIC_PREFIX)]
        matrices = [p for p in self._policy_parameters if p.ndim >= 2]
        others = [p for p in self._policy_parameters if p.ndim < 2]
        peak = settings.peak
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay, "peak": peak},
            {"params": others, "weight_decay": 0.0, "peak": peak},
        ]
        if self._critic_parameters:
            groups.append({"params": self._critic_parameters, "weight_decay": 0.0, "peak": self._critic.learning_rate})
        self.optimizer = make_optimizer(settings, groups)

    def set_learning_rate(self, rate: float) -> None:
        """Replaces the peak learning rate of all but the critic's parameters; the optimizer keeps its state."""
        self._settings = self._settings.model_copy(update={"learning_rate": rate})
        for group in self.optimizer.param_groups[:2]:  # matrices and others; the critic's come third
            group["peak"] = rate

    def take_gradients(self) -> None:
        self.masters.take_gradients()

    def take_out_gradients(self) -> dict[str, Tensor]:
        held = {name: p.grad for name, p in self.masters.optimized.items() if p.grad is not None}
        self.clear_gradients()
        return held

    @torch.no_grad()
    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.masters.optimized[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def scale_gradients(self, factor: float) -> None:
        for parameter in (*self._policy_parameters, *self._critic_parameters):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def sum_gradients(self, add: Callable[[Tensor], None], *, only_critic: bool = False) -> None:
        """Adds the gradients that other processes have accumulated; one that no process has stays absent.

        Args:
            add: Replaces a flat tensor by its sum over all processes, which call it with equal sizes.
            only_critic: Those of the policy are added already.
        """
        policy = [] if only_critic else self._policy_parameters
        for bucket in _make_buckets((*policy, *self._critic_parameters)):
            parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in bucket]
            present = torch.tensor([float(p.grad is not None) for p in bucket], device=parts[0].device)
            flat = torch.cat([present.to(parts[0].dtype), *parts])
            add(flat)
            present, *sums = flat.split([len(bucket), *map(len, parts)])
            for parameter, count, total in zip(bucket, present.tolist(), sums, strict=True):
                parameter.grad = total.view_as(parameter).clone() if count else None

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.masters.clear_gradients()

    def optimizer_step(self, progress: float) -> dict[str, float] | None:
        """Makes one optimizer step with the accumulated gradients.

        Returns:
            `grad_norm` before clipping and `lr`; None if a gradient is not finite and the step was skipped.
        """
        norm = self._clip_gradients(self._settings.max_grad_norm)
        if norm is None:
            return None
        factor = learning_rate_factor(self._schedule, self.num_steps, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self._step()
        return {"grad_norm": norm, "lr": self._settings.peak * factor}

    def apply(self, settings: AdamSettings) -> dict[str, float] | None:
        """Makes a step of AdamW with its own settings and clears the gradients; returns what `optimizer_step` does."""
        if self._settings.name != "adamw":
            raise EngineError(f"apply: the optimizer is {self._settings.name}, expected adamw")
        try:
            norm = self._clip_gradients(settings.max_grad_norm)
            if norm is None:
                return None
            for group in self.optimizer.param_groups:
                group["lr"], group["betas"], group["eps"] = settings.learning_rate, settings.betas, settings.eps
                group["weight_decay"] = settings.weight_decay
            self._step()
            return {"grad_norm": norm, "lr": settings.learning_rate}
        finally:
            self.clear_gradients()

    def _clip_gradients(self, limit: float | None) -> float | None:
        """Returns the norm of the policy's gradients before clipping; None if a gradient is not finite."""
        most = math.inf if limit is None else limit
        norm = self.measure_norm(self._policy_parameters)
        torch.nn.utils.clip_grads_with_norm_(self._policy_parameters, most, norm)
        critic_norm = torch.nn.utils.clip_grad_norm_(self._critic_parameters, most)
        if not torch.isfinite(norm) or not torch.isfinite(critic_norm):
            log_skipped_step("the gradient is")
            return None
        return norm.item()

    def measure_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def _step(self) -> None:
        self.optimizer.step()
        self.masters.store()
        self.num_steps += 1
        crash_point("step.after_optim")

    def describe_broken_tensors(self) -> str:
        """Returns which parameters and moments are not finite, in words; empty if all are."""
        tensors = {**self.parameters, **self.state()}
        # summing takes a third of the time of testing every number, but finite numbers may overflow a sum: hence both
        suspects = {name: value for name, value in tensors.items() if not torch.isfinite(value.sum())}
        broken = [name for name, value in suspects.items() if not torch.isfinite(value).all()]
        return f"{len(broken)} of {len(tensors)} tensors are not finite, including {broken[0]}" if broken else ""

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that a resume needs besides the weights: optimizer state and float32 copies, by name."""
        return get_optimizer_state(self.optimizer, self.masters.optimized) | self.masters.state()

    def restore(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Restores the tensors that `state` returned; the weights must have been loaded before."""
        self.reset()
        self.num_steps = num_steps
        self.masters.restore(state)
        restore_optimizer_state(self.optimizer, self._settings, self.masters.optimized, state)


def _make_buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns the parameters in order, in parts of one dtype and at most `BUCKET_NUMBERS` numbers where possible."""
    buckets: list[list[Tensor]] = []
    size = 0
    for parameter in parameters:
        size += parameter.numel()
        if not buckets or size > BUCKET_NUMBERS or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = parameter.numel()
        buckets[-1].append(parameter)
    return buckets


def log_skipped_step(what: str) -> None:
    logger.warning("optimizer step skipped: %s not finite", what)


def learning_rate_factor(schedule: ScheduleConfig, num_steps: int, progress: float) -> float:
    """Returns the factor on the peak learning rate.

    Warm-up: (steps made + 1) / warmup_steps, at most 1. Then, with f = final_fraction and p the progress:
    constant 1; linear 1 - (1 - f) p; cosine f + (1 - f) (1 + cos(pi p)) / 2.

    Example: warmup_steps 10, linear, f = 0.1: 0.1 at the first step; 0.55 in the middle of the run.
    """
    warm_up = min(1.0, (num_steps + 1) / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    final = schedule.final_fraction
    shapes = {
        "constant": 1.0,
        "linear": 1 - (1 - final) * progress,
        "cosine": final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2,
    }
    return warm_up * shapes[schedule.name]
