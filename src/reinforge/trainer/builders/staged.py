"""The trajectory builder of a pipeline: each epoch is collected by the builder of its stage.

stages sft (`dataset`, epochs 0 and 1) and grpo (`group`, from epoch 2)   =>  epoch 1 comes from the dataset's rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.config.pipeline import PipelineStage, choose_stage
from reinforge.config.schema import Config, FinetuneConfig
from reinforge.errors import EvaluationError, Problem
from reinforge.interfaces import Algorithm, EvaluationRunner, TrajectoryBuilder
from reinforge.port_bases import DiscardsRuns, RefillsEpochs, TakesNotes, find_plan
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem, EvaluationReport, EvaluationRunOutput
from reinforge.types.trajectory import CollectionPlan, TrajectoryCollection, TrajectoryGroup

TRAIN = "train"


def name_train_split(stage: PipelineStage) -> str:
    return TRAIN if stage.settings.dataset is None else f"{TRAIN} ({stage.name})"


@dataclass(frozen=True, slots=True)
class StageParts:
    stage: PipelineStage
    algorithm: Algorithm
    builder: TrajectoryBuilder


class StageEvaluation(EvaluationRunner):
    """The run's evaluation with the training examples of one stage.

    Args:
        split: What `train` means in this stage.
    """

    def __init__(self, evaluation: EvaluationRunner, split: str):
        self.inner, self.split = evaluation, split

    @property
    def epoch(self) -> int:  # type: ignore[override]  # a plain attribute of the port
        return self.inner.epoch

    async def run_eval(self) -> EvaluationRunOutput:
        """Refuses: the run's evaluation would run its own training examples."""
        raise EvaluationError(
            "run_eval() runs the training examples of the run, but this stage has a dataset of its own: call "
            "evaluation.examples('train') and evaluation.collect(keys), or leave `dataset` out of the stage"
        )

    async def collect(self, keys: Sequence[EpisodeKey]) -> list[EpisodeRecord]:
        return await self.inner.collect(keys)

    async def validate(self, split: str, epoch: int, phase: str = "validate") -> EvaluationReport:
        return await self.inner.validate(self._find_split(split), epoch, phase)

    def example_ids(self, split: str) -> list[str]:
        return self.inner.example_ids(self._find_split(split))

    def examples(self, split: str) -> list[EvalInputItem]:
        return self.inner.examples(self._find_split(split))

    def journalled_episodes(self, epoch: int) -> list[EpisodeRecord]:
        return self.inner.journalled_episodes(epoch)

    def find_call(self, call_id: str) -> ModelCall | None:
        return self.inner.find_call(call_id)

    def _find_split(self, split: str) -> str:
        return self.split if split == TRAIN else split


class StagedTrajectoryBuilder(TrajectoryBuilder):
    """Hands each epoch to the builder of its stage."""

    def __init__(self, parts: Sequence[StageParts]):
        self.parts = list(parts)
        self.is_resumable = all(each.builder.is_resumable for each in self.parts)
        self.requires_policy_llm = any(each.builder.requires_policy_llm for each in self.parts)
        self.collects_ahead = all(each.builder.collects_ahead for each in self.parts)
        self.rewards_are_scores = any(each.builder.rewards_are_scores for each in self.parts)
        self._evaluation: EvaluationRunner | None = None
        self._current = self.parts[0]
        self._notes: list[str] = []
        self._begun: set[str] = set()
        for each in self.parts:  # stages on the same examples continue the pass of the one before
            each.builder.first_epoch = 0 if each.stage.settings.dataset is None else each.stage.first
        super().__init__(self.parts[0].builder.trajectory_builder_config)

    @property
    def evaluation(self) -> EvaluationRunner | None:
        return self._evaluation

    @evaluation.setter
    def evaluation(self, evaluation: EvaluationRunner | None) -> None:
        self._evaluation = evaluation
        for each in self.parts:
            has_own = evaluation is not None and each.stage.settings.dataset is not None
            own = StageEvaluation(evaluation, name_train_split(each.stage)) if has_own and evaluation else evaluation
            each.builder.evaluation = own

    @property
    def records(self) -> list[EpisodeRecord] | None:  # type: ignore[override]  # a plain attribute of the port
        return self._current.builder.records

    @property
    def may_train_nothing(self) -> bool:  # type: ignore[override]  # a plain attribute of the port
        return self._current.builder.may_train_nothing

    @property
    def policies(self) -> Any:
        return getattr(self._current.builder, "policies", ())

    def validate(
        self, config: Config, algorithm: Algorithm, examples: Sequence[EvalInputItem], row_locations: Mapping[str, str]
    ) -> list[Problem]:
        return []

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        for each in self.parts:
            await each.builder.initialize(run_config)

    async def run_eval(self) -> EvaluationRunOutput:
        return await self._current.builder.run_eval()

    def plan(self, epoch: int) -> CollectionPlan | None:
        return find_plan(self._find(epoch).builder, epoch)

    def further_examples(self, epoch: int, used: set[str], count: int) -> list[str]:
        builder = self._find(epoch).builder
        return builder.further_examples(epoch, used, count) if isinstance(builder, RefillsEpochs) else []

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        self._current = self._find(int((meta or {}).get("epoch", 0)))
        stage = self._current.stage
        if stage.name not in self._begun:
            self._begun.add(stage.name)
            number = [each.stage.name for each in self.parts].index(stage.name) + 1
            self._notes.append(f"stage {stage.name} ({number}/{len(self.parts)}): {describe_epochs(stage)}")
        await self._current.builder.start_run(run_id, meta)

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        return await self._find(int((meta or {}).get("epoch", 0))).builder.finalize(run_id, meta)

    async def discard_run(self, run_id: str) -> None:
        if isinstance(builder := self._current.builder, DiscardsRuns):
            await builder.discard_run(run_id)

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        builder = self._current.builder
        return notes + (builder.take_notes() if isinstance(builder, TakesNotes) else [])

    def example_rewards(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[str, float]]:
        return self._current.builder.example_rewards(groups)

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float | None:
        return await self._find(int((meta or {}).get("epoch", 0))).builder.compute_reward(output_item, meta)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        self._current.builder.log_progress(run_id, metrics, output_dir)

    async def cleanup(self) -> None:
        for each in self.parts:
            await each.builder.cleanup()

    def _find(self, epoch: int) -> StageParts:
        stage = choose_stage([each.stage for each in self.parts], epoch)
        return next(each for each in self.parts if each.stage is stage)


def describe_epochs(stage: PipelineStage) -> str:
    return f"epoch {stage.first}" if stage.first == stage.last else f"epochs {stage.first} to {stage.last}"
