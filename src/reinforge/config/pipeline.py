"""The stages of a run: which epochs belong to which, and the settings of each.

    finetuning:
      num_epochs: (5)                       the sum
      pipeline:
        sft:     {num_epochs: 2, ...}       epochs 0 and 1
        distill: {num_epochs: 3, ...}       epochs 2 to 4

A block that a stage writes is completed from the same block of `finetuning`, before it is validated:
`policy.optimizer: {name: sgd, learning_rate: 0.1}` and a stage's `{learning_rate: 0.01}` -> `{name: sgd, learning_rate:
0.01}`. The resolved configuration of a run therefore spells out what each stage uses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.config.document import Document, KeyPath
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import Config, FinetuneConfig, StageConfig
from reinforge.config.sections import STAGES

NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
POLICY: KeyPath = ("finetuning", "policy")
NUM_EPOCHS: KeyPath = ("finetuning", "num_epochs")
POLICY_BLOCKS = ("optimizer", "schedule", "batch")


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage of a run's pipeline; `first` and `last` are its epochs."""

    name: str
    first: int
    settings: StageConfig

    @property
    def last(self) -> int:
        return self.first + self.settings.num_epochs - 1

    @property
    def path(self) -> str:
        return ".".join((*map(str, STAGES), self.name))

    def complete_policy(self, policy: PolicyConfig) -> PolicyConfig:
        """Returns the run's policy with the optimizer, the schedule and the batches of the stage."""
        own = {name: getattr(self.settings.policy, name) for name in POLICY_BLOCKS}
        return policy.model_copy(update={name: block for name, block in own.items() if block is not None})


def list_stages(config: FinetuneConfig) -> list[PipelineStage]:
    """Returns the stages of a run, in their order; none without a pipeline."""
    stages, first = list[PipelineStage](), 0
    for name, settings in config.pipeline.items():
        stages.append(PipelineStage(name, first, settings))
        first += settings.num_epochs
    return stages


def find_stage(config: FinetuneConfig, epoch: int) -> PipelineStage | None:
    return choose_stage(list_stages(config), epoch)


def choose_stage(stages: Sequence[PipelineStage], epoch: int) -> PipelineStage | None:
    """Returns the stage that an epoch belongs to; epochs after the last stage belong to it."""
    return next((stage for stage in stages if epoch <= stage.last), stages[-1] if stages else None)


def find_optional_answers(config: Config) -> PipelineStage | None:
    """Returns the first of two stages if it imitates expected answers and is not required, and nothing else is staged.

    Without it the run needs no pipeline: the second stage sets nothing but its epochs and where it starts from.
    """
    stages = list_stages(config.finetuning)
    if len(stages) != 2:
        return None
    first, second = stages
    builder: Any = config.trajectory_builders.get(first.settings.trajectory_builder or "")
    is_optional = getattr(builder, "static_type", None) == "answers" and not builder.required
    given = second.settings.model_copy(update={"num_epochs": 1, "start_from": "last"})
    return first if is_optional and given.model_dump() == StageConfig().model_dump() else None


def leave_out_answers(config: FinetuneConfig) -> None:
    """Leaves out the stage that `find_optional_answers` found."""
    _, second = config.pipeline.values()
    config.num_epochs, config.pipeline = second.num_epochs, {}


def fill_in_stages(document: Document) -> None:
    """Completes the blocks of each stage from those of `finetuning`, and reports a number of epochs that is not theirs.

    Changes the document in place.
    """
    stages = document.get_block(STAGES)
    for name in stages:
        if not NAME.fullmatch(str(name)):
            message = f"{ascii(name)[:60]} is not the name of a stage"
            document.report((*STAGES, name), message, "use up to 40 letters, digits, - and _")
        for block in POLICY_BLOCKS:
            _complete(document, (*POLICY, block), (*STAGES, name, "policy", block))
    counts: list[Any] = [stage.get("num_epochs", 1) if isinstance(stage, dict) else None for stage in stages.values()]
    given = document.get(NUM_EPOCHS)
    is_set_by_stage = any(isinstance(document.marks.get((*STAGES, name, "num_epochs")), str) for name in stages)
    if given is not None and is_set_by_stage and not isinstance(document.marks.get(NUM_EPOCHS), str):
        del document.data["finetuning"]["num_epochs"]  # `-o` on top of a file that has the sum, as that of a run
        return
    if given is not None and counts and all(isinstance(count, int) for count in counts) and given != sum(counts):
        listed = " + ".join(map(str, counts))
        message = f"is {given}, but the stages of the pipeline have {listed} epochs"
        document.report(NUM_EPOCHS, message, f"leave it out, or write {sum(counts)}")


def _complete(document: Document, source: KeyPath, target: KeyPath) -> None:
    """Copies the keys that only `source` has into `target`, with the place and the text that each was written with."""
    given, written = document.get_block(source), document.get(target)
    if not isinstance(written, dict):
        return
    tables: tuple[dict[KeyPath, Any], ...] = (document.marks, document.placeholders)
    for key in [key for key in given if key not in written]:
        written[key] = given[key]
        for table in tables:
            if (*source, key) in table:
                table[*target, key] = table[*source, key]
