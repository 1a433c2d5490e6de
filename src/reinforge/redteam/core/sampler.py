"""Conversations as trees: at every point the tester samples several probes, and the target answers each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.system import System
from reinforge.types.seeding import stable_seed


def derive_seed(seed: int, *names: str | int) -> int:
    return stable_seed(seed, *names) % 2**32


@dataclass
class Node(Generic[StateT, ActionT]):
    """One probe, the response to it, and the turns that follow."""

    context: StateT  # the conversation before the probe
    probe: ActionT
    response: StateT
    reward: float  # the tester's reward for this turn
    children: Sequence[Node[StateT, ActionT]] = field(default_factory=list)  # the alternative next turns


@dataclass
class Graph(Generic[StateT, ActionT]):
    """One rollout.

    Example: width 2, depth 2 is `Graph("Hi.", [node, node])`, each node with two children: 6 nodes, 3 groups of
    siblings, 4 paths.
    """

    context: StateT  # the opening of the conversation
    children: Sequence[Node[StateT, ActionT]]

    def sibling_groups(self) -> Iterator[Sequence[Node[StateT, ActionT]]]:
        """Yields the nodes of each branching point, level by level from the opening."""
        waiting = [self.children]
        while waiting:
            group = waiting.pop(0)
            if group:
                yield group
                waiting += [node.children for node in group]

    def nodes(self) -> Iterator[Node[StateT, ActionT]]:
        for group in self.sibling_groups():
            yield from group

    def paths(self) -> Iterator[list[Node[StateT, ActionT]]]:
        waiting = [[node] for node in self.children]
        while waiting:
            path = waiting.pop(0)
            if path[-1].children:
                waiting += [[*path, node] for node in path[-1].children]
            else:
                yield path


class Sampler(ABC, Generic[StateT, ActionT]):
    """Samples trees with a system.

    Example:
        class OneTurn(Sampler):
            def rollout(self, seed=None):
                context = f"question {seed}"
                probe, = self.system.rollout_prompt_with_tester([context])
                response, = self.system.rollout_prompt_with_target([context + probe])
                reward, = self.system.reward([context], [probe], [response])
                return Graph(context, [Node(context, probe, response, reward)])
    """

    def __init__(self, system: System[StateT, ActionT]):
        self.system = system

    @abstractmethod
    def rollout(self, seed: int | None = None) -> Graph[StateT, ActionT]:
        """Returns one tree to train on.

        Args:
            seed: From 0 to 2**32 - 1. The same seed and weights give the same tree; 0 is a seed like any other. None: a
                different tree each time.
        """

    def rollouts(self, seeds: Sequence[int]) -> list[Graph[StateT, ActionT]]:
        """Returns one tree per seed, sampled one after the other unless a subclass samples them together."""
        return [self.rollout(seed) for seed in seeds]

    def eval_rollout(self, seed: Any = None) -> Graph[StateT, ActionT]:
        """Returns one tree for evaluation; the same as in training unless a subclass overrides it."""
        return self.rollout(seed)

    def eval_rollouts(self, seeds: Sequence[Any]) -> list[Graph[StateT, ActionT]]:
        return [self.eval_rollout(seed) for seed in seeds]
