"""Preferences between siblings: DPO (arXiv:2305.18290) and IPO (arXiv:2310.12036).

At every branching point of a tree, the probe with the highest reward is preferred to the one with the lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from reinforge.algorithms.preference import make_pairs
from reinforge.engine.losses.base import find_loss
from reinforge.engine.training.reply_logprobs import compute_mean_loss, make_reply_batch
from reinforge.redteam.algorithms.steps import find_trainable, refuse_single_children
from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.sampler import Graph
from reinforge.redteam.core.system import System, check_same_tokens
from reinforge.types.sample import LossSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class DPOStep(Generic[StateT, ActionT]):
    """One preference pair: the conversation so far, the preferred probe and the rejected one."""

    prefix: StateT
    suffix_pos: ActionT
    suffix_neg: ActionT


@dataclass
class DPOBatch(Generic[StateT, ActionT]):
    prefixes: Sequence[StateT]
    suffix_pos: Sequence[ActionT]
    suffix_neg: Sequence[ActionT]


class DPO(Algorithm[StateT, ActionT, DPOStep[StateT, ActionT], DPOBatch[StateT, ActionT]]):
    """loss = -log sigma(beta (log p/p_baseline of the preferred probe - that of the rejected one)), mean over pairs.

    Args:
        beta: How strongly the tester is kept close to the baseline; 0.01 to 0.5 is usual.
        min_margin: Smallest reward difference within a pair. Set it above what the perplexity term alone can produce,
            so that only failures of the target make pairs.
    """

    loss: ClassVar[str] = "dpo"
    needs_siblings = True

    def __init__(self, system: System[StateT, ActionT], beta: float = 0.1, *, min_margin: float = 0.0):
        super().__init__(system)
        self.beta, self.min_margin = beta, min_margin

    def flatten(self, graph: Graph[StateT, ActionT]) -> list[DPOStep[StateT, ActionT]]:
        """Returns one pair for each group of siblings whose rewards and texts differ.

        Example: siblings a, b, c of rewards 0, 1, 0.5 -> (b, a).
        """
        refuse_single_children(graph, type(self).__name__)
        steps = []
        for group in map(find_trainable, graph.sibling_groups()):
            for best, worst in make_pairs([node.reward for node in group], min_margin=self.min_margin):
                preferred, other = group[best], group[worst]
                if preferred.probe != other.probe:
                    steps.append(DPOStep(preferred.context, preferred.probe, other.probe))
        return steps

    @staticmethod
    def collate_fn(x: Sequence[DPOStep[Any, Any]]) -> DPOBatch[Any, Any]:
        return DPOBatch([i.prefix for i in x], [i.suffix_pos for i in x], [i.suffix_neg for i in x])

    def step(self, batch: DPOBatch[StateT, ActionT]) -> tuple[Tensor, dict[Any, Any]]:
        """Returns the mean loss over the pairs, and metrics: margin, accuracy, log-ratios, and those of astra-rl."""
        count = len(batch.prefixes)
        context, probes = [*batch.prefixes, *batch.prefixes], [*batch.suffix_pos, *batch.suffix_neg]
        logprobs = self.system._get_tester_logprobs_and_validate(context, probes)
        baseline = check_same_tokens(self.system._get_baseline_logprobs_and_validate(context, probes), logprobs)
        mask = self.system.token_mask(context, probes, logprobs)
        rows = make_reply_batch(mask, ref_logprobs=baseline, pairs=[(i, count + i) for i in range(count)])
        loss, metrics = compute_mean_loss(find_loss(LossSpec(self.loss))(rows, logprobs, beta=self.beta), rows)
        named = build_preference_metrics(loss, self.beta, logprobs * mask, baseline * mask)
        return loss, {"loss": loss.item(), **metrics, **named}


class IPO(DPO[StateT, ActionT]):
    """loss = (log p/p_baseline of the preferred probe - that of the rejected one - 1/(2 beta))^2, mean over pairs.

    So the margin is pulled toward 1 / (2 beta) nats.
    """

    loss = "ipo"


def build_preference_metrics(loss: Tensor, beta: float, logprobs_BT: Tensor, baseline_BT: Tensor) -> dict[str, float]:
    """Returns metrics under astra-rl's names, means over the pairs.

    The implicit reward of a probe is beta (log p - log p_baseline), summed over its tokens.
    Shapes: P pairs, B = 2P probes, the preferred ones first, T tokens.

    Args:
        logprobs_BT: The tester's log-probs, 0 where there is no token.
    """
    chosen_P, rejected_P = logprobs_BT.detach().sum(dim=1).chunk(2)
    ref_chosen_P, ref_rejected_P = baseline_BT.sum(dim=1).chunk(2)
    reward_P, other_P = beta * (chosen_P - ref_chosen_P), beta * (rejected_P - ref_rejected_P)
    named = {
        "training/loss": loss,
        "reward/chosen_rewards": reward_P,
        "reward/rejected_rewards": other_P,
        "reward/reward_accuracies": (reward_P > other_P).float(),
        "reward/reward_margin": reward_P - other_P,
        "policy/logprobs_chosen": chosen_P,
        "policy/logprobs_rejected": rejected_P,
        "ref/logprobs_chosen": ref_chosen_P,
        "ref/logprobs_rejected": ref_rejected_P,
    }
    return {name: value.mean().item() for name, value in named.items()}
