"""The stages of a pipeline in the engine: the settings of each, and the reference of the current one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reinforge.config.policy import PolicyConfig
from reinforge.engine import checkpoint
from reinforge.engine.training.learner import Learner
from reinforge.engine.training.scoring import LogprobScorer, replace_weights
from reinforge.errors import EngineError


class PipelineStages:
    """Begins stages: each with a new optimizer, and with the current weights as its reference.

    Args:
        settings: The policy of each stage by name; empty: there is no pipeline.
        scorer: Scores with the reference.
        moves_reference: True if the reference is that of the stage; False: it is the same for all, or there is none.

    Attributes:
        reference_version: Version of the weights that the reference has; None: those that were loaded first.
    """

    def __init__(self, settings: Mapping[str, PolicyConfig], scorer: LogprobScorer, *, moves_reference: bool):
        self._settings, self._scorer = dict(settings), scorer
        self._moves_reference = moves_reference and bool(settings)
        self.reference_version: int | None = None

    def require(self, stage: str) -> None:
        if stage not in self._settings:
            raise EngineError(f"use_stage: no stage {stage}; the engine was loaded with {', '.join(self._settings)}")

    def begin(self, stage: str, learner: Learner, version: int) -> None:
        learner.begin_stage(stage, self._settings[stage], version)
        if self._moves_reference:
            self._scorer.take_reference()
            self.reference_version = version

    def restore(self, stage: str | None, learner: Learner, version: int | None, default: PolicyConfig) -> None:
        """Goes back to the stage of a checkpoint, if the learner is in another one.

        Args:
            stage: Its name; None: no stage had begun.
            version: Version of the weights that it began with.
        """
        if stage != learner.stage or version != learner.stage_version:
            learner.begin_stage(stage, self._settings.get(stage or "", default), version)

    def find_missing_reference(self, learner: Learner) -> int | None:
        """Returns the version of the reference that a learner's stage needs and does not have; None: it has it."""
        wanted = learner.stage_version
        return wanted if self._moves_reference and wanted != self.reference_version else None

    def require_reference(self, learner: Learner) -> None:
        """Refuses another reference than that of the learner's stage."""
        if self._moves_reference and self.reference_version != learner.stage_version:
            raise EngineError(
                f"the reference of the stage {learner.stage} is missing: the checkpoint of version "
                f"{learner.stage_version}, with which it began, is gone or damaged"
            )

    def load_reference(self, folder: Path) -> None:
        scorer = self._scorer
        if scorer.sharded_reference is not None:
            checkpoint.load_weights(folder, scorer.model, scorer.sharded_reference)
            return
        if scorer.reference is not None:
            checkpoint.load_weights(folder, scorer.reference)
            return
        with replace_weights(scorer.parameters, scorer.parameters):
            checkpoint.load_weights(folder, scorer.model, scorer.sharded)
            scorer.take_reference()
