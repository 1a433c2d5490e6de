"""Settings of one call: validates them, and shrinks the run for `--smoke`."""

from __future__ import annotations

from typing import Any

from reinforge.config.schema import Config, FinetuneConfig, FinetuneRunConfig
from reinforge.errors import Problem
from reinforge.trainer.setup.remote_workflow import PATH, find_remote_problems
from reinforge.types.evaluation import EvalInputItem

NUM_EXAMPLES = 2
SMALLEST_GROUP = 2
"""Examples and siblings of a `--smoke` run; a group of one has nothing to compare."""

MAX_REFILLS = 16
"""How often `--smoke` may collect again until a group has signal, so that it makes an optimizer step."""


def validate_run_settings(run: FinetuneRunConfig, workflow: object = None) -> list[Problem]:
    """Returns the settings of a call that are wrong or that a file cannot have."""
    problems, defaults = find_remote_problems(run, workflow), FinetuneRunConfig()
    for name in ("config_file", "override"):
        if getattr(run, name) != getattr(defaults, name):
            message = f"{name} is a command-line option: reinforge finetune FILE -o PATH VALUE"
            problems.append(Problem(f"{PATH}.{name}", message, "remove it from the file"))
    return problems


def shrink_for_smoke(config: Config) -> None:
    """Turns a configuration into the smallest run that does everything once: `--smoke`.

    One epoch (of each stage of a pipeline), two examples, the smallest group, one optimizer step, one sample; nothing
    is mocked.
    """
    finetuning: FinetuneConfig = config.finetuning
    for stage in finetuning.pipeline.values():
        stage.num_epochs = 1
        if stage.policy.batch is not None:
            stage.policy.batch.steps_per_job = stage.policy.batch.num_iterations = 1
    finetuning.num_epochs = max(1, len(finetuning.pipeline))
    finetuning.policy.batch.steps_per_job = finetuning.policy.batch.num_iterations = 1
    finetuning.gate.num_samples = 1
    finetuning.limits.max_refills, finetuning.limits.min_groups = MAX_REFILLS, 1 / NUM_EXAMPLES
    finetuning.limits.max_empty_updates = 1
    own = (each.trajectory_builder for each in finetuning.pipeline.values())
    for name in {str(finetuning.trajectory_builder), *(str(name) for name in own if name is not None)}:
        _shrink_builder(config.trajectory_builders[name])


def _shrink_builder(builder: Any) -> None:
    fields = type(builder).model_fields
    if "num_generations" in fields:
        least = [getattr(bound, "ge", 0) or 0 for bound in fields["num_generations"].metadata]
        builder.num_generations = min(builder.num_generations, max(SMALLEST_GROUP, *least, 0))
    if "examples_per_epoch" in fields:
        builder.examples_per_epoch = NUM_EXAMPLES


def shrink_splits(splits: dict[str, list[EvalInputItem]], builder_config: Any) -> None:
    """Keeps two examples of each split; `train` stays whole if the builder itself takes only two."""
    for name in splits:
        if name != "train" or not hasattr(builder_config, "examples_per_epoch"):
            splits[name] = splits[name][:NUM_EXAMPLES]
