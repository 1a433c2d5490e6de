"""An experiment of neural-interactive-proofs as the sections of a configuration file.

pure_text_ei     algorithm expert_iteration   dialogues; those with a high reward are imitated
pure_text_malt   algorithm malt               trees; a preference pair at every turn of every trained agent, after
                                              num_initial_ei_iterations as with pure_text_ei
pure_text_grpo   algorithm grpo               several dialogues per example; advantages within each agent
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reinforge.config.loader import resolve_aliases
from reinforge.errors import ConfigError, Problem
from reinforge.multiagent.nip.experiment import (
    EPISODES_PER_WORKER,
    ExperimentSettings,
    HyperParameters,
    reject_service_chosen_fields,
    reject_unsupported_fields,
)
from reinforge.multiagent.nip.experiment_agents import build_protocol, build_workflow_block, expand_agents
from reinforge.multiagent.nip.parameters import (
    PureTextAgentParameters,
    find_differences,
    get_changed_fields,
    get_group_name,
)
from reinforge.trainer.api import Rows, build_dataset_block, build_sections

ALGORITHMS = {"pure_text_ei": "expert_iteration", "pure_text_malt": "malt", "pure_text_grpo": "grpo"}
OPENROUTER = {"base_url": "${OPENROUTER_BASE_URL:-https://openrouter.ai/api/v1}", "api_key": "${OPENROUTER_API_KEY}"}
SELECT_SHARE = 0.15  # share of the examples outside the verdict on which the best checkpoint is selected
RUN_WIDE_FIELDS = (
    *("model_provider", "temperature", "top_p"),
    *("fine_tune_from_scratch", "lora_rank", "lora_alpha_factor", "dpo_beta"),
)
"""Agent parameters that must be equal for all trained agents of a run."""


def experiment_config(
    hyper_params: HyperParameters,
    settings: ExperimentSettings,
    dataset: str | Path | Rows | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns an experiment as the sections of a configuration file.

    Args:
        overrides: Further keys of any section; they take precedence.

    Raises:
        ConfigError: Lists values that are not supported or do not fit each other.
    """
    reject_unsupported_fields(hyper_params, settings)
    agents = expand_agents(hyper_params)
    trained = find_trained_params(agents)
    workers, evaluator = settings.num_rollout_workers, {"_type": "verifier_accuracy"}
    rows = build_dataset_block(hyper_params.dataset if dataset is None else dataset)
    is_grpo = hyper_params.trainer == "pure_text_grpo"
    scratch = {} if is_grpo else {"fine_tune_from_scratch": trained.fine_tune_from_scratch}
    finetuning = _build_finetuning(hyper_params, trained)
    adapter = {"_type": "local", **scratch}
    default = "openai" if trained.model_provider == "OpenAI" else "local"
    if (overrides or {}).get("trainer_adapters", {}).get("adapter", {}).get("_type", default) == "openai":
        reject_service_chosen_fields(hyper_params.rl, trained)
        adapter = {"_type": "openai", "n_epochs": hyper_params.text_rl.num_epochs, **scratch}
        finetuning["policy"] = {"model": trained.model_name}
        if hyper_params.trainer == "pure_text_malt":
            finetuning["algorithm"]["sft_coef"] = 0.0  # the service's DPO has no such term
    elif settings.device is not None:
        finetuning["device"] = settings.device
    llms = _build_llms(agents)
    config = build_sections(
        llms=llms,
        workflow=build_workflow_block(hyper_params, agents),
        evaluation={
            "general": {"max_concurrency": EPISODES_PER_WORKER * workers, "dataset": rows},
            "evaluators": {"accuracy": evaluator},
        },
        builder=_build_trajectory_builder(hyper_params, agents),
        adapter=adapter,
        finetuning={**finetuning, "output_dir": str(settings.output_dir)},
    )
    config = _merge(config, resolve_aliases(overrides or {}))
    models = _find_models(agents)
    shares_base = adapter["_type"] == "local" and trained.lora_rank is not None and len(set(models.values())) == 1
    if len(models) > 1 and not shares_base:  # each has weights of its own
        config["trainer_adapters"]["groups"] = {"_type": "groups", "backend": "adapter", "models": models}
        config["finetuning"]["trainer_adapter"] = "groups"
    return config


def find_trained_params(agents: Mapping[str, PureTextAgentParameters]) -> PureTextAgentParameters:
    """Returns the parameters of the first trained agent, after checking that the others have equal run-wide values."""
    trained = {name: params for name, params in agents.items() if not params.freeze_agent}
    if not trained:
        message, fix = "no agent can be trained", "set freeze_agent to false for at least one"
        raise ConfigError(Problem("hyper_params.agents", message, fix))
    why = "must be equal for all trained agents of a run"
    problems = [*_find_provider_problems(agents), *find_differences(trained, RUN_WIDE_FIELDS, why)]
    for group, names in _list_groups(agents).items():
        of_group = {name: agents[name] for name in names}
        problems += find_differences(
            of_group, ("model_name",), f"differs within the group {group}, which has one model"
        )
    if problems:
        raise ConfigError(problems)
    return next(iter(trained.values()))


def _build_llms(agents: Mapping[str, PureTextAgentParameters]) -> dict[str, dict[str, Any]]:
    groups, trained = _list_groups(agents), _find_models(agents)
    entries: dict[str, dict[str, Any]] = {}
    for group, names in groups.items():
        first = agents[names[0]]
        if group in trained:
            entries[group] = {"_type": "policy", **({"adapter": group} if len(trained) > 1 else {})}
        elif first.model_provider in ("OpenAI", "OpenRouter"):
            address = OPENROUTER if first.model_provider == "OpenRouter" else {}
            entries[group] = {"_type": "openai", "model_name": first.model_name, **address}
        else:
            entries[group] = {"_type": "local", "model": first.model_name}
    return entries


def _list_groups(agents: Mapping[str, PureTextAgentParameters]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, params in agents.items():
        groups.setdefault(get_group_name(name, params), []).append(name)
    return groups


def _find_models(agents: Mapping[str, PureTextAgentParameters]) -> dict[str, str]:
    return {
        group: agents[names[0]].model_name
        for group, names in _list_groups(agents).items()
        if not all(agents[name].freeze_agent for name in names)
    }


def _build_trajectory_builder(
    hyper_params: HyperParameters, agents: Mapping[str, PureTextAgentParameters]
) -> dict[str, Any]:
    text, count = hyper_params.text_rl, _count_rollouts(hyper_params)
    siblings = hyper_params.pure_text_grpo.num_generations if hyper_params.trainer == "pure_text_grpo" else 1
    if count is not None and count % siblings:
        message = f"{count} is not a multiple of pure_text_grpo.num_generations, {siblings}"
        raise ConfigError(Problem("hyper_params.rl.rollouts_per_iteration", message, f"use a multiple of {siblings}"))
    block: dict[str, Any] = {"_type": "agents", "num_generations": siblings}
    if count is not None:
        block["examples_per_epoch"] = count // siblings
    weights = {name: params.agent_weight for name, params in agents.items() if params.agent_weight != 1}
    if weights:
        block["agent_weights"] = weights
    names = ("fine_tune_on_all_previous_rollouts", *(n for n in vars(text) if n.startswith("verifier_guess_")))
    return block | {name: value for name, value in get_changed_fields(text).items() if name in names}


def _count_rollouts(hyper_params: HyperParameters) -> int | None:
    """Returns the episodes of an iteration; None: one per training example.

    Example: frames_per_batch 1600, dialogues of at most 8 rounds -> 200.
    """
    rl = hyper_params.rl
    if rl.frames_per_batch is None:
        return rl.rollouts_per_iteration
    path = "hyper_params.rl.frames_per_batch"
    if rl.rollouts_per_iteration is not None:
        message = f"is {rl.frames_per_batch}, but rollouts_per_iteration is {rl.rollouts_per_iteration}"
        raise ConfigError(Problem(path, message, "set one of them to None"))
    steps = rl.steps_per_env_per_iteration or build_protocol(hyper_params).max_message_rounds
    if rl.frames_per_batch % steps:
        message = f"{rl.frames_per_batch} is not a multiple of {steps}, the rounds of an episode"
        raise ConfigError(Problem(path, message, "set rollouts_per_iteration instead"))
    return rl.frames_per_batch // steps


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
    algorithm: dict[str, Any] = {"_type": ALGORITHMS[hyper_params.trainer]}
    if hyper_params.trainer == "pure_text_ei":
        algorithm |= get_changed_fields(hyper_params.pure_text_ei)
    if hyper_params.trainer == "pure_text_malt":
        algorithm |= _build_malt_settings(hyper_params, trained)
    sampling = {"temperature": trained.temperature, "top_p": trained.top_p}
    rest = 1 - hyper_params.test_size
    gate = {"gate": {"num_samples": rl.num_test_iterations}} if "num_test_iterations" in get_changed_fields(rl) else {}
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
        **gate,
    }


def _build_malt_settings(hyper_params: HyperParameters, trained: PureTextAgentParameters) -> dict[str, Any]:
    settings: dict[str, Any] = {} if trained.dpo_beta is None else {"beta": trained.dpo_beta}
    if count := hyper_params.pure_text_malt.num_initial_ei_iterations:
        settings["num_initial_ei_epochs"] = count
        if initial := get_changed_fields(hyper_params.pure_text_ei):
            settings["initial_ei"] = initial
    return settings


def _find_provider_problems(agents: Mapping[str, PureTextAgentParameters]) -> list[Problem]:
    fix = "use OpenAI, with OPENAI_BASE_URL set to the URL of a service with its API, or set freeze_agent"
    return [
        Problem(f"hyper_params.agents.{name}.model_provider", "OpenRouter does not fine-tune models", fix)
        for name, params in agents.items()
        if params.model_provider == "OpenRouter" and not params.freeze_agent
    ]


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
