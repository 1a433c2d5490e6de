"""Trains a tiny model through the whole path, stops the run half-way, resumes it, and checks what it has learned.

    configuration -> episodes -> reward -> training -> stopped by a limit -> resumed -> verdict on fresh episodes
    -> files verified

Each step that can be broken in an installation is checked by what it produces: a model whose reward has not risen, a
verdict without promotion, or a run folder whose files do not match their checksums is a failure of the self-test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import load_config
from reinforge.errors import BudgetReached, JobFailed, StorageError
from reinforge.evaluation.statistics import format_interval
from reinforge.files import replace_file, to_json
from reinforge.runs.journal.verify import verify_run
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.runs.summary import RunSummary
from reinforge.tasks.self_test import SELF_TEST
from reinforge.tasks.starters import Recipe, make_bpe_tokenizer, write_blank_model
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_config

RUN = "self-test"
STOP_AFTER_TOKENS = 1500  # sampled tokens after which the run is stopped; an epoch samples 256, the baseline 100

Run = Callable[[LoadedConfig, RunOptions], RunSummary]


@dataclass(frozen=True, slots=True)
class LearningResult:
    """What the self-test has learned: the mean rewards on `confirm` before and after training, and a sentence."""

    before: float
    after: float
    text: str
    seconds: float


def run_self_test(
    folder: Path, *, device: str = "auto", progress: RunProgress | None = None, run: Run = run_config
) -> LearningResult:
    """Trains, stops, resumes and verifies in an empty folder.

    Raises:
        JobFailed: The model has not learned what any working installation learns.
        StorageError: The run was not stopped and resumed, or its folder is damaged.
        ReinforgeError: The run failed; the message says why.
    """
    started = time.monotonic()
    write_model(folder / "model")
    replace_file(folder / "questions.jsonl", "".join(to_json(row) + "\n" for row in list_questions()))
    shown = progress or SilentProgress()
    options = RunOptions(RUN, shown)
    try:
        run(_load(folder, device, STOP_AFTER_TOKENS), options)
    except BudgetReached:
        pass
    else:
        raise StorageError(f"the run was not stopped after {STOP_AFTER_TOKENS} tokens (limits.max_tokens)")
    summary = run(_load(folder, device, None), RunOptions(progress=shown, resume=folder / "runs" / RUN))
    _require_learning(summary)
    found = verify_run(summary.folder)
    if not found.is_sound:
        damage = "; ".join(f"{each.what}: {each.problem}" for each in found.findings if each.is_damage)
        raise StorageError(f"the run folder does not hold what was written to it: {damage}")
    before, after = summary.confirm_base, summary.confirm_tuned
    assert before is not None  # a promoted model has both
    assert after is not None
    assert before.mean is not None
    assert after.mean is not None
    text = (
        f"the mean reward rose from {before.mean:.2f} to {after.mean:.2f} on fresh episodes ({summary.improvement}); "
        "the run was stopped, resumed and verified"
    )
    return LearningResult(before.mean, after.mean, text, time.monotonic() - started)


def _load(folder: Path, device: str, max_tokens: int | None) -> LoadedConfig:
    overrides = {
        "eval.general.dataset.file_path": str(folder / "questions.jsonl"),
        "finetuning.policy.model": str(folder / "model"),
        "finetuning.output_dir": str(folder / "runs"),
        "finetuning.device": device,
        "finetuning.limits.max_tokens": "null" if max_tokens is None else str(max_tokens),
    }
    return load_config(SELF_TEST, overrides=list(overrides.items()))


def _require_learning(summary: RunSummary) -> None:
    if summary.promoted:
        return
    parts = [
        f"{name} {format_interval(each.mean, each.ci_low, each.ci_high)}"
        for name, each in (("before", summary.confirm_base or summary.baseline), ("after", summary.confirm_tuned))
        if each is not None
    ]
    raise JobFailed(f"the model has not learned the task: {', '.join(parts)} ({summary.reason})")


RECIPE = Recipe(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, max_model_len=32)
NUM_ROWS = 400


def write_model(folder: Path) -> None:
    write_blank_model(folder, RECIPE, make_bpe_tokenizer([], words=r"\S|\s", vocab_size=261))


def list_questions() -> list[dict[str, str]]:
    return [{"id": str(number), "question": f"{number:03d}"} for number in range(NUM_ROWS)]
