"""Settings of one call: validates them, puts a deployed agent in place (`--endpoint`), shrinks the run (`--smoke`)."""

from __future__ import annotations

from typing import Any

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import Config, FinetuneConfig, FinetuneRunConfig
from reinforge.errors import Problem
from reinforge.types.evaluation import EvalInputItem

PATH = "finetuning.run_configuration"
DEFAULTS = FinetuneRunConfig()
REMOTE_FLAGS = ("endpoint", "endpoint_timeout", "result_json_path")

NUM_EXAMPLES = 2
SMALLEST_GROUP = 2  # examples and siblings of a `--smoke` run; a group of one has nothing to compare

MAX_REFILLS = 16  # how often `--smoke` may collect again until a group has signal, so that it makes an optimizer step


def validate_run_settings(run: FinetuneRunConfig, workflow: object = None) -> list[Problem]:
    """Returns the settings of a call that are wrong or that a file cannot have."""
    problems = find_remote_problems(run, workflow)
    for name in ("config_file", "override"):
        if getattr(run, name) != getattr(DEFAULTS, name):
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
    finetuning.gate.num_samples, finetuning.gate.allow_no_verdict = 1, True
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


def find_remote_problems(run: FinetuneRunConfig, workflow: object) -> list[Problem]:
    """Returns what is wrong with the flags of a remote workflow."""
    given = _list_remote_flags(run)
    if not given:
        return []
    from reinforge.rollout.workflows.http_workflow import HTTPWorkflowConfig, validate_agent_url  # for these alone
    from reinforge.rollout.workflows.templates import validate_json_path

    problems = []
    for name, check in (("endpoint", validate_agent_url), ("result_json_path", validate_json_path)):
        value = getattr(run, name)
        try:
            if value is not None:
                check(value)
        except ValueError as error:
            problems.append(Problem(f"{PATH}.{name}", str(error)))
    if run.endpoint_timeout <= 0:
        message = f"expected a number of seconds > 0, found {run.endpoint_timeout}"
        problems.append(Problem(f"{PATH}.endpoint_timeout", message))
    if not problems and run.endpoint is None and not isinstance(workflow, HTTPWorkflowConfig):
        for name in given:
            message = f"--{name} applies to a deployed agent, but this run has none"
            fix = "pass --endpoint URL too, or configure `workflow: {_type: http, url: URL}`"
            problems.append(Problem(f"{PATH}.{name}", message, fix))
    return problems


def _list_remote_flags(run: FinetuneRunConfig) -> list[str]:
    return [name for name in REMOTE_FLAGS if getattr(run, name) != getattr(DEFAULTS, name)]


def use_remote_workflow(loaded: LoadedConfig) -> None:
    """Puts the agent of `--endpoint` in place of the configured workflow, and applies the flags that go with it.

    The time limit of an episode becomes `--endpoint_timeout`, unless only the configuration sets one. Does nothing
    without the flags, or if they are wrong.
    """
    config, run = loaded.config, loaded.config.finetuning.run_configuration
    if run is None or not _list_remote_flags(run) or find_remote_problems(run, config.workflow):
        return
    from reinforge.rollout.workflows.http_workflow import HTTPWorkflowConfig  # for these flags alone

    given = config.workflow
    changes = {"url": run.endpoint} if run.endpoint is not None else {}
    if run.result_json_path != DEFAULTS.result_json_path:
        changes["result_json_path"] = run.result_json_path
    limits, has_timeout = config.finetuning.limits, run.endpoint_timeout != DEFAULTS.endpoint_timeout
    if has_timeout or (run.endpoint is not None and "episode_timeout_s" not in limits.model_fields_set):
        limits.episode_timeout_s = float(run.endpoint_timeout)
    if isinstance(given, HTTPWorkflowConfig):
        config.workflow = given.model_copy(update=changes)
        return
    llm, share = getattr(given, "llm", None), getattr(given, "share_environment_seed", True)
    config.workflow = HTTPWorkflowConfig(llm=llm, share_environment_seed=share, **changes)
    loaded.types["workflow",] = str(HTTPWorkflowConfig.static_type)
    for path in [path for path in loaded.placeholders if path[0] == "workflow"]:
        del loaded.placeholders[path]
