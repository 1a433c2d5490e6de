"""The reference's trainers, as presets of the one loop: a description of an experiment becomes a configuration.

    pure_text_ei     algorithm expert_iteration   dialogues; what is good enough is imitated
    pure_text_malt   algorithm malt               trees; pairs at every decision of every trained agent
    pure_text_grpo   algorithm grpo               several dialogues of an example, compared for each agent by itself

    summary = run_experiment(hyper_params, ExperimentSettings(run_id="first"))
    print(yaml.safe_dump(experiment_config(hyper_params, settings)))      # the same as a file, for `reinforge finetune`

Run folder, journal, resume and gate are those of every run. Agents of one shared-model group speak by one LoRA adapter
of the model, and are trained in it together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError, Problem
from reinforge.multiagent.agent_parameters import AgentParameters
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.nip.parameters import (
    ExperimentSettings,
    HyperParameters,
    PureTextAgentParameters,
    changed_fields,
    refuse_unhonoured,
    refuse_what_services_choose,
)
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.registry import REGISTRY, Registry
from reinforge.runs.progress import RunProgress, default_progress
from reinforge.runs.summary import RunSummary
from reinforge.trainer.api import Rows, dataset_block, run_anywhere, sections
from reinforge.trainer.run import RunOptions

ALGORITHMS = {"pure_text_ei": "expert_iteration", "pure_text_malt": "malt", "pure_text_grpo": "grpo"}
EPISODES_OF_A_WORKER = 16
SELECT_SHARE = 0.15
"""Of the examples that the verdict is not on, what the best checkpoint is chosen by."""
SHARED = ("model_name", "temperature", "top_p", "fine_tune_from_scratch", "lora_rank", "lora_alpha_factor")
"""Parameters in which all trained agents of a run agree."""
SPOKEN = ("max_response_words", "max_tokens_per_message", "num_invalid_generation_retries", "prompt", "prompt_file")
"""Parameters of an agent that the protocol's configuration has under the same names."""


def run_experiment(
    hyper_params: HyperParameters,
    settings: ExperimentSettings,
    dataset: str | Path | Rows | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    progress: RunProgress | None = None,
    registry: Registry = REGISTRY,
) -> RunSummary:
    """Trains the agents of an experiment and says, with an interval, whether they got better.

    A run of the same `run_id` that was stopped goes on.

    Args:
        hyper_params: The experiment.
        settings: How it is run.
        dataset: Replaces the experiment's: a file, or rows.
        overrides: Further keys of any section, as a file has them; they win. `{"trainer_adapters": {"adapter":
            {"_type": "openai"}}}` trains through a fine-tuning service.
        progress: What a person sees; None: chosen by the terminal.
        registry: Where component types are looked up.

    Returns:
        The summary, as `summary.json` holds it, with `folder`.

    Raises:
        ConfigError: Something was wrong that could be seen before any work started, with every problem.
        ReinforgeError: The run failed; its folder holds a summary with the reason.
    """
    loaded = build_config(experiment_config(hyper_params, settings, dataset, overrides=overrides), registry=registry)
    options = RunOptions(settings.run_id, progress or default_progress(), smoke=settings.test_run)
    folder = Path(loaded.config.finetuning.output_dir, settings.run_id)
    if not settings.test_run and (folder / "run.sqlite").is_file():
        options.resume = folder
    return run_anywhere(loaded, options, registry)


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
        dataset: Replaces the experiment's.
        overrides: Further keys of any section; they win.

    Raises:
        ConfigError: Values cannot be honoured, or do not fit each other; each is named.
    """
    refuse_unhonoured(hyper_params, settings)
    trained = trained_params(hyper_params)
    workers, evaluator = settings.num_rollout_workers, {"_type": "verifier_accuracy"}
    rows = dataset_block(hyper_params.dataset if dataset is None else dataset)
    is_grpo = hyper_params.trainer == "pure_text_grpo"
    scratch = {} if is_grpo else {"fine_tune_from_scratch": trained.fine_tune_from_scratch}
    finetuning = _finetuning(hyper_params, trained)
    adapter = {"_type": "local", **scratch}
    if _wanted_adapter(overrides or {}) == "openai":
        refuse_what_services_choose(hyper_params.rl, trained)
        adapter = {"_type": "openai", "n_epochs": hyper_params.text_rl.num_epochs, **scratch}
        finetuning["policy"] = {"model": trained.model_name}
    made = sections(
        llms=_llms(hyper_params),
        workflow=_workflow(hyper_params),
        evaluation={
            "general": {"max_concurrency": EPISODES_OF_A_WORKER * workers, "dataset": rows},
            "evaluators": {"accuracy": evaluator},
        },
        builder=_builder(hyper_params),
        adapter=adapter,
        finetuning={**finetuning, "output_dir": str(settings.output_dir)},
    )
    return _merged(made, overrides or {})


def trained_params(hyper_params: HyperParameters) -> PureTextAgentParameters:
    """Returns the parameters of the first trained agent, with whom all others agree where a run has one value.

    Raises:
        ConfigError: None is trained, or they differ.
    """
    found = {name: params for name, params in hyper_params.agents.items() if not params.freeze_agent}
    if not found:
        raise ConfigError(
            Problem("hyper_params.agents", "no agent can be trained", "leave one with freeze_agent false")
        )
    problems = []
    for field in SHARED:
        values = {name: getattr(params, field) for name, params in found.items()}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{name} {value!r}" for name, value in values.items())
            fix = "give all trained agents the same value"
            problems.append(Problem(f"hyper_params.agents.*.{field}", f"a run has one for all it trains: {told}", fix))
    if problems:
        raise ConfigError(problems)
    return next(iter(found.values()))


def protocol_of(hyper_params: HyperParameters, registry: Registry = REGISTRY) -> ProtocolHandler:
    """Returns the handler of an experiment's protocol.

    Raises:
        ConfigError: There is no such protocol, or its settings do not fit.
    """
    block = _workflow(hyper_params)
    component = registry.get("workflow", block.pop("_type"), "hyper_params.interaction_protocol")
    handler = getattr(component.factory, "handler", None)
    if handler is None:
        name = hyper_params.interaction_protocol
        raise ConfigError(Problem("hyper_params.interaction_protocol", f"{name} is no protocol", "such as nip, debate"))
    return handler(component.config_type(**block))


def agents_of(hyper_params: HyperParameters, project_root: str | Path = ".") -> dict[str, PureTextWholeAgent]:
    """Returns the agents of an experiment by name, for groups that are used by themselves.

    Args:
        hyper_params: The experiment.
        project_root: Folder below which `prompt_file` is looked up.
    """
    found = {}
    for name, given in _workflow(hyper_params)["agents"].items():
        params = AgentParameters(**given)
        if params.prompt_file is not None:
            text = Path(project_root, params.prompt_file).read_text(encoding="utf-8")
            params = params.model_copy(update={"prompt": text})
        group = group_of(name, hyper_params.agents[name])
        found[name] = PureTextWholeAgent(name, params, llm=group, model_group=group)
    return found


def group_of(name: str, params: PureTextAgentParameters) -> str:
    """Returns the shared-model group of an agent, which is its own where it names none."""
    return params.shared_model_group or name


def _llms(hyper_params: HyperParameters) -> dict[str, dict[str, Any]]:
    """Returns an entry for each group: a policy where somebody of it is trained, else a model that stays as it is."""
    groups: dict[str, list[PureTextAgentParameters]] = {}
    for name, params in hyper_params.agents.items():
        groups.setdefault(group_of(name, params), []).append(params)
    trained = [group for group, params in groups.items() if not all(each.freeze_agent for each in params)]
    entries: dict[str, dict[str, Any]] = {}
    for group, members in groups.items():
        if group not in trained:
            entries[group] = {"_type": "local", "model": members[0].model_name}
        else:
            entries[group] = {"_type": "policy", **({"adapter": group} if len(trained) > 1 else {})}
    return entries


def _workflow(hyper_params: HyperParameters) -> dict[str, Any]:
    """Returns the protocol with its agents; fields at their defaults are left to the protocol's own."""
    name = hyper_params.interaction_protocol
    block: dict[str, Any] = {"_type": name, **changed_fields(hyper_params.protocol_common)}
    if (own := getattr(hyper_params, f"{name}_protocol", None)) is not None:
        block |= changed_fields(own)
    if hyper_params.trainer == "pure_text_malt":
        block["num_responses"] = hyper_params.pure_text_malt.num_responses_per_timestep
    block["agents"] = {name: _agent(name, params) for name, params in hyper_params.agents.items()}
    return block


def _agent(name: str, params: PureTextAgentParameters) -> dict[str, Any]:
    drawn = ("temperature", "top_p") if params.freeze_agent else ()
    given = {field: getattr(params, field) for field in (*SPOKEN, *drawn)}
    known = {field: value for field, value in given.items() if value is not None}
    return {"llm": group_of(name, params), "freeze_agent": params.freeze_agent, **known}


def _builder(hyper_params: HyperParameters) -> dict[str, Any]:
    """Returns how an iteration is collected.

    Raises:
        ConfigError: Rollouts of an iteration do not make whole groups.
    """
    text, count = hyper_params.text_rl, hyper_params.rl.rollouts_per_iteration
    siblings = hyper_params.pure_text_grpo.num_generations if hyper_params.trainer == "pure_text_grpo" else 1
    if count is not None and count % siblings:
        message = f"{count} dialogues are no whole number of groups of pure_text_grpo.num_generations, {siblings}"
        raise ConfigError(Problem("hyper_params.rl.rollouts_per_iteration", message, f"use a multiple of {siblings}"))
    block: dict[str, Any] = {"_type": "agents", "num_generations": siblings}
    if count is not None:
        block["examples_per_epoch"] = count // siblings
    weights = {name: params.agent_weight for name, params in hyper_params.agents.items() if params.agent_weight != 1}
    if weights:
        block["agent_weights"] = weights
    names = ("fine_tune_on_all_previous_rollouts", *(n for n in vars(text) if n.startswith("verifier_guess_")))
    return block | {name: value for name, value in changed_fields(text).items() if name in names}


def _finetuning(hyper_params: HyperParameters, trained: PureTextAgentParameters) -> dict[str, Any]:
    rl, text = hyper_params.rl, hyper_params.text_rl
    is_grpo = hyper_params.trainer == "pure_text_grpo"
    policy: dict[str, Any] = {
        "model": trained.model_name,
        "optimizer": {"learning_rate": rl.lr},
        "batch": {"passes": rl.num_epochs if is_grpo else text.num_epochs},
    }
    if trained.lora_rank is not None:
        policy["lora"] = {"rank": trained.lora_rank, "alpha": trained.lora_alpha}
    algorithm = {"_type": ALGORITHMS[hyper_params.trainer]}
    if hyper_params.trainer == "pure_text_ei":
        algorithm |= changed_fields(hyper_params.pure_text_ei)
    drawn = {"temperature": trained.temperature, "top_p": trained.top_p}
    seen = 1 - hyper_params.test_size
    return {
        "num_epochs": rl.num_iterations,
        "policy": policy,
        "algorithm": algorithm,
        "sampling": {name: value for name, value in drawn.items() if value is not None},
        "splits": {
            "train": seen * (1 - SELECT_SHARE),
            "select": seen * SELECT_SHARE,
            "confirm": hyper_params.test_size,
        },
        "run_configuration": {"validation_interval": 1 if text.test_scheme == "all" else rl.num_iterations},
        "transcripts": {"save": text.save_transcripts, "format": text.transcript_format},
        "seed": hyper_params.seed,
    }


def _wanted_adapter(overrides: Mapping[str, Any]) -> str:
    """Returns the `_type` of the trainer adapter."""
    return str(overrides.get("trainer_adapters", {}).get("adapter", {}).get("_type", "local"))


def _merged(made: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns two trees of keys as one; where both have a value the second one wins.

    A component of another `_type` replaces the whole block: settings of one type mean nothing to another.
    """
    merged = dict(made)
    for key, value in overrides.items():
        old, merged[key] = made.get(key), value
        if not (isinstance(value, Mapping) and isinstance(old, Mapping)):
            continue
        if value.get("_type", old.get("_type")) == old.get("_type"):
            merged[key] = _merged(old, value)
    return merged
