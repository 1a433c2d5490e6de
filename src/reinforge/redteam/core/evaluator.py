"""Trees in, figures out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from reinforge.errors import ConfigError
from reinforge.files import write_json
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.sampler import Graph, Sampler

BATCH = 64
"""Rollouts that are drawn together."""


@dataclass
class GraphMetrics:
    """What one rollout showed.

    Attributes:
        overall: Of the whole tree.
        per_turn: Of each turn, the first one first.
    """

    overall: dict[str, Any]
    per_turn: list[dict[str, Any]]


class Evaluator(ABC, Generic[StateT, ActionT]):
    """Rolls out and looks.

    Example:
        evaluator = ASTEvaluator(sampler, seeds=range(100))
        metrics = evaluator.evaluate(progress=False)
        Evaluator.write_json(metrics, "metrics.json")

    Args:
        env: Rolls out by `eval_rollouts`.
        seeds: One a rollout: whatever the sampler takes. None: 0, 1, 2, ...
    """

    def __init__(self, env: Sampler[StateT, ActionT], seeds: Sequence[Any] | None = None):
        self.env, self.seeds = env, None if seeds is None else list(seeds)

    def evaluate(self, n_rollouts: int | None = None, progress: bool = True) -> Any:
        """Returns `aggregate_metrics` over the rollouts.

        Args:
            n_rollouts: How many; None: all seeds.
            progress: Draw a bar.

        Raises:
            ConfigError: There are fewer seeds, or no number at all.
        """
        if self.seeds is None and n_rollouts is None:
            raise ConfigError("evaluate: say how many rollouts (n_rollouts), or give the evaluator seeds")
        seeds = list(range(n_rollouts or 0)) if self.seeds is None else self.seeds
        if not seeds or (n_rollouts is not None and not 0 < n_rollouts <= len(seeds)):
            raise ConfigError(f"evaluate: {n_rollouts} rollouts of {len(seeds)} seeds")
        seeds, found = seeds[:n_rollouts], list[GraphMetrics]()
        from rich.progress import track

        parts = range(0, len(seeds), BATCH)
        for start in track(parts, "rolling out", disable=not progress):
            found += [self.compute_metrics(g) for g in self.env.eval_rollouts(seeds[start : start + BATCH])]
        return self.aggregate_metrics(found)

    @abstractmethod
    def compute_metrics(self, g: Graph[StateT, ActionT]) -> GraphMetrics:
        """Returns what one rollout showed."""

    @abstractmethod
    def aggregate_metrics(self, all_metrics: list[GraphMetrics]) -> Any:
        """Returns what all of them showed, as JSON can hold it."""

    @staticmethod
    def write_json(data: Any, path: str | Path) -> None:
        """Writes figures as JSON, whole."""
        write_json(Path(path), data)
