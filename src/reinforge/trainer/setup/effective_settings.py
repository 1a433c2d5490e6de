"""The settings that a run prints before it starts: what it does, with which values."""

from __future__ import annotations

import platform
from typing import Any

from reinforge.config.finetuning_blocks import LimitsConfig
from reinforge.config.pipeline import PipelineStage, list_stages
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.learning_rate import describe_learning_rate
from reinforge.engine.model.source import describe_source
from reinforge.evaluation.statistics import list_names
from reinforge.files import to_json
from reinforge.port_bases import DescribesSettings
from reinforge.rollout.models.policy_llm import PolicyLLM
from reinforge.trainer.gate import describe_power
from reinforge.trainer.setup.compatibility import can_serve_policy, describe_comparisons
from reinforge.trainer.setup.parts import Parts
from reinforge.types.sample import LossSpec, Needs


def effective_settings(parts: Parts) -> list[tuple[str, str]]:
    """Returns the effective settings to print: name and value, in the order of the loop."""
    config = parts.config
    adapter = parts.adapter
    of_backend = adapter.effective_settings(config) if isinstance(adapter, DescribesSettings) else None
    remote = [f"{name}: {llm.endpoint}" for name, llm in parts.llms.items() if hasattr(llm, "endpoint")]
    adapters: dict[str, list[str]] = {}
    for name, llm in parts.llms.items():
        if isinstance(llm, PolicyLLM) and llm.adapter is not None:
            adapters.setdefault(llm.adapter, []).append(name)
    file = config.run_configuration.validation_config_file if config.run_configuration else None
    validated = f"with {', '.join(parts.held_out_evaluators)} on the examples of {file}" if file else None
    compared = describe_comparisons(parts.evaluators, parts.held_out_evaluators, parts.reward_metric)
    shown: list[tuple[str, str | None]] = [
        ("agent", parts.workflow.source),
        ("examples", ", ".join(f"{len(items)} {name}" for name, items in parts.splits.items())),
        ("dataset", f"rows of the shape {parts.shape}" if parts.shape else None),
        ("sends data to", ", ".join(remote) if remote else None),
        ("adapters", "; ".join(f"{n}: {', '.join(e)}" for n, e in adapters.items()) if adapters else None),
        ("validate", validated),
        ("reward", f"{parts.reward_metric}; the verdict uses {parts.gate_metric}"),
        ("compares", compared),
        ("verdict", _describe_verdict(parts)),
        ("trackers", _describe_trackers(config) if config.trackers else None),
        *_describe_training(parts),
        ("sampling", _describe_sampling(parts)),
        ("overlap", _describe_overlap(config.limits) if config.limits.max_staleness else None),
        *(_training_settings(parts) if of_backend is None else of_backend),
    ]
    return [(name, text) for name, text in shown if text is not None]


def _describe_training(parts: Parts) -> list[tuple[str, str]]:
    if parts.config.pipeline:
        from reinforge.trainer.setup.pipeline import describe_stages  # for a pipeline alone

        return describe_stages(parts.trajectory_builder, parts.splits)
    settings = getattr(parts.trajectory_builder, "trajectory_builder_config", None)
    algorithm = getattr(parts.algorithm, "config", None)
    chosen = algorithm.model_dump(exclude={"reward"}) if algorithm is not None else {}
    return [
        ("collect", _format_settings(settings.model_dump(exclude={"reward"})) if settings else ""),
        ("algorithm", f"{type(parts.algorithm).__name__}: {_format_settings(chosen)}"),
    ]


def _describe_verdict(parts: Parts) -> str:
    """Returns how small an improvement the verdict can show; a prompt or a conversation counts once."""
    names = list_names((str(item.id) for item in parts.splits["confirm"]), parts.clusters)
    return describe_power(parts.config.gate, names)


def _describe_trackers(config: FinetuneConfig) -> str:
    """Returns `board: tensorboard; team: wandb (https://api.wandb.ai)`."""
    urls = {name: getattr(tracker, "url", "") for name, tracker in config.trackers.items()}
    types = {name: f"{name}: {tracker.static_type}" for name, tracker in config.trackers.items()}
    return "; ".join(f"{text} ({urls[name]})" if urls[name] else text for name, text in types.items())


def _describe_overlap(limits: LimitsConfig) -> str:
    versions = f"{limits.max_staleness} version{'s' * (limits.max_staleness > 1)}"
    kept = "; replies in flight continue with new weights"
    fates = {
        "keep": kept,
        "recompute": f"{kept} once their keys and values are recomputed",
        "abort": "; replies in flight are sampled again",
    }
    fate = fates.get(limits.in_flight, "")
    return f"later epochs are sampled while a job trains; no trained token is more than {versions} old{fate}"


def _describe_sampling(parts: Parts) -> str:
    if not can_serve_policy(parts.adapter):
        return "as the agent and its endpoint say"
    return ", ".join(f"{name} {value:g}" for name, value in parts.config.sampling.model_dump().items())


def _training_settings(parts: Parts) -> list[tuple[str, str]]:
    if can_serve_policy(parts.adapter):
        return _engine_settings(parts)
    entries = {name: parts.llms[name].model_name for name in getattr(parts.trajectory_builder, "policies", ())}
    models = ", ".join(f"{name} ({model})" for name, model in entries.items()) or "the agent's model"
    return [("training", f"{models}, trained by {type(parts.adapter).__name__}")]


def _engine_settings(parts: Parts) -> list[tuple[str, str]]:
    config = parts.config
    model = getattr(parts.adapter, "model", None)  # the folder of a bundled model
    policy = config.policy.model_copy(update={"model": model}) if model else config.policy
    stages = list_stages(config)
    optimizers = [
        (f"optimizer {stage.name}", _describe_optimizer(stage.complete_policy(policy), _find_loss(parts, stage)))
        for stage in stages
    ]
    return [
        *([("model", describe_source(policy))] if policy.model is not None else []),
        *([("critic", _describe_critic(config))] if getattr(parts.algorithm, "needs", Needs()).values else []),
        *(optimizers or [("optimizer", _describe_optimizer(policy, getattr(parts.algorithm, "loss", None)))]),
        *([("dtype", "auto: measured when the run starts")] if config.policy.dtype == "auto" else []),
        *([("memory", memory)] if (memory := _describe_memory(config)) else []),
        ("device", f"{config.device} on {platform.machine()}, {platform.system()}, seed {config.seed}"),
    ]


def _find_loss(parts: Parts, stage: PipelineStage) -> LossSpec:
    from reinforge.algorithms.staged import StagedAlgorithm  # for a pipeline alone

    assert isinstance(parts.algorithm, StagedAlgorithm)  # of a pipeline
    return parts.algorithm.get_loss(stage.first)


def _describe_optimizer(policy: PolicyConfig, loss: LossSpec | None) -> str:
    batch = policy.batch
    steps = f"{batch.steps_per_job} steps per job" if batch.steps_per_job else f"{batch.batch_size} samples per step"
    rate = describe_learning_rate(policy, loss)
    return f"{policy.optimizer.name}, lr {rate}, {policy.schedule.name}, {steps}"


def _describe_memory(config: FinetuneConfig) -> str:
    savings = {
        "bfloat16 with float32 master weights": config.policy.dtype == "bfloat16",
        "activation checkpointing": config.policy.activation_checkpointing,
    }
    return "; ".join(text for text, holds in savings.items() if holds)


def _describe_critic(config: FinetuneConfig) -> str:
    critic = config.policy.critic
    trained = "and the policy's layers" if critic.shares_trunk else "alone"
    return f"a linear value head, lr {critic.learning_rate:g}; its loss trains the head {trained}"


def _format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str) else to_json(value)}" for name, value in settings.items()
    )
