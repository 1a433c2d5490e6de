"""Proximal policy optimization on trees (PPO, arXiv:1707.06347, with GAE, arXiv:1506.02438).

A time step is one token of a probe. A node's reward falls on its last token:

    A_t = delta_t + gamma lambda A_{t+1},  delta_t = r_t + gamma V_{t+1} - V_t,  return_t = A_t + V_t

After a node's last token, A_{t+1} and V_{t+1} are the means over the first tokens of its children, or 0 at a leaf. So
each probe is trained once, however many branches pass through it. Log-probs and values are taken when the tree has
just been sampled.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from reinforge.algorithms.policy_gradient import normalize_over_batch
from reinforge.algorithms.ppo import compute_gae
from reinforge.engine.losses.base import find_loss
from reinforge.engine.training.reply_logprobs import compute_mean_loss, make_reply_batch
from reinforge.errors import ConfigError, Problem
from reinforge.redteam.algorithms.steps import find_begin, find_trainable, get_penalty_baseline, pad_rows, unpad_row
from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.sampler import Graph
from reinforge.redteam.core.system import System, ValueFunctionSystem, check_logprobs, check_values
from reinforge.types.sample import LossSpec

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass
class TokenCredit:
    """What was recorded for each token of a probe when it was sampled."""

    logprobs: list[float]
    values: list[float]  # the critic's value before each token
    advantages: list[float]
    returns: list[float]  # the targets of the critic
    begin: int = 0  # the column at which the log-probs began then; not 0 if the system returns rows with the context


@dataclass
class PPOStep(Generic[StateT, ActionT]):
    """One probe after the conversation so far, with its own reward."""

    prefix: StateT
    suffix: ActionT
    reward: float
    credit: TokenCredit | None = None
    """None: the probe is treated as a one-turn conversation that the current policy sampled."""


@dataclass
class PPOBatch(Generic[StateT, ActionT]):
    prefix: Sequence[StateT]
    suffix: Sequence[ActionT]
    reward: Sequence[float]
    credit: Sequence[TokenCredit | None] = ()


class PPO(Algorithm[StateT, ActionT, PPOStep[StateT, ActionT], PPOBatch[StateT, ActionT]]):
    """Clipped policy gradient with a critic. It needs no siblings, so a tree may be a single chain.

    loss_t = -min(r_t A_t, clip(r_t, 1 +- clip_range) A_t) + vf_loss_coef (V_t - return_t)^2 / 2

    Args:
        clip_range: The ratio to the sampling policy is clipped to 1 +- clip_range.
        vf_loss_coef: Weight of the critic's loss.
        gamma: Discount per token.
        gae_lambda: 1: advantages from the rewards that followed; 0: from the critic's next value only.
        normalize_advantages: Scale advantages to mean 0 and std 1 over the tokens of a batch.
        kl_coef: Weight of the KL penalty against the baseline; 0: the baseline is not called.
    """

    system: ValueFunctionSystem[StateT, ActionT]

    def __init__(
        self,
        system: System[StateT, ActionT],
        clip_range: float = 0.1,
        vf_loss_coef: float = 1.0,
        *,
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
        normalize_advantages: bool = True,
        kl_coef: float = 0.0,
    ):
        if not hasattr(system, "value"):
            message = f"PPO needs a critic, but {type(system).__name__} has no value function"
            raise ConfigError(Problem("system", message, "subclass ValueFunctionSystem, or use DPO or GRPO"))
        super().__init__(system)
        self.clip_range, self.vf_loss_coef = clip_range, vf_loss_coef
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.normalize_advantages, self.kl_coef = normalize_advantages, kl_coef
        self._has_warned = False

    def flatten(self, graph: Graph[StateT, ActionT]) -> list[PPOStep[StateT, ActionT]]:
        """Returns every probe of the tree that has tokens, with its credit."""
        import torch

        nodes = list(graph.nodes())
        if not nodes:
            return []
        context, probes = [node.context for node in nodes], [node.probe for node in nodes]
        logprobs = check_logprobs(self.system.get_sampling_logprobs(context, probes), len(nodes), "sampling").detach()
        with torch.no_grad():
            values = check_values(self.system.value(context, probes), logprobs)
        mask = self.system.token_mask(context, probes, logprobs)
        self._check_first_values(values, mask)
        credit: dict[int, TokenCredit] = {}  # keyed by id(): nodes are not hashable, and two may be equal
        for i in reversed(range(len(nodes))):  # level by level, so a node's children come first
            recorded = unpad_row(logprobs, mask, i), unpad_row(values, mask, i)
            after = [credit[id(child)] for child in nodes[i].children]
            credit[id(nodes[i])] = self._compute_credit(nodes[i].reward, *recorded, after, find_begin(mask, i))
        return [
            PPOStep(node.context, node.probe, node.reward, credit[id(node)])
            for node in find_trainable(nodes)
            if credit[id(node)].logprobs
        ]

    def _check_first_values(self, values: Tensor, mask: Tensor) -> None:
        """Warns once if values seem to be one column late, as in astra-rl's example: each probe's first one is 0."""
        firsts = [unpad_row(values, mask, i)[:1] for i in range(len(mask))]
        begins = [find_begin(mask, i) for i in range(len(mask))]
        if self._has_warned or not values.any() or not all(begins) or any(first != [0.0] for first in firsts):
            return
        self._has_warned = True
        logger.warning(
            "value() is exactly 0 for the first token of all %d probes, so these tokens have no baseline: the value of "
            "a token belongs in the column of its log-prob, one before the token's own position",
            len(mask),
        )

    def _compute_credit(
        self,
        reward: float,
        logprobs: list[float],
        values: list[float],
        after: Sequence[TokenCredit] = (),
        begin: int = 0,
    ) -> TokenCredit:
        rewards_T, values_T = np.zeros(len(values), np.float32), np.asarray(values, np.float32)
        rewards_T[-1:] = reward
        following = [(c.advantages[0], c.values[0]) for c in after if c.values]
        advantage, value = np.mean(following, axis=0) if following else (0.0, 0.0)
        advantages_T = compute_gae(
            rewards_T, values_T, self.gamma, self.gae_lambda, after=(float(advantage), float(value))
        )
        return TokenCredit(logprobs, values, advantages_T.tolist(), (advantages_T + values_T).tolist(), begin)

    @staticmethod
    def collate_fn(x: Sequence[PPOStep[Any, Any]]) -> PPOBatch[Any, Any]:
        return PPOBatch([i.prefix for i in x], [i.suffix for i in x], [i.reward for i in x], [i.credit for i in x])

    def step(self, batch: PPOBatch[StateT, ActionT]) -> tuple[Tensor, dict[Any, Any]]:
        """Returns the mean loss over the probes' tokens, and metrics: ratio, clip fraction, error, astra-rl's.

        `ref/logprobs` is None if kl_coef is 0, because the baseline is not called then.
        """
        count = len(batch.prefix)
        logprobs, values = self.system.logprobs_and_values(batch.prefix, batch.suffix)
        logprobs = check_logprobs(logprobs, count, "tester")
        values = check_values(values, logprobs)
        mask = self.system.token_mask(batch.prefix, batch.suffix, logprobs)
        credits = self._fill_credits(batch, logprobs.detach(), values.detach(), mask)
        advantages = [np.asarray(credit.advantages, np.float32) for credit in credits]
        if self.normalize_advantages:
            advantages = normalize_over_batch(advantages)
        baseline = get_penalty_baseline(self.system, self.kl_coef, batch.prefix, batch.suffix, logprobs)
        begins = [credit.begin for credit in credits]

        def place(recorded: Sequence[Sequence[float]]) -> Tensor:
            return pad_rows(recorded, begins, mask, logprobs)

        rows = make_reply_batch(
            mask,
            old_logprobs=place([credit.logprobs for credit in credits]),
            ref_logprobs=baseline,
            advantages=place([row.tolist() for row in advantages]),
            returns=place([credit.returns for credit in credits]),
            old_values=place([credit.values for credit in credits]),
            values=values,
        )
        output = find_loss(LossSpec("ppo"))(
            rows,
            logprobs,
            clip_low=self.clip_range,
            clip_high=self.clip_range,
            value_coef=self.vf_loss_coef,
            kl_coef=self.kl_coef,
        )
        loss, metrics = compute_mean_loss(output, rows)
        named = {  # astra-rl's names; `value_error` is the mean of the critic's squared error
            "training/loss": loss.item(),
            "training/policy_loss": loss.item() - self.vf_loss_coef * metrics["value_error"] / 2,
            "training/value_loss": metrics["value_error"],
            "reward/mean_reward": statistics.fmean(batch.reward),
            "reward/std_reward": statistics.stdev(batch.reward) if count > 1 else None,
            "policy/logprobs": _compute_token_mean(logprobs, mask),
            "ref/logprobs": _compute_token_mean(baseline, mask),
        }
        return loss, {"loss": loss.item(), **metrics, **named}

    def _fill_credits(
        self, batch: PPOBatch[StateT, ActionT], logprobs: Tensor, values: Tensor, mask: Tensor
    ) -> list[TokenCredit]:
        given = batch.credit or [None] * len(batch.prefix)
        return [
            credit or self._compute_credit(batch.reward[i], unpad_row(logprobs, mask, i), unpad_row(values, mask, i))
            for i, credit in enumerate(given)
        ]


def _compute_token_mean(logprobs_BT: Tensor | None, mask_BT: Tensor) -> float | None:
    if logprobs_BT is None or not mask_BT.any():
        return None
    return logprobs_BT[mask_BT].mean().item()
