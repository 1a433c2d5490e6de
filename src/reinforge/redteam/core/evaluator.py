"""The base class of evaluators: trees in, metrics out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from reinforge.errors import ConfigError
from reinforge.files import write_json
from reinforge.redteam.core.common import ActionT, SeedT, StateT
from reinforge.redteam.core.sampler import Graph, Sampler

ROLLOUT_BATCH_SIZE = 64

JSONLike = dict[str, Any] | list[Any] | str | int | float | bool | None
"""What `evaluate` returns and `write_json` writes."""


@dataclass
class GraphMetrics:
    """The metrics of one rollout: of the whole tree, and of each turn in order."""

    overall: dict[str, Any]
    per_turn: list[dict[str, Any]]


class Evaluator(ABC, Generic[StateT, ActionT, SeedT]):
    """Samples rollouts and computes metrics on them.

    Example:
        evaluator = ASTEvaluator(sampler, seeds=range(100))
        metrics = evaluator.evaluate(progress=False)
        Evaluator.write_json(metrics, "metrics.json")

    Args:
        env: The sampler; its `eval_rollouts` is called.
        seeds: One seed per rollout, of any kind that the sampler takes. None: 0, 1, 2, ...
    """

    def __init__(self, env: Sampler[StateT, ActionT], seeds: Sequence[SeedT] | None = None):
        self.env = self.sampler = env  # astra-rl's pages use both names
        self.seeds = None if seeds is None else list(seeds)

    def evaluate(self, n_rollouts: int | None = None, progress: bool = True) -> Any:
        """Returns `aggregate_metrics` over the rollouts.

        Args:
            n_rollouts: Number of rollouts; None: one for each seed.

        Raises:
            ConfigError: There are fewer seeds than rollouts, or neither seeds nor a number.
        """
        if self.seeds is None and n_rollouts is None:
            raise ConfigError(
                "evaluate: the number of rollouts is unknown; pass n_rollouts, or give the evaluator seeds"
            )
        seeds = list(range(n_rollouts or 0)) if self.seeds is None else self.seeds
        if not seeds or (n_rollouts is not None and not 0 < n_rollouts <= len(seeds)):
            raise ConfigError(
                f"evaluate: n_rollouts is {n_rollouts}; with {len(seeds)} seeds, expected 1 to {len(seeds)}"
            )
        seeds, metrics = seeds[:n_rollouts], list[GraphMetrics]()
        from rich.progress import track

        parts = range(0, len(seeds), ROLLOUT_BATCH_SIZE)
        for start in track(parts, "rolling out", disable=not progress):
            graphs = self.env.eval_rollouts(seeds[start : start + ROLLOUT_BATCH_SIZE])
            metrics += [self.compute_metrics(graph) for graph in graphs]
        return self.aggregate_metrics(metrics)

    @abstractmethod
    def compute_metrics(self, g: Graph[StateT, ActionT]) -> GraphMetrics:
        """Returns the metrics of one rollout."""

    @abstractmethod
    def aggregate_metrics(self, all_metrics: list[GraphMetrics]) -> Any:
        """Returns the metrics over all rollouts, ready for JSON."""

    @staticmethod
    def write_json(data: Any, path: str | Path) -> None:
        write_json(Path(path), data)
