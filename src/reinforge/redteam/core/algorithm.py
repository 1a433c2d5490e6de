"""The base class of algorithms: trees in, losses out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic

from reinforge.redteam.core.common import ActionT, Batch, StateT, Step
from reinforge.redteam.core.sampler import Graph
from reinforge.redteam.core.system import System

if TYPE_CHECKING:
    from torch import Tensor


class Algorithm(ABC, Generic[StateT, ActionT, Step, Batch]):
    """Turns trees into training steps, and batches of steps into a loss.

    Example:
        class Imitate(Algorithm):
            def flatten(self, graph):
                return [(node.context, node.probe) for node in graph.nodes() if node.reward > 0.5]

            @staticmethod
            def collate_fn(x):
                return tuple(zip(*x))

            def step(self, batch):
                logprobs = self.system.get_tester_logprobs(*batch)
                return -logprobs.sum(dim=1).mean(), {"rows": len(logprobs)}
    """

    needs_siblings: bool = False
    """True if the algorithm compares siblings, so that a tree of width 1 has no training signal."""

    def __init__(self, system: System[StateT, ActionT]):
        self.system = system

    @abstractmethod
    def flatten(self, graph: Graph[StateT, ActionT]) -> Sequence[Step]:
        """Returns the training steps of one tree; called before any optimizer step after the tree was sampled."""

    @staticmethod
    @abstractmethod
    def collate_fn(x: Sequence[Any]) -> Any:
        """Returns steps as one batch."""

    @abstractmethod
    def step(self, batch: Batch) -> tuple[Tensor, dict[Any, Any]]:
        """Returns the loss of a batch, one number with gradient, and metrics to log."""
