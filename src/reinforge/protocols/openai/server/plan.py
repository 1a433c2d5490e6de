"""What a fine-tuning job is as a run: the configuration that `reinforge finetune` would be given.

    supervised      builder dataset, algorithm sft; validated by the loss on the held-out replies
    dpo             builder dataset, algorithm dpo; validated by how often the preferred reply is more likely
    reinforcement   builder group, algorithm grpo, a plain chat; rewarded and validated by the grader

Every row of the training file is trained on. With a validation file the run ends with a verdict on rows that it never
saw; without one, a few training rows show that the loss falls, and there is no verdict.

What a hyperparameter is if it is `auto`:

    n_epochs                    3; with fewer than 34 rows as many as make 100 rows, at most 25 (OpenAI's cookbook)
    batch_size                  supervised and dpo: a tenth of the rows, from 1 to 32; reinforcement: at most 16 prompts
    learning_rate_multiplier    1: times the default for the model's size, for LoRA, and for imitation
    beta                        0.1
    compute_multiplier          1: 8 replies to each prompt
    eval_interval, eval_samples 5 steps; 1 reply to each held-out prompt
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.config.policy import PolicyConfig
from reinforge.engine.learning_rate import IMITATION, choose_learning_rate, count_parameters
from reinforge.engine.model.preflight import has_adapters
from reinforge.engine.model.source import MODEL, find_base_source, find_source
from reinforge.errors import ConfigError, Problem
from reinforge.protocols.openai.graders.schema import Grader, list_models
from reinforge.protocols.openai.server.records import FineTuningJob
from reinforge.protocols.openai.server.training_rows import ROW, ROW_ID
from reinforge.trainer.api import build_sections
from reinforge.types.sample import LossSpec

RUN = "run"  # name of the run folder of a job, inside the job's folder
TRAINING_ROWS, VALIDATION_ROWS = "training.jsonl", "validation.jsonl"
REWARD = "score"
NUM_GENERATIONS = 8
KEPT_CHECKPOINTS = 3  # the newest checkpoints of a job, which are served when it has succeeded
MIN_ROWS, MAX_EPOCHS, USUAL_EPOCHS = 100, 25, 3


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How jobs run."""

    max_running: int = 1
    device: str = "auto"
    allow_python: bool = False
    max_reply_tokens: int = 1024
    poll_s: float = 0.5  # seconds between two looks at the metrics of a running job
    relaunch_s: float = 10.0  # seconds before a process is started again that could not be started


@dataclass(frozen=True)
class JobInput:
    """What a job is made of."""

    job: FineTuningJob
    policy: PolicyConfig
    folder: Path
    num_rows: int
    num_validation_rows: int = 0  # rows of the validation file; 0: there is none
    grader: Grader | None = None
    judges: Mapping[str, str] = field(default_factory=dict)
    settings: JobSettings = field(default_factory=JobSettings)


@dataclass(frozen=True, slots=True)
class JobPlan:
    config: dict[str, Any]
    hyperparameters: dict[str, Any]
    num_steps: int


def plan_job(given: JobInput) -> JobPlan:
    asked = dict(given.job.method_settings.get("hyperparameters") or {})
    is_reinforcement = given.job.method_type == "reinforcement"
    most = 16 if is_reinforcement else 32
    usual = max(1, min(most, given.num_rows if is_reinforcement else given.num_rows // 10))
    batch_size = min(int(_choose(asked, "batch_size", usual)), given.num_rows)
    n_epochs = int(_choose(asked, "n_epochs", _choose_epochs(given.num_rows)))
    multiplier = float(_choose(asked, "learning_rate_multiplier", 1.0))
    steps_per_pass = math.ceil(given.num_rows / batch_size)
    hyperparameters: dict[str, Any] = {
        "n_epochs": n_epochs, "batch_size": batch_size, "learning_rate_multiplier": multiplier,
    }  # fmt: skip
    if is_reinforcement:
        hyperparameters |= {
            "compute_multiplier": float(_choose(asked, "compute_multiplier", 1.0)),
            "eval_interval": int(_choose(asked, "eval_interval", 5)),
            "eval_samples": int(_choose(asked, "eval_samples", 1)),
            "reasoning_effort": "default",
        }
    elif given.job.method_type == "dpo":
        hyperparameters["beta"] = float(_choose(asked, "beta", 0.1))
    num_steps = steps_per_pass * n_epochs
    build = _build_reinforcement if is_reinforcement else _build_offline
    sections = build(given, hyperparameters)
    sections["finetuning"] |= _build_common(given, hyperparameters, num_steps)
    config = build_sections(**sections)
    config["trainers"]["trainer"]["keep_last"] = KEPT_CHECKPOINTS
    return JobPlan(config, hyperparameters, num_steps)


def _choose(asked: Mapping[str, Any], name: str, usual: float) -> float:
    value = asked.get(name, "auto")
    return usual if value in (None, "auto") else float(value)


def _choose_epochs(num_rows: int) -> int:
    if num_rows * USUAL_EPOCHS >= MIN_ROWS:
        return USUAL_EPOCHS
    return min(MAX_EPOCHS, MIN_ROWS // num_rows)


def _build_common(given: JobInput, hyperparameters: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    held_out = VALIDATION_ROWS if given.num_validation_rows else f"shown-{TRAINING_ROWS}"
    interval = hyperparameters.get("eval_interval", 1)
    finetuning: dict[str, Any] = {
        "seed": given.job.seed,
        "device": given.settings.device,
        "output_dir": str(given.folder),
        "policy": _build_policy(given, hyperparameters, num_steps),
        "run_configuration": {"validation_dataset": str(given.folder / held_out), "validation_interval": interval},
        "transcripts": {"save": False},
    }
    if not given.num_validation_rows:  # the shown rows are rows of the training file, so there is no verdict on them
        finetuning["splits"] = {"key": ROW_ID, "near_duplicates": "allow"}
    return finetuning


def _build_policy(given: JobInput, hyperparameters: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    policy = given.policy.model_dump(mode="json", exclude_unset=True)
    multiplier, is_offline = hyperparameters["learning_rate_multiplier"], given.job.method_type != "reinforcement"
    if multiplier != 1.0:
        loss = LossSpec(IMITATION) if given.job.method_type == "supervised" else None
        count = _count_parameters(given.policy)
        if count is None and given.policy.init != "random" and given.policy.optimizer.learning_rate is None:
            message = f"the size of {given.job.model} is not known before it is loaded, so nothing can be multiplied"
            raise ConfigError(Problem("learning_rate_multiplier", message, "leave it out, or set it to auto"))
        rate = choose_learning_rate(given.policy, count or 0, uses_lora=has_adapters(given.policy), loss=loss)
        policy.setdefault("optimizer", {})["learning_rate"] = rate.value * multiplier
    warmup = min(given.policy.schedule.warmup_steps, num_steps // 10)
    policy.setdefault("schedule", {})["warmup_steps"] = warmup
    samples = 2 if given.job.method_type == "dpo" else 1  # a pair is two samples
    batch = {"batch_size": samples * hyperparameters["batch_size"]} if is_offline else {"steps_per_job": 1}
    policy["batch"] = {**policy.get("batch", {}), **batch}
    return policy


def _count_parameters(policy: PolicyConfig) -> int | None:
    count = count_parameters(policy.model)
    if count is not None or policy.model is None:
        return count
    folder = Path(policy.model)
    source = find_base_source(folder, MODEL) if folder.is_dir() else find_source(policy.model, MODEL, policy.revision)
    if source is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.location, "config.json", revision=source.revision)
    return count_parameters(str(Path(found).parent)) if isinstance(found, str) else None


def _build_offline(given: JobInput, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"_type": "sft"}
    if given.job.method_type == "dpo":
        algorithm = {"_type": "dpo", "beta": hyperparameters["beta"]}
    return {
        "llms": {"policy": {"_type": "policy"}},
        "workflow": {"_type": "held_out_replies"},
        "evaluation": {
            "general": {"max_concurrency": 8, "dataset": _build_dataset(given)},
            "evaluators": {REWARD: {"_type": "held_out_replies"}},
        },
        "builder": {"_type": "dataset"},
        "adapter": {"_type": "local"},
        "finetuning": {
            "num_epochs": hyperparameters["n_epochs"],
            "algorithm": algorithm,
            "gate": {"allow_no_verdict": True},
        },
    }


def _build_reinforcement(given: JobInput, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    assert given.grader is not None  # the request is refused without one
    judges = {f"judge-{number}": name for number, name in enumerate(list_models(given.grader))}
    grader = {
        "_type": "grader",
        "grader": given.job.method_settings["grader"],
        "models": {name: entry for entry, name in judges.items()},
        "item_key": ROW,
        "allow_python": given.settings.allow_python,
    }
    batch_size = hyperparameters["batch_size"]
    generations = max(2, round(NUM_GENERATIONS * hyperparameters["compute_multiplier"]))
    return {
        "llms": {
            "policy": {"_type": "policy"},
            **{entry: {"_type": "local", "model": given.judges[name]} for entry, name in judges.items()},
        },
        "workflow": {"_type": "chat", "llm": "policy", "max_tokens": given.settings.max_reply_tokens},
        "evaluation": {
            "general": {"max_concurrency": 64, "dataset": _build_dataset(given)},
            "evaluators": {REWARD: grader},
        },
        "builder": {
            "_type": "group",
            "num_generations": generations,
            "examples_per_epoch": batch_size,
            "drop_last": False,  # each pass trains on every row
        },
        "adapter": {"_type": "local"},
        "finetuning": {
            "num_epochs": math.ceil(given.num_rows / batch_size) * hyperparameters["n_epochs"],
            "algorithm": {"_type": "grpo"},
            "curriculum_learning": {"min_reward_diff": 1e-6},
            "gate": {"num_samples": hyperparameters["eval_samples"], "allow_no_verdict": True},
        },
    }


def _build_dataset(given: JobInput) -> dict[str, Any]:
    return {"_type": "jsonl", "file_path": str(given.folder / TRAINING_ROWS)}
