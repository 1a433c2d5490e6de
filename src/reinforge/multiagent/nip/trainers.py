"""`run_experiment` and `prepare_experiment` of neural-interactive-proofs: an experiment as a run of the training loop.

    summary = run_experiment(hyper_params, ExperimentSettings(run_id="first"))
    summary = run_experiment(hyper_params, run_id="first", num_rollout_workers=8)         # the same, by keywords
    print(yaml.safe_dump(experiment_config(hyper_params, settings)))      # as a file for `reinforge finetune`

Run folder, journal, resume and gate work as in every run. The agents of a shared-model group use and train one LoRA
adapter of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError, Problem
from reinforge.multiagent.nip.experiment import ExperimentSettings, HyperParameters
from reinforge.multiagent.nip.experiment_sections import experiment_config
from reinforge.rollout.isolation.threads import LoopThread
from reinforge.runs.progress import RunProgress, default_progress
from reinforge.runs.run_folder import check_run_name
from reinforge.runs.summary import RunSummary
from reinforge.trainer.api import Rows, run_blocking
from reinforge.trainer.options import RunOptions
from reinforge.trainer.setup.check import check_config

NO_EFFECT = {
    *("tqdm_func", "global_tqdm_step_fn", "ignore_cache", "num_dataset_threads", "pin_memory", "dataset_on_device"),
    *("enable_efficient_attention", "allow_auto_generated_run_id", "resume_if_safe", "allow_resuming_wandb_run"),
    *("allow_overriding_wandb_config", "print_wandb_run_url", "wandb_project", "wandb_entity", "wandb_tags"),
    "wandb_group",
}
"""Keywords of `run_experiment` of neural-interactive-proofs that are taken and change nothing.

They are about its progress bars, its cache of datasets, tensors that text has none of, and Weights & Biases.
"""
REFUSED = {
    "use_wandb": "remove it; the run folder has the metrics (training_metrics.jsonl), `reinforge report` shows them",
    "profiler": "remove it; profile the process from outside",
    "force_more_iterations": "give the longer run a run_id of its own, and the model of the shorter one as model_name",
}
"""Keywords that are only taken if they are false, each with what to do instead."""


@dataclass(frozen=True, slots=True)
class PreparedExperimentInfo:
    total_num_iterations: int


def run_experiment(
    hyper_params: HyperParameters,
    settings: ExperimentSettings | None = None,
    dataset: str | Path | Rows | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    progress: RunProgress | None = None,
    **keywords: Any,
) -> RunSummary:
    """Trains the agents of an experiment and returns the verdict with a confidence interval.

    An unfinished run with the same `run_id` is resumed.

    Args:
        settings: How it is run; None: as the keywords say.
        overrides: Further keys of any section, as in a file; they take precedence. `{"trainer_adapters": {"adapter":
            {"_type": "openai"}}}` trains through a fine-tuning service.
        keywords: Fields of `ExperimentSettings`, and what `run_experiment` of neural-interactive-proofs takes besides
            (`NO_EFFECT`, `REFUSED`).

    Returns:
        The summary, as in `summary.json`, with `folder`.

    Raises:
        ConfigError: The validation of the run failed; lists every problem.
        ReinforgeError: The run failed; its folder has a summary with the reason.
    """
    settings = build_settings(settings, keywords)
    data = experiment_config(hyper_params, settings, dataset, overrides=overrides)
    loaded = build_config(data, expanded_sections=("llms",))
    options = RunOptions(settings.run_id, progress or default_progress(), smoke=settings.test_run)
    if settings.run_id is not None:
        check_run_name(settings.run_id, "run_id")
        folder = Path(loaded.config.finetuning.output_dir, settings.run_id)
        if not settings.test_run and (folder / "run.sqlite").is_file():
            options.resume = folder
    return run_blocking(loaded, options)


def prepare_experiment(
    hyper_params: HyperParameters,
    settings: ExperimentSettings | None = None,
    dataset: str | Path | Rows | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> PreparedExperimentInfo:
    """Validates an experiment, its dataset included, and returns what is known of it; nothing is run.

    Raises:
        ConfigError: Lists every problem.
    """
    settings = build_settings(settings, keywords)
    data = experiment_config(hyper_params, settings, dataset, overrides=overrides)
    loaded = build_config(data, expanded_sections=("llms",))
    loop = LoopThread("prepare-experiment")
    try:
        report = loop.run(check_config(loaded))
    finally:
        loop.close()
    if report.problems:
        raise ConfigError(report.problems)
    return PreparedExperimentInfo(hyper_params.rl.num_iterations)


def build_settings(settings: ExperimentSettings | None, keywords: Mapping[str, Any]) -> ExperimentSettings:
    """Returns the settings of a call that gives them as an object or by keywords.

    Raises:
        ConfigError: Names every keyword that is refused.
        TypeError: A keyword is unknown, or is given besides the object.
    """
    known = {field.name for field in fields(ExperimentSettings)}
    if unknown := [name for name in keywords if name not in known | NO_EFFECT | REFUSED.keys()]:
        raise TypeError(f"run_experiment has no argument {unknown[0]!r}")
    problems = [
        Problem(name, f"is {keywords[name]!r}, but this is not supported", fix)
        for name, fix in REFUSED.items()
        if keywords.get(name)
    ]
    if problems:
        raise ConfigError(problems)
    given = {name: value for name, value in keywords.items() if name in known}
    if settings is not None and given:
        raise TypeError(f"run_experiment got settings and, besides them, {', '.join(given)}; set it in the settings")
    return settings or ExperimentSettings(**given)
