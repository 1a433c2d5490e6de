"""The trainers of neural-interactive-proofs, as presets: an experiment becomes a configuration of the training loop.

    pure_text_ei     algorithm expert_iteration   dialogues; those with a high reward are imitated
    pure_text_malt   algorithm malt               trees; a preference pair at every turn of every trained agent
    pure_text_grpo   algorithm grpo               several dialogues per example; advantages within each agent

    summary = run_experiment(hyper_params, ExperimentSettings(run_id="first"))
    print(yaml.safe_dump(experiment_config(hyper_params, settings)))      # as a file for `reinforge finetune`

Run folder, journal, resume and gate work as in every run. The agents of a shared-model group use and train one LoRA
adapter of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reinforge.config.loader import build_config, with_current_keys
from reinforge.errors import ConfigError, Problem
from reinforge.multiagent.agent_parameters import AgentParameters
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.nip.parameters import (
    EPISODES_PER_WORKER,
    ExperimentSettings,
    HyperParameters,
    PureTextAgentParameters,
    get_changed_fields,
    reject_service_chosen_fields,
    reject_unsupported_fields,
)
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.registry import REGISTRY, Registry
from reinforge.runs.progress import RunProgress, default_progress
from reinforge.runs.summary import RunSummary
from reinforge.trainer.api import Rows, build_dataset_block, build_sections, run_blocking
from reinforge.trainer.options import RunOptions

ALGORITHMS = {"pure_text_ei": "expert_iteration", "pure_text_malt": "malt", "pure_text_grpo": "grpo"}
SELECT_SHARE = 0.15
"""Share of the examples outside the verdict on which the best checkpoint is selected."""
RUN_WIDE_FIELDS = ("model_name", "temperature", "top_p", "fine_tune_from_scratch", "lora_rank", "lora_alpha_factor")
"""Agent parameters that must be equal for all trained agents of a run."""
PROTOCOL_FIELDS = (
    "max_response_words",
    "max_tokens_per_message",
    "num_invalid_generation_retries",
    "prompt",
    "prompt_file",
)
"""Agent parameters that the protocol's configuration has under the same names."""


def run_experiment(
    hyper_params: HyperParameters,
    settings: ExperimentSettings,
    dataset: str | Path | Rows | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    progress: RunProgress | None = None,
    registry: Registry | None = None,
) -> RunSummary:
    """Trains the agents of an experiment and returns the verdict with a confidence interval.

    An unfinished run with the same `run_id` is resumed.

    Args:
        hyper_params: The experiment.
        settings: How it is run.
        dataset: Replaces the experiment's dataset: a file, or rows.
        overrides: Further keys of any section, as in a file; they take precedence. `{"trainer_adapters": {"adapter":
            {"_type": "openai"}}}` trains through a fine-tuning service.
        progress: Progress display; None: chosen for the terminal.
        registry: Where component types are looked up; None: everything that is installed.

    Returns:
        The summary, as in `summary.json`, with `folder`.

    Raises:
        ConfigError: The validation of the run failed; lists every problem.
        ReinforgeError: The run failed; its folder has a summary with the reason.
    """
    loaded = build_config(experiment_config(hyper_params, settings, dataset, overrides=overrides), registry=registry)
    options = RunOptions(settings.run_id, progress or default_progress(), smoke=settings.test_run)
    folder = Path(loaded.config.finetuning.output_dir, settings.run_id)
    if not settings.test_run and (folder / "run.sqlite").is_file():
        options.resume = folder
    return run_blocking(loaded, options, registry)


def experiment_config(
    hyper_params: HyperParameters,
    settings: ExperimentSettings,
    dataset: str | Path | Rows | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns an experiment as the sections of a configuration file.

    Args:
        hyper_params: The experiment.
        settings: How it is run.
        dataset: Replaces the experiment's dataset.
        overrides: Further keys of any section; they take precedence.

    Raises:
        ConfigError: Lists values that are not supported or do not fit each other.
    """
    reject_unsupported_fields(hyper_params, settings)
    trained = find_trained_params(hyper_params)
    workers, evaluator = settings.num_rollout_workers, {"_type": "verifier_accuracy"}
    rows = build_dataset_block(hyper_params.dataset if dataset is None else dataset)
    is_grpo = hyper_params.trainer == "pure_text_grpo"
    scratch = {} if is_grpo else {"fine_tune_from_scratch": trained.fine_tune_from_scratch}
    finetuning = _build_finetuning(hyper_params, trained)
    adapter = {"_type": "local", **scratch}
    if _find_adapter_type(overrides or {}) == "openai":
        reject_service_chosen_fields(hyper_params.rl, trained)
        adapter = {"_type": "openai", "n_epochs": hyper_params.text_rl.num_epochs, **scratch}
        finetuning["policy"] = {"model": trained.model_name}
    config = build_sections(
        llms=_build_llms(hyper_params),
        workflow=_build_workflow(hyper_params),
        evaluation={
            "general": {"max_concurrency": EPISODES_PER_WORKER * workers, "dataset": rows},
            "evaluators": {"accuracy": evaluator},
        },
        builder=_build_trajectory_builder(hyper_params),
        adapter=adapter,
        finetuning={**finetuning, "output_dir": str(settings.output_dir)},
    )
    return _merge(config, with_current_keys(overrides or {}))


def find_trained_params(hyper_params: HyperParameters) -> PureTextAgentParameters:
    """Returns the parameters of the first trained agent, after checking that the others have equal run-wide values.

    Raises:
        ConfigError: No agent is trained, or the values differ.
    """
    trained = {name: params for name, params in hyper_params.agents.items() if not params.freeze_agent}
    if not trained:
        message, fix = "no agent can be trained", "set freeze_agent to false for at least one"
        raise ConfigError(Problem("hyper_params.agents", message, fix))
    problems = []
    for field in RUN_WIDE_FIELDS:
        values = {name: getattr(params, field) for name, params in trained.items()}
        if len(set(values.values())) > 1:
            listing = ", ".join(f"{name} {value!r}" for name, value in values.items())
            message = f"must be equal for all trained agents of a run: {listing}"
            problems.append(Problem(f"hyper_params.agents.*.{field}", message, "set the same value for all"))
    if problems:
        raise ConfigError(problems)
    return next(iter(trained.values()))


def build_protocol(hyper_params: HyperParameters, registry: Registry | None = None) -> ProtocolHandler:
    """Returns the handler of an experiment's protocol.

    Raises:
        ConfigError: The protocol is unknown, or its settings are invalid.
    """
    block = _build_workflow(hyper_params)
    component = (registry or REGISTRY).get("workflow", block.pop("_type"), "hyper_params.interaction_protocol")
    handler = getattr(component.factory, "handler", None)
    if handler is None:
        name = hyper_params.interaction_protocol
        raise ConfigError(
            Problem("hyper_params.interaction_protocol", f"{name} is not a protocol", "use one, such as nip")
        )
    return handler(component.config_type(**block))


def build_agents(hyper_params: HyperParameters, project_root: str | Path = ".") -> dict[str, PureTextWholeAgent]:
    """Returns the agents of an experiment by name, for shared-model groups that are used without a run.

    Args:
        hyper_params: The experiment.
        project_root: Folder that `prompt_file` is relative to.
    """
    agents = {}
    for name, block in _build_workflow(hyper_params)["agents"].items():
        params = AgentParameters(**block)
        if params.prompt_file is not None:
            text = Path(project_root, params.prompt_file).read_text(encoding="utf-8")
            params = params.model_copy(update={"prompt": text})
        group = get_group_name(name, hyper_params.agents[name])
        agents[name] = PureTextWholeAgent(name, params, llm=group, model_group=group)
    return agents


def get_group_name(name: str, params: PureTextAgentParameters) -> str:
    """Returns the shared-model group of an agent; an agent that names none is a group of its own."""
    return params.shared_model_group or name


def _build_llms(hyper_params: HyperParameters) -> dict[str, dict[str, Any]]:
    """Returns an entry for each group: a policy if any of its agents is trained, else a fixed model."""
    groups: dict[str, list[PureTextAgentParameters]] = {}
    for name, params in hyper_params.agents.items():
        groups.setdefault(get_group_name(name, params), []).append(params)
    trained = [group for group, params in groups.items() if not all(each.freeze_agent for each in params)]
    entries: dict[str, dict[str, Any]] = {}
    for group, members in groups.items():
        if group not in trained:
            entries[group] = {"_type": "local", "model": members[0].model_name}
        else:
            entries[group] = {"_type": "policy", **({"adapter": group} if len(trained) > 1 else {})}
    return entries


def _build_workflow(hyper_params: HyperParameters) -> dict[str, Any]:
    """Returns the protocol with its agents; fields at their defaults keep the protocol's own defaults."""
    name = hyper_params.interaction_protocol
    block: dict[str, Any] = {"_type": name, **get_changed_fields(hyper_params.protocol_common)}
    if (own := getattr(hyper_params, f"{name}_protocol", None)) is not None:
        block |= get_changed_fields(own)
    if hyper_params.trainer == "pure_text_malt":
        block["num_responses"] = hyper_params.pure_text_malt.num_responses_per_timestep
    block["agents"] = {name: _build_agent_block(name, params) for name, params in hyper_params.agents.items()}
    return block


def _build_agent_block(name: str, params: PureTextAgentParameters) -> dict[str, Any]:
    sampling_fields = ("temperature", "top_p") if params.freeze_agent else ()
    values = {field: getattr(params, field) for field in (*PROTOCOL_FIELDS, *sampling_fields)}
    set_values = {field: value for field, value in values.items() if value is not None}
    return {"llm": get_group_name(name, params), "freeze_agent": params.freeze_agent, **set_values}


def _build_trajectory_builder(hyper_params: HyperParameters) -> dict[str, Any]:
    """Returns the trajectory builder that collects an iteration.

    Raises:
        ConfigError: The rollouts of an iteration are not a whole number of groups.
    """
    text, count = hyper_params.text_rl, hyper_params.rl.rollouts_per_iteration
    siblings = hyper_params.pure_text_grpo.num_generations if hyper_params.trainer == "pure_text_grpo" else 1
    if count is not None and count % siblings:
        message = f"{count} is not a multiple of pure_text_grpo.num_generations, {siblings}"
        raise ConfigError(Problem("hyper_params.rl.rollouts_per_iteration", message, f"use a multiple of {siblings}"))
    block: dict[str, Any] = {"_type": "agents", "num_generations": siblings}
    if count is not None:
        block["examples_per_epoch"] = count // siblings
    weights = {name: params.agent_weight for name, params in hyper_params.agents.items() if params.agent_weight != 1}
    if weights:
        block["agent_weights"] = weights
    names = ("fine_tune_on_all_previous_rollouts", *(n for n in vars(text) if n.startswith("verifier_guess_")))
    return block | {name: value for name, value in get_changed_fields(text).items() if name in names}


def _build_finetuning(hyper_params: HyperParameters, trained: PureTextAgentParameters) -> dict[str, Any]:
    rl, text = hyper_params.rl, hyper_params.text_rl
    is_grpo = hyper_params.trainer == "pure_text_grpo"
    policy: dict[str, Any] = {
        "model": trained.model_name,
        "optimizer": {"learning_rate": rl.lr},
        "batch": {"num_iterations": rl.num_epochs if is_grpo else text.num_epochs},
    }
    if trained.lora_rank is not None:
        policy["lora"] = {"r": trained.lora_rank, "lora_alpha": trained.lora_alpha}
    algorithm = {"_type": ALGORITHMS[hyper_params.trainer]}
    if hyper_params.trainer == "pure_text_ei":
        algorithm |= get_changed_fields(hyper_params.pure_text_ei)
    sampling = {"temperature": trained.temperature, "top_p": trained.top_p}
    rest = 1 - hyper_params.test_size
    return {
        "num_epochs": rl.num_iterations,
        "policy": policy,
        "algorithm": algorithm,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "splits": {
            "train": rest * (1 - SELECT_SHARE),
            "select": rest * SELECT_SHARE,
            "confirm": hyper_params.test_size,
        },
        "run_configuration": {"validation_interval": 1 if text.test_scheme == "all" else rl.num_iterations},
        "transcripts": {"save": text.save_transcripts, "format": text.transcript_format},
        "seed": hyper_params.seed,
    }


def _find_adapter_type(overrides: Mapping[str, Any]) -> str:
    """Returns the `_type` of the trainer adapter."""
    return str(overrides.get("trainer_adapters", {}).get("adapter", {}).get("_type", "local"))


def _merge(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two configurations; the values of the second take precedence.

    A component with another `_type` replaces the whole block, since settings of one type do not apply to another.
    """
    merged = dict(config)
    for key, value in overrides.items():
        old, merged[key] = config.get(key), value
        if not (isinstance(value, Mapping) and isinstance(old, Mapping)):
            continue
        if value.get("_type", old.get("_type")) == old.get("_type"):
            merged[key] = _merge(old, value)
    return merged
