"""Preferences among siblings: DPO (arXiv:2305.18290) and IPO (arXiv:2310.12036).

At every point of a tree the probe of the highest reward is preferred to that of the lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from reinforge.algorithms.preference import make_pairs
from reinforge.engine.losses.base import find_loss
from reinforge.engine.training.reply_logprobs import batch_of_replies, mean_loss
from reinforge.redteam.algorithms.siblings import refuse_single_children
from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.sampler import Graph
from reinforge.redteam.core.system import System, checked_logprobs
from reinforge.types.sample import LossSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class DPOStep(Generic[StateT, ActionT]):
    """One preference.

    Attributes:
        prefix: The conversation.
        suffix_pos: The probe that is preferred.
        suffix_neg: The other one.
    """

    prefix: StateT
    suffix_pos: ActionT
    suffix_neg: ActionT


@dataclass
class DPOBatch(Generic[StateT, ActionT]):
    """Preferences together.

    Attributes:
        prefixes: The conversations.
        suffix_pos: The probes that are preferred.
        suffix_neg: The others.
    """

    prefixes: Sequence[StateT]
    suffix_pos: Sequence[ActionT]
    suffix_neg: Sequence[ActionT]


class DPO(Algorithm[StateT, ActionT, DPOStep[StateT, ActionT], DPOBatch[StateT, ActionT]]):
    """l = -log sigma(beta (log p / p_baseline of the preferred probe - that of the other)), the mean over pairs.

    Example:
        Trainer(TrainingConfiguration(), sampler, DPO(problem, beta=0.2)).train()

    Args:
        system: The models.
        beta: How strongly the baseline holds: 0.01 to 0.5 is usual.
        min_margin: Least difference of rewards within a pair; above what perplexity alone can make, failures teach.
    """

    loss: ClassVar[str] = "dpo"
    needs_siblings = True

    def __init__(self, system: System[StateT, ActionT], beta: float = 0.1, *, min_margin: float = 0.0):
        super().__init__(system)
        self.beta, self.min_margin = beta, min_margin

    def flatten(self, graph: Graph[StateT, ActionT]) -> list[DPOStep[StateT, ActionT]]:
        """Returns one pair of each group of siblings whose rewards and texts differ.

        Example: siblings a, b, c of rewards 0, 1, 0.5 -> (b, a).

        Raises:
            ConfigError: The tree has no siblings.
        """
        refuse_single_children(graph, type(self).__name__)
        steps = []
        for group in graph.sibling_groups():
            for best, worst in make_pairs([node.reward for node in group], min_margin=self.min_margin):
                preferred, other = group[best], group[worst]
                if preferred.probe != other.probe:
                    steps.append(DPOStep(preferred.context, preferred.probe, other.probe))
        return steps

    @staticmethod
    def collate_fn(x: Sequence[DPOStep[Any, Any]]) -> DPOBatch[Any, Any]:
        """Returns the pairs as columns."""
        return DPOBatch([i.prefix for i in x], [i.suffix_pos for i in x], [i.suffix_neg for i in x])

    def step(self, batch: DPOBatch[StateT, ActionT]) -> tuple[Tensor, dict[Any, Any]]:
        """Returns the mean loss of the pairs, and margin, accuracy and log-ratios."""
        count = len(batch.prefixes)
        context, said = [*batch.prefixes, *batch.prefixes], [*batch.suffix_pos, *batch.suffix_neg]
        logprobs = checked_logprobs(self.system.get_tester_logprobs(context, said), 2 * count, "tester")
        baseline = checked_logprobs(self.system.get_baseline_logprobs(context, said), 2 * count, "baseline")
        rows = batch_of_replies(
            self.system.token_mask(context, said, logprobs),
            ref_logprobs=baseline.detach().to(logprobs.device),
            pairs=[(i, count + i) for i in range(count)],
        )
        found, metrics = mean_loss(find_loss(LossSpec(self.loss))(rows, logprobs, beta=self.beta), rows)
        return found, {"loss": found.item(), **metrics}


class IPO(DPO[StateT, ActionT]):
    """l = (log p / p_baseline of the preferred probe - that of the other - 1 / (2 beta))^2: the margin has a target.

    Example:
        Trainer(TrainingConfiguration(), sampler, IPO(problem, beta=0.1)).train()

    Args:
        system: The models.
        beta: The margin's target is 1 / (2 beta) nats.
        min_margin: As for `DPO`.
    """

    loss = "ipo"
