"""`reinforge.finetune(...)`: a whole run from Python, also inside a notebook's running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import build_config
from reinforge.errors import ConfigError, Problem
from reinforge.registry import Registry
from reinforge.runs.progress import RunProgress, default_progress
from reinforge.runs.summary import RunSummary
from reinforge.trainer.options import RunOptions
from reinforge.trainer.resume import find_run
from reinforge.trainer.run import run_async, run_config

LLM = "agent"
REWARD = "reward"
DATASETS = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}

Rows = Sequence[Mapping[str, Any]]


def finetune(
    workflow: Callable[..., Any],
    dataset: str | Path | Rows,
    reward: str | Callable[..., Any],
    model: str | Path,
    epochs: int = 10,
    *,
    num_generations: int = 8,
    examples_per_epoch: int | None = None,
    max_concurrency: int = 64,
    algorithm: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    run_name: str | None = None,
    output_dir: str | Path | None = None,
    resume: str | Path | None = None,
    progress: RunProgress | None = None,
    registry: Registry | None = None,
) -> RunSummary:
    """Trains the model behind an agent and measures, with a confidence interval, whether the agent got better.

    Example:
        summary = reinforge.finetune(agent, "questions.jsonl", "exact_match", "path/to/model", epochs=20)
        print(summary.improvement, summary.promoted, summary.folder / "model")

    Args:
        workflow: The agent: `async def agent(item, llm, context)`, or the same without `async`.
        dataset: A JSON, JSONL, CSV or Parquet file, a folder that Hugging Face's `save_to_disk` wrote, or rows such as
            `{"id": "1", "question": ..., "answer": ...}`.
        reward: A function `reward(item)` or `reward(output, expected)`, or the `_type` of an evaluator.
        model: A folder, a hub id, or `bundled:NAME`.
        epochs: How often to collect and train.
        num_generations: Episodes of each example in an epoch, compared by their rewards.
        examples_per_epoch: Training examples of an epoch; None: all.
        max_concurrency: Episodes that run at the same time.
        algorithm: `{"_type": "grpo", ...}`; None: GRPO with its defaults.
        settings: Further keys of the `finetuning` section, such as `{"policy": {...}, "seed": 1}`; `policy` is
            merged with `model`.
        run_name: Name of the run folder; None: the date and a random suffix.
        output_dir: Folder of all run folders; None: `.reinforge/runs`.
        resume: Name or folder of a stopped run of the same task to resume, or `last`; None: a new run.
        progress: The progress display; None: chosen by the terminal.
        registry: Component types; None: all installed ones.

    Returns:
        The summary, as in `summary.json`, with the run's `folder`.

    Raises:
        ConfigError: The configuration or the data is wrong; lists every problem, and nothing was started.
        ReinforgeError: The run failed; the summary in its folder holds the reason.
    """
    given = dict(settings or {})
    finetuning: dict[str, Any] = {"num_epochs": epochs, "policy": {"model": str(model), **given.pop("policy", {})}}
    if algorithm is not None:
        finetuning["algorithm"] = dict(algorithm)
    if output_dir is not None:
        finetuning["output_dir"] = str(output_dir)
    builder: dict[str, Any] = {"_type": "group", "num_generations": num_generations}
    if examples_per_epoch is not None:
        builder["examples_per_epoch"] = examples_per_epoch
    data = build_sections(
        llms={LLM: {"_type": "policy"}},
        workflow={"_type": "python", "function": workflow, "llm": LLM},
        evaluation={
            "general": {"max_concurrency": max_concurrency, "dataset": build_dataset_block(dataset)},
            "evaluators": {REWARD: {"_type": reward} if isinstance(reward, str) else _python_block(reward)},
        },
        builder=builder,
        adapter={"_type": "local"},
        finetuning={**finetuning, **given},
    )
    loaded = build_config(data, registry=registry)
    options = RunOptions(run_name=run_name, progress=progress or default_progress())
    if resume is not None:
        options.resume = find_run(str(resume), Path(loaded.config.finetuning.output_dir))
    return run_blocking(loaded, options, registry)


def build_sections(
    *,
    llms: Mapping[str, Any],
    workflow: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    builder: Mapping[str, Any],
    adapter: Mapping[str, Any],
    finetuning: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the sections of a configuration with one component of each kind; its first evaluator is the reward.

    Args:
        llms: The section.
        workflow: The section.
        evaluation: The section `eval`.
        builder: The trajectory builder.
        adapter: The trainer adapter.
        finetuning: Further keys of that section; they take precedence.
    """
    defaults = {
        "enabled": True,
        "trainer": "trainer",
        "trajectory_builder": "builder",
        "trainer_adapter": "adapter",
        "reward_function": {"name": next(iter(evaluation["evaluators"]))},
    }
    return {
        "llms": llms,
        "workflow": workflow,
        "eval": evaluation,
        "trajectory_builders": {"builder": builder},
        "trainer_adapters": {"adapter": adapter},
        "trainers": {"trainer": {"_type": "epoch"}},
        "finetuning": {**defaults, **finetuning},
    }


def _python_block(function: Callable[..., Any]) -> dict[str, Any]:
    return {"_type": "python", "function": function}


def build_dataset_block(dataset: str | Path | Rows) -> dict[str, Any]:
    """Returns the block `eval.general.dataset` for rows, a file or a folder.

    Raises:
        ConfigError: The file's ending is unknown.
    """
    if not isinstance(dataset, str | Path):
        return {"_type": "rows", "rows": list(dataset)}
    if Path(dataset).is_dir():
        return {"_type": "hf_dataset", "file_path": str(dataset)}
    suffix = Path(dataset).suffix.lower()
    if suffix not in DATASETS:
        raise ConfigError(
            Problem(
                "dataset",
                f"{dataset}: unknown file type {suffix!r}",
                f"use {', '.join(DATASETS)}, or pass a list of rows",
            )
        )
    return {"_type": DATASETS[suffix], "file_path": str(dataset)}


def run_blocking(loaded: LoadedConfig, options: RunOptions, registry: Registry | None = None) -> RunSummary:
    """Runs on this thread, or on a new thread if an event loop runs here already (in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_config(loaded, options, registry)
    outcome: list[RunSummary | BaseException] = []

    def body() -> None:
        try:
            outcome.append(asyncio.run(run_async(loaded, options, registry)))
        except BaseException as error:  # noqa: BLE001  raised again on the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=body, name="reinforge-finetune", daemon=True)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
