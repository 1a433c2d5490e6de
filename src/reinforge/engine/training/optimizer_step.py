"""Moves parameters by their gradients: groups, clipping, schedule, float32 copies.

Whoever makes the gradients calls `take_gradients` after each backward pass, `move` at the end of a step, and
`clear_gradients` behind it. A gradient that is not finite moves nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from reinforge.config.schema import CriticConfig, OptimizerConfig, ScheduleConfig
from reinforge.crash import crash_point
from reinforge.engine.model.value_head import PREFIX
from reinforge.engine.training.optimizers import MasterWeights, make_optimizer, restore_state, state_of

logger = logging.getLogger(__name__)


class Mover:
    """Owns the optimizer of some parameters.

    Args:
        parameters: What is moved, by name; the critic's begin with `value_head.`.
        settings: The optimizer.
        schedule: How its rate changes.
        critic: The rate of the critic's parameters, where there are any.

    Attributes:
        parameters: What is trained, by name, the critic's too.
        masters: Float32 copies of those that have fewer bits, which the optimizer moves in their place.
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
        """Takes other settings and starts anew with them."""
        self._settings, self._schedule, self._critic = settings, schedule, critic
        self.reset()

    def reset(self) -> None:
        """Forgets the optimizer's moments and steps, and takes the weights as they are."""
        settings, self.num_steps = self._settings, 0
        self.masters = MasterWeights(self.parameters)
        moved = self.masters.moved
        self._of_policy = [p for name, p in moved.items() if not name.startswith(PREFIX)]
        self._of_critic = [p for name, p in moved.items() if name.startswith(PREFIX)]
        matrices = [p for p in self._of_policy if p.ndim >= 2]
        others = [p for p in self._of_policy if p.ndim < 2]
        peak = settings.learning_rate
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay, "peak": peak},
            {"params": others, "weight_decay": 0.0, "peak": peak},
        ]
        if self._of_critic:
            groups.append({"params": self._of_critic, "weight_decay": 0.0, "peak": self._critic.learning_rate})
        self.optimizer = make_optimizer(settings, groups)

    def take_gradients(self) -> None:
        """Takes over what a backward pass has left at the parameters."""
        self.masters.take_gradients()

    def scale_gradients(self, factor: float) -> None:
        """Multiplies what the backward passes have left so far."""
        for parameter in (*self._of_policy, *self._of_critic):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def clear_gradients(self) -> None:
        """Forgets every gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        self.masters.clear_gradients()

    def move(self, progress: float) -> dict[str, float] | None:
        """Makes one optimizer step by the gradients as they are.

        Args:
            progress: Share of the run that is done; it moves the learning rate.

        Returns:
            `grad_norm` before clipping and `lr`; None: a gradient is not finite, and nothing was moved.
        """
        limit = self._settings.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self._of_policy, limit)
        of_critic = torch.nn.utils.clip_grad_norm_(self._of_critic, limit)
        if not torch.isfinite(norm) or not torch.isfinite(of_critic):
            refused("the gradient is")
            return None
        factor = rate_factor(self._schedule, self.num_steps, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.step()
        self.masters.store()
        self.num_steps += 1
        crash_point("step.after_optim")
        return {"grad_norm": norm.item(), "lr": self._settings.learning_rate * factor}

    def state(self) -> dict[str, Tensor]:
        """Returns what a restart needs beside the weights: `exp_avg.NAME` and the like, and float32 copies."""
        return state_of(self.optimizer, self.masters.moved) | self.masters.state()

    def restore(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Puts the optimizer's tensors back as `state` returned them; the weights have to stand there already."""
        self.reset()
        self.num_steps = num_steps
        self.masters.restore(state)
        restore_state(self.optimizer, self._settings, self.masters.moved, state)


def refused(what: str) -> None:
    """Says why an optimizer step is refused."""
    logger.warning("an optimizer step is refused: %s not finite", what)


def rate_factor(schedule: ScheduleConfig, num_steps: int, progress: float) -> float:
    """Returns what the peak learning rate is multiplied by.

    Warm-up: (steps made + 1) / warmup_steps, at most 1. After it, with f = final_fraction and p the progress:
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
