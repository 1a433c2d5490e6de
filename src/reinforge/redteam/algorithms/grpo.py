"""Group-relative advantages among siblings (GRPO, arXiv:2402.03300; no division by the std: arXiv:2503.20783).

A probe's return is its own reward plus the discounted mean return of its children; its advantage is that return minus
the mean return of its siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any, Generic

from reinforge.algorithms.curriculum import ZERO_VARIANCE
from reinforge.algorithms.policy_gradient import group_relative_advantage
from reinforge.engine.losses.base import find_loss
from reinforge.engine.training.reply_logprobs import compute_mean_loss, make_reply_batch
from reinforge.redteam.algorithms.steps import (
    find_begin,
    find_trainable,
    get_penalty_baseline,
    pad_rows,
    refuse_single_children,
    unpad_row,
)
from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.sampler import Graph, Node
from reinforge.redteam.core.system import System, check_logprobs
from reinforge.types.sample import LossSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class GRPOStep(Generic[StateT, ActionT]):
    """One probe after the conversation so far."""

    prefix: StateT
    suffix: ActionT
    advantage: float  # its return minus the mean return of its siblings
    logprobs: list[float]  # log p of each of its tokens when it was sampled
    begin: int = 0  # the column at which the log-probs began then; not 0 if the system returns rows with the context


@dataclass
class GRPOBatch(Generic[StateT, ActionT]):
    prefix: Sequence[StateT]
    suffix: Sequence[ActionT]
    advantage: Sequence[float]
    logprobs: Sequence[list[float]]
    begin: Sequence[int] = ()


class GRPO(Algorithm[StateT, ActionT, GRPOStep[StateT, ActionT], GRPOBatch[StateT, ActionT]]):
    """Clipped policy gradient with group-relative advantages; groups whose returns are all equal are skipped.

    Args:
        clip_range: The ratio to the sampling policy is clipped to 1 +- clip_range.
        kl_coef: Weight of the KL penalty against the baseline; 0: the baseline is not called.
        gamma: Discount of the next turn, in [0, 1]; 0: a probe's return is its own reward.
    """

    needs_siblings = True

    def __init__(
        self, system: System[StateT, ActionT], clip_range: float = 0.2, kl_coef: float = 0.0, gamma: float = 1.0
    ):
        super().__init__(system)
        self.clip_range, self.kl_coef, self.gamma = clip_range, kl_coef, gamma

    def flatten(self, graph: Graph[StateT, ActionT]) -> list[GRPOStep[StateT, ActionT]]:
        refuse_single_children(graph, "GRPO")
        chosen: list[tuple[Node[StateT, ActionT], float]] = []
        for group in map(find_trainable, graph.sibling_groups()):
            returns = [self._compute_return(node) for node in group]
            if returns and max(returns) - min(returns) > ZERO_VARIANCE:
                chosen += [
                    (node, group_relative_advantage(value, returns)) for node, value in zip(group, returns, strict=True)
                ]
        if not chosen:
            return []
        context, probes = [node.context for node, _ in chosen], [node.probe for node, _ in chosen]
        logprobs = check_logprobs(self.system.get_sampling_logprobs(context, probes), len(chosen), "sampling").detach()
        mask = self.system.token_mask(context, probes, logprobs)
        return [
            GRPOStep(node.context, node.probe, advantage, unpad_row(logprobs, mask, i), find_begin(mask, i))
            for i, (node, advantage) in enumerate(chosen)
        ]

    def _compute_return(self, node: Node[StateT, ActionT]) -> float:
        later = fmean(map(self._compute_return, node.children)) if node.children and self.gamma else 0.0
        return node.reward + self.gamma * later

    @staticmethod
    def collate_fn(x: Sequence[GRPOStep[Any, Any]]) -> GRPOBatch[Any, Any]:
        return GRPOBatch(*([getattr(step, column.name) for step in x] for column in fields(GRPOBatch)))

    def step(self, batch: GRPOBatch[StateT, ActionT]) -> tuple[Tensor, dict[Any, Any]]:
        """Returns the mean loss over the probes' tokens, and metrics: ratio, clip fraction and KL."""
        count = len(batch.prefix)
        logprobs = self.system._get_tester_logprobs_and_validate(batch.prefix, batch.suffix)
        mask = self.system.token_mask(batch.prefix, batch.suffix, logprobs)
        rows = make_reply_batch(
            mask,
            old_logprobs=pad_rows(batch.logprobs, batch.begin or [0] * count, mask, logprobs),
            ref_logprobs=get_penalty_baseline(self.system, self.kl_coef, batch.prefix, batch.suffix, logprobs),
            advantages=mask * logprobs.new_tensor(list(batch.advantage))[:, None],
        )
        clip = {"clip_low": self.clip_range, "clip_high": self.clip_range}
        output = find_loss(LossSpec("clipped_pg"))(rows, logprobs, **clip, kl_coef=self.kl_coef)
        loss, metrics = compute_mean_loss(output, rows)
        return loss, {"loss": loss.item(), **metrics}
