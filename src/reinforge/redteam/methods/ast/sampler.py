"""Trees of conversations, sampled level by level: each level of all trees is one batch of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforge.errors import ConfigError
from reinforge.redteam.core.sampler import Graph, Node, Sampler, derive_seed
from reinforge.redteam.core.system import check_rewards
from reinforge.redteam.methods.ast.system import ASTSystem
from reinforge.redteam.methods.ast.texts import Conversation
from reinforge.types.seeding import stable_random, stable_seed


@dataclass
class ASTNode(Node[str, str]):
    """One probe of the tester and the target's response.

    Attributes:
        depth: The turn, from 0.
    """

    depth: int = 0


@dataclass(slots=True)
class _TreeBranch:
    """A conversation that is still growing."""

    context: str
    children: list[Node[str, str]]
    seed: int
    path: tuple[int, ...] = field(default_factory=tuple)


class ASTSampler(Sampler[str, str]):
    """Samples trees with `tree_width` probes at every point and `tree_depth` turns (arXiv:2407.09447).

    Example:
        sampler = ASTSampler(problem, ["It is a rainy Monday at the desk.", "It is a foggy Sunday."], tree_width=3)
        graph = sampler.rollout(seed=0)  # 3 + 9 + 27 nodes

    Args:
        system: The models.
        prompts: Openings; each rollout picks one of them by its seed.
        tree_width: Probes at every point.
        tree_depth: Turns of a conversation.
        eval_width: Probes at every point in `eval_rollout`; 1 gives a single conversation.
        seed: Seeds the rollouts that are called without a seed.

    Raises:
        ConfigError: There are no openings, one is empty, or a width or depth is below 1.
    """

    system: ASTSystem

    def __init__(
        self,
        system: ASTSystem,
        prompts: Sequence[str],
        tree_width: int = 2,
        tree_depth: int = 3,
        *,
        eval_width: int = 1,
        seed: int = 0,
    ):
        super().__init__(system)
        if isinstance(prompts, str) or not prompts or not all(prompts):
            raise ConfigError("ASTSampler: prompts must be a list of openings, none of them empty")
        if min(tree_width, tree_depth, eval_width) < 1:
            raise ConfigError(
                f"ASTSampler: found tree_width {tree_width}, tree_depth {tree_depth}, eval_width {eval_width}; "
                "each must be at least 1"
            )
        self.prompts, self.tree_width, self.tree_depth = list(prompts), tree_width, tree_depth
        self.eval_width, self.seed = eval_width, seed
        self._num_unseeded = 0

    def rollout(self, seed: int | None = None) -> Graph[str, str]:
        """Returns one tree, the same for the same seed and weights; without a seed, a different one each time."""
        return self._grow_training_trees([self._next_seed() if seed is None else seed])[0]

    def rollouts(self, seeds: Sequence[int]) -> list[Graph[str, str]]:
        """Returns one tree per seed, grown together: `tree_depth` batches of probes for any number of trees.

        A subclass that overrides `rollout` gets one call of it per seed instead.
        """
        if type(self).rollout is not ASTSampler.rollout:
            return super().rollouts(seeds)
        return self._grow_training_trees(seeds)

    def eval_rollout(self, seed: Any = None) -> Graph[str, str]:
        """Returns one tree of width `eval_width`.

        Args:
            seed: A number chooses the opening and seeds the sampling; a text is the opening itself; None: a different
                tree each time.
        """
        return self._grow_evaluation_trees([seed])[0]

    def eval_rollouts(self, seeds: Sequence[Any]) -> list[Graph[str, str]]:
        """Returns one tree per seed, grown together unless a subclass overrides `eval_rollout`."""
        if type(self).eval_rollout is not ASTSampler.eval_rollout:
            return super().eval_rollouts(seeds)
        return self._grow_evaluation_trees(seeds)

    def final_reward(self, graph: Graph[str, str]) -> float | None:
        """Returns the mean reward of the last turns over all branches; None if the tree has no turns."""
        rewards = [path[-1].reward for path in graph.paths()]
        return sum(rewards) / len(rewards) if rewards else None

    def _grow_training_trees(self, seeds: Sequence[int]) -> list[Graph[str, str]]:
        return self._grow([(self._choose_opening(seed), seed) for seed in seeds], self.tree_width)

    def _grow_evaluation_trees(self, seeds: Sequence[Any]) -> list[Graph[str, str]]:
        return self._grow([self._resolve_seed(seed) for seed in seeds], self.eval_width)

    def _resolve_seed(self, seed: Any) -> tuple[str, int]:
        if isinstance(seed, str):
            return seed, derive_seed(self.seed, "opening", seed)
        number = self._next_seed() if seed is None else int(seed)
        return self._choose_opening(number), number

    def _next_seed(self) -> int:
        self._num_unseeded += 1
        return derive_seed(self.seed, "rollout", self._num_unseeded)

    def _choose_opening(self, seed: int) -> str:
        return stable_random(seed, "opening").choice(self.prompts)

    def _grow(self, roots: Sequence[tuple[str, int]], width: int) -> list[Graph[str, str]]:
        graphs: list[Graph[str, str]] = [Graph(Conversation(opening), []) for opening, _ in roots]
        level = [
            _TreeBranch(graph.context, graph.children, seed)  # type: ignore[arg-type]
            for graph, (_, seed) in zip(graphs, roots, strict=True)
        ]
        for depth in range(self.tree_depth):
            if not level:
                break
            level = self._extend(level, width, depth)
        return graphs

    def _extend(self, level: Sequence[_TreeBranch], width: int, depth: int) -> list[_TreeBranch]:
        """Adds `width` children to each branch and returns the branches after them."""
        places = [(branch, (*branch.path, i)) for branch in level for i in range(width)]
        seeds = [stable_seed(branch.seed, "probe", *path) for branch, path in places]
        probes = self.system.sample_probes([branch.context for branch, _ in places], seeds)
        probed = [(*each, probe) for each, probe in zip(places, probes, strict=True) if probe is not None]
        seeds = [stable_seed(branch.seed, "response", *path) for branch, path, _ in probed]
        responses = self.system.sample_responses([branch.context + probe for branch, _, probe in probed], seeds)
        turns = [(*each, response) for each, response in zip(probed, responses, strict=True) if response is not None]
        spoken = [turn[2] for turn in turns]
        rewards = check_rewards(
            self.system.reward([branch.context for branch, *_ in turns], spoken, [turn[3] for turn in turns]), spoken
        )
        grown = []
        for (branch, path, probe, response), reward in zip(turns, rewards, strict=True):
            node = ASTNode(branch.context, probe, response, reward, [], depth)
            branch.children.append(node)
            context = self.system.advance(branch.context, probe, response)
            grown.append(_TreeBranch(context, node.children, branch.seed, path))  # type: ignore[arg-type]
        return grown
