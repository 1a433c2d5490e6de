"""Proximal policy optimisation along the path (PPO, arXiv:1707.06347, with advantages of arXiv:1506.02438).

A time step is a token of a probe, a node's reward falls on its last one, and what comes after a node is the mean over
its children:

    A_t = delta_t + gamma lambda A_{t+1},  delta_t = r_t + gamma V_{t+1} - V_t,  return_t = A_t + V_t

with A_{t+1} and V_{t+1} behind a node's last token the means over its children's first ones, and 0 where there are
none. So each probe is trained once, also where many branches go through it. Log-probs and values are those of the time
when the tree was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from reinforge.algorithms.advantages import batch_normalised
from reinforge.algorithms.ppo import generalized_advantages
from reinforge.engine.losses.base import find_loss
from reinforge.engine.training.reply_logprobs import batch_of_replies, mean_loss
from reinforge.errors import ConfigError, Problem
from reinforge.redteam.algorithms.rows import as_rows, read_row
from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.sampler import Graph, Node
from reinforge.redteam.core.system import System, ValueFunctionSystem, checked_logprobs, checked_values
from reinforge.types.sample import LossSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class TokenCredit:
    """What is known of each token of a probe when it was drawn.

    Attributes:
        logprobs: log p under the policy that drew it.
        values: The critic's values before each.
        advantages: Credit.
        returns: What the values should have been.
    """

    logprobs: list[float]
    values: list[float]
    advantages: list[float]
    returns: list[float]


@dataclass
class PPOStep(Generic[StateT, ActionT]):
    """One probe.

    Attributes:
        prefix: The conversation.
        suffix: The probe.
        reward: Its own reward.
        credit: Of its tokens; None: it is taken for a conversation of one turn, drawn by the policy as it is.
    """

    prefix: StateT
    suffix: ActionT
    reward: float
    credit: TokenCredit | None = None


@dataclass
class PPOBatch(Generic[StateT, ActionT]):
    """Probes together, as columns of `PPOStep`."""

    prefix: Sequence[StateT]
    suffix: Sequence[ActionT]
    reward: Sequence[float]
    credit: Sequence[TokenCredit | None] = ()


class PPO(Algorithm[StateT, ActionT, PPOStep[StateT, ActionT], PPOBatch[StateT, ActionT]]):
    """Credit by a critic; needs no siblings, so that a tree may be a chain.

    l_t = -min(r_t A_t, clip(r_t, 1 +- clip_range) A_t) + vf_loss_coef (V_t - return_t)^2 / 2

    Example:
        chain = ASTSampler(problem, openings, tree_width=1)
        Trainer(TrainingConfiguration(lr=1e-4), chain, PPO(problem)).train()

    Args:
        system: The models, with a value function.
        clip_range: The ratio to the sampling policy counts within 1 +- clip_range.
        vf_loss_coef: Weight of the critic's error.
        gamma: Discount of each token.
        gae_lambda: 1: credit by what really came; 0: by the critic's next value.
        normalize_advantages: Mean 0 and deviation 1 over the tokens of a batch.
        kl_coef: Weight of the penalty for leaving the baseline; 0 asks no baseline.

    Raises:
        ConfigError: The system has no value function.
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
            message = f"PPO needs values, and {type(system).__name__} has no value function"
            raise ConfigError(Problem("system", message, "subclass ValueFunctionSystem, or use DPO or GRPO"))
        super().__init__(system)
        self.clip_range, self.vf_loss_coef = clip_range, vf_loss_coef
        self.gamma, self.gae_lambda = gamma, gae_lambda
        self.normalize_advantages, self.kl_coef = normalize_advantages, kl_coef

    def flatten(self, graph: Graph[StateT, ActionT]) -> list[PPOStep[StateT, ActionT]]:
        """Returns every probe of the tree, with its credit."""
        import torch

        nodes = list(graph.nodes())
        if not nodes:
            return []
        context, said = [node.context for node in nodes], [node.probe for node in nodes]
        drawn = checked_logprobs(self.system.get_sampling_logprobs(context, said), len(nodes), "sampling").detach()
        with torch.no_grad():
            values = checked_values(self.system.value(context, said), drawn)
        mask = self.system.token_mask(context, said, drawn)
        place = {id(node): i for i, node in enumerate(nodes)}
        credit: dict[int, TokenCredit] = {}  # by the node itself: nodes are no keys, and two may be equal

        def give(node: Node[StateT, ActionT]) -> TokenCredit:
            after = [give(child) for child in node.children]
            i = place[id(node)]
            found = self._credit(node.reward, read_row(drawn, mask, i), read_row(values, mask, i), after)
            return credit.setdefault(id(node), found)

        for child in graph.children:
            give(child)
        return [PPOStep(node.context, node.probe, node.reward, credit[id(node)]) for node in nodes]

    def _credit(
        self, reward: float, logprobs: list[float], values: list[float], after: Sequence[TokenCredit]
    ) -> TokenCredit:
        """Returns the credit of one probe's tokens, given that of the probes that follow it."""
        rewards_T, values_T = np.zeros(len(values), np.float32), np.asarray(values, np.float32)
        rewards_T[-1:] = reward
        following = [(c.advantages[0], c.values[0]) for c in after if c.values]
        advantage, value = np.mean(following, axis=0) if following else (0.0, 0.0)
        advantages_T = generalized_advantages(
            rewards_T, values_T, self.gamma, self.gae_lambda, after=(float(advantage), float(value))
        )
        return TokenCredit(logprobs, values, advantages_T.tolist(), (advantages_T + values_T).tolist())

    @staticmethod
    def collate_fn(x: Sequence[PPOStep[Any, Any]]) -> PPOBatch[Any, Any]:
        """Returns the probes as columns."""
        return PPOBatch([i.prefix for i in x], [i.suffix for i in x], [i.reward for i in x], [i.credit for i in x])

    def step(self, batch: PPOBatch[StateT, ActionT]) -> tuple[Tensor, dict[Any, Any]]:
        """Returns the mean loss over the probes' tokens, and ratio, share clipped and the critic's error."""
        count = len(batch.prefix)
        logprobs, values = self.system.logprobs_and_values(batch.prefix, batch.suffix)
        logprobs = checked_logprobs(logprobs, count, "tester")
        values = checked_values(values, logprobs)
        mask = self.system.token_mask(batch.prefix, batch.suffix, logprobs)
        credits = self._credits(batch, logprobs.detach(), values.detach(), mask)
        advantages = [np.asarray(credit.advantages, np.float32) for credit in credits]
        if self.normalize_advantages:
            advantages = batch_normalised(advantages)
        baseline = None
        if self.kl_coef:
            found = self.system.get_baseline_logprobs(batch.prefix, batch.suffix)
            baseline = checked_logprobs(found, count, "baseline").detach().to(logprobs.device)
        rows = batch_of_replies(
            mask,
            old_logprobs=as_rows([credit.logprobs for credit in credits], logprobs),
            ref_logprobs=baseline,
            advantages=as_rows([row.tolist() for row in advantages], logprobs),
            returns=as_rows([credit.returns for credit in credits], values),
            old_values=as_rows([credit.values for credit in credits], values),
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
        loss, metrics = mean_loss(output, rows)
        return loss, {"loss": loss.item(), **metrics}

    def _credits(
        self, batch: PPOBatch[StateT, ActionT], logprobs: Tensor, values: Tensor, mask: Tensor
    ) -> list[TokenCredit]:
        """Returns each probe's credit; one that brings none is a conversation of one turn, drawn by the policy now."""
        brought = batch.credit or [None] * len(batch.prefix)
        return [
            credit or self._credit(batch.reward[i], read_row(logprobs, mask, i), read_row(values, mask, i), ())
            for i, credit in enumerate(brought)
        ]
