"""Credit by comparison with siblings (GRPO, arXiv:2402.03300, without the deviation: arXiv:2503.20783).

A probe is worth its own reward and, discounted, the mean worth of what was said after it; its advantage is that less
the mean of its siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Generic

from reinforge.algorithms.advantages import relative_to
from reinforge.algorithms.curriculum import ZERO_VARIANCE
from reinforge.engine.losses.base import find_loss
from reinforge.engine.training.reply_logprobs import batch_of_replies, mean_loss
from reinforge.redteam.algorithms.rows import as_rows, read_row
from reinforge.redteam.algorithms.siblings import refuse_single_children
from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.sampler import Graph, Node
from reinforge.redteam.core.system import System, checked_logprobs
from reinforge.types.sample import LossSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class GRPOStep(Generic[StateT, ActionT]):
    """One probe.

    Attributes:
        prefix: The conversation.
        suffix: The probe.
        advantage: How much better it was than its siblings.
        logprobs: log p of each of its tokens when it was drawn.
    """

    prefix: StateT
    suffix: ActionT
    advantage: float
    logprobs: list[float]


@dataclass
class GRPOBatch(Generic[StateT, ActionT]):
    """Probes together, as columns of `GRPOStep`."""

    prefix: Sequence[StateT]
    suffix: Sequence[ActionT]
    advantage: Sequence[float]
    logprobs: Sequence[list[float]]


class GRPO(Algorithm[StateT, ActionT, GRPOStep[StateT, ActionT], GRPOBatch[StateT, ActionT]]):
    """The clipped policy gradient with advantages among siblings; groups of equal worth teach nothing.

    Example:
        Trainer(TrainingConfiguration(lr=1e-4), sampler, GRPO(problem, kl_coef=0.01)).train()

    Args:
        system: The models.
        clip_range: The ratio to the sampling policy counts within 1 +- clip_range.
        kl_coef: Weight of the penalty for leaving the baseline; 0 asks no baseline.
        gamma: What the next turn is worth now, in [0, 1]; 0: every probe for itself.
    """

    needs_siblings = True

    def __init__(
        self, system: System[StateT, ActionT], clip_range: float = 0.2, kl_coef: float = 0.0, gamma: float = 1.0
    ):
        super().__init__(system)
        self.clip_range, self.kl_coef, self.gamma = clip_range, kl_coef, gamma

    def flatten(self, graph: Graph[StateT, ActionT]) -> list[GRPOStep[StateT, ActionT]]:
        """Returns every probe whose siblings have another worth.

        Raises:
            ConfigError: The tree has no siblings.
        """
        refuse_single_children(graph, "GRPO")
        chosen: list[tuple[Node[StateT, ActionT], float]] = []
        for group in graph.sibling_groups():
            worth = [self._worth(node) for node in group]
            if max(worth) - min(worth) > ZERO_VARIANCE:
                chosen += [(node, relative_to(value, worth)) for node, value in zip(group, worth, strict=True)]
        if not chosen:
            return []
        context, said = [node.context for node, _ in chosen], [node.probe for node, _ in chosen]
        drawn = checked_logprobs(self.system.get_sampling_logprobs(context, said), len(chosen), "sampling").detach()
        mask = self.system.token_mask(context, said, drawn)
        return [
            GRPOStep(node.context, node.probe, advantage, read_row(drawn, mask, i))
            for i, (node, advantage) in enumerate(chosen)
        ]

    def _worth(self, node: Node[StateT, ActionT]) -> float:
        later = fmean(map(self._worth, node.children)) if node.children and self.gamma else 0.0
        return node.reward + self.gamma * later

    @staticmethod
    def collate_fn(x: Sequence[GRPOStep[Any, Any]]) -> GRPOBatch[Any, Any]:
        """Returns the probes as columns."""
        return GRPOBatch(
            [i.prefix for i in x], [i.suffix for i in x], [i.advantage for i in x], [i.logprobs for i in x]
        )

    def step(self, batch: GRPOBatch[StateT, ActionT]) -> tuple[Tensor, dict[Any, Any]]:
        """Returns the mean loss over the probes' tokens, and ratio, share clipped and divergence."""
        count = len(batch.prefix)
        logprobs = checked_logprobs(self.system.get_tester_logprobs(batch.prefix, batch.suffix), count, "tester")
        mask = self.system.token_mask(batch.prefix, batch.suffix, logprobs)
        baseline = None
        if self.kl_coef:
            found = self.system.get_baseline_logprobs(batch.prefix, batch.suffix)
            baseline = checked_logprobs(found, count, "baseline").detach().to(logprobs.device)
        rows = batch_of_replies(
            mask,
            old_logprobs=as_rows(batch.logprobs, logprobs),
            ref_logprobs=baseline,
            advantages=mask * logprobs.new_tensor(list(batch.advantage))[:, None],
        )
        clip = {"clip_low": self.clip_range, "clip_high": self.clip_range}
        output = find_loss(LossSpec("clipped_pg"))(rows, logprobs, **clip, kl_coef=self.kl_coef)
        loss, metrics = mean_loss(output, rows)
        return loss, {"loss": loss.item(), **metrics}
