"""The components of one run."""

from __future__ import annotations

from dataclasses import dataclass, field

from reinforge.config.schema import FinetuneConfig
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.interfaces import Algorithm, ChatModel, Evaluator, Tracker, Trainer, TrainerAdapter, TrajectoryBuilder
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.workflow import BoundWorkflow


@dataclass
class Parts:
    """The components of one run.

    Attributes:
        splits: Examples by split: `train`, `select`, `confirm`.
        llms: Models by entry of `llms`.
        evaluators: By name.
        held_out_evaluators: By name, for `select` and `confirm`; the same unless the validation file has its own.
        shape: Detected shape of the dataset's rows; None if the loader does not report it.
        trackers: By name.
    """

    config: FinetuneConfig
    workflow: BoundWorkflow
    splits: dict[str, list[EvalInputItem]]
    llms: dict[str, ChatModel]
    evaluators: dict[str, Evaluator]
    held_out_evaluators: dict[str, Evaluator]
    algorithm: Algorithm
    adapter: TrainerAdapter
    trajectory_builder: TrajectoryBuilder
    trainer: Trainer
    shape: str | None = None
    trackers: dict[str, Tracker] = field(default_factory=dict)

    @property
    def reward_metric(self) -> str:
        assert self.config.reward_function is not None  # FinetuneConfig requires it
        return self.config.reward_function.name

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each part of the evaluator of the verdict, or else of the reward; empty: neither is `weighted`."""
        for metric in (self.gate_metric, self.reward_metric):
            evaluator = self.held_out_evaluators[metric]
            if isinstance(evaluator, Weighted):
                return dict(evaluator.weights)
        return {}

    @property
    def gate_metric(self) -> str:
        """The evaluator of the verdict."""
        return self.config.gate.metric or self.reward_metric
