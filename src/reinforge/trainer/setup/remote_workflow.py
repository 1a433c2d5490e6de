"""`--endpoint URL`: a deployed agent in the place of the configured one."""

from __future__ import annotations

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import FinetuneRunConfig
from reinforge.errors import Problem
from reinforge.registry import load_named

PATH = "finetuning.run_configuration"
DEFAULTS = FinetuneRunConfig()
HTTP = "http"
WORKFLOW = "reinforge.rollout.workflows.http_workflow:HTTPWorkflowConfig"
CHECKS = {
    "endpoint": "reinforge.rollout.workflows.http_workflow:validate_agent_url",
    "result_json_path": "reinforge.rollout.workflows.templates:validate_json_path",
}
"""What checks the value of a flag; imported for a run that sets it."""


def find_remote_problems(run: FinetuneRunConfig, workflow: object) -> list[Problem]:
    """Returns what is wrong with the flags of a remote workflow.

    Args:
        run: The settings of the call.
    """
    problems = []
    for name, check in CHECKS.items():
        value = getattr(run, name)
        try:
            if value != getattr(DEFAULTS, name):
                load_named(check)(value)
        except ValueError as error:
            problems.append(Problem(f"{PATH}.{name}", str(error)))
    if run.endpoint_timeout <= 0:
        message = f"expected a number of seconds > 0, found {run.endpoint_timeout}"
        problems.append(Problem(f"{PATH}.endpoint_timeout", message))
    if not problems and run.endpoint is None and getattr(workflow, "static_type", None) != HTTP:
        for name in ("endpoint_timeout", "result_json_path"):
            if getattr(run, name) != getattr(DEFAULTS, name):
                message = f"--{name} is about a deployed agent, but the agent of this run is not one"
                fix = "pass --endpoint URL too, or configure `workflow: {_type: http, url: URL}`"
                problems.append(Problem(f"{PATH}.{name}", message, fix))
    return problems


def use_remote_workflow(loaded: LoadedConfig) -> None:
    """Puts the agent of `--endpoint` in the place of the configured workflow, and applies the flags that go with it.

    The time limit of an episode becomes `--endpoint_timeout`, unless only the configuration sets one. Does nothing
    without the flags, or if they are wrong.

    Args:
        loaded: The configuration, changed in place.
    """
    config, run = loaded.config, loaded.config.finetuning.run_configuration
    if run is None or find_remote_problems(run, config.workflow):
        return
    given = config.workflow
    if run.endpoint is None and given.static_type != HTTP:
        return
    changes = {"url": run.endpoint} if run.endpoint is not None else {}
    if run.result_json_path != DEFAULTS.result_json_path:
        changes["result_json_path"] = run.result_json_path
    limits, has_timeout = config.finetuning.limits, run.endpoint_timeout != DEFAULTS.endpoint_timeout
    if has_timeout or (run.endpoint is not None and "episode_timeout_s" not in limits.model_fields_set):
        limits.episode_timeout_s = float(run.endpoint_timeout)
    if given.static_type == HTTP:
        config.workflow = given.model_copy(update=changes)
        return
    llm, share = getattr(given, "llm", None), getattr(given, "share_environment_seed", True)
    config.workflow = load_named(WORKFLOW)(llm=llm, share_environment_seed=share, **changes)
    loaded.types["workflow",] = HTTP
    for path in [path for path in loaded.placeholders if path[0] == "workflow"]:
        del loaded.placeholders[path]
