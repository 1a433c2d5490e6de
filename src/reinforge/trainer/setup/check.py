"""Validates a run without running it, and without torch: `reinforge check` and `finetune --dry_run`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.policy import PolicyConfig
from reinforge.engine.learning_rate import count_parameters
from reinforge.engine.model.source import find_weights
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.evaluators.base import score_item
from reinforge.files import replace_file
from reinforge.interfaces import Evaluator
from reinforge.registry import Registry
from reinforge.runs.removal import find_obstacle
from reinforge.trainer.guards import find_warnings
from reinforge.trainer.options import RunOptions
from reinforge.trainer.setup.compatibility import find_compared_parts
from reinforge.trainer.setup.components import Attempts, ComponentBuilder
from reinforge.trainer.setup.effective_settings import effective_settings
from reinforge.trainer.setup.prepare import build_parts, require_enabled, try_build_parts
from reinforge.types.evaluation import EvalInputItem

CHECKPOINTS_KEPT = 3
"""A run keeps the base, the best and the newest checkpoint."""

BYTES_PER_WEIGHT = 4
"""Of a model that was loaded from a GGUF file: quantized weights become float32."""

OUTPUT_DIR = "finetuning.output_dir"
DRY = "-dry"
"""Suffix of a folder that holds only a resolved configuration."""


@dataclass(frozen=True, slots=True)
class RewardSample:
    example_id: str
    evaluator: str
    on_expected: float | str  # score of the dataset's expected answer; a text with the reason if it is missing
    on_empty: float | str


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Disk space for the run folder, in bytes."""

    folder: str  # the nearest folder that exists
    free: int
    needed: int | None  # bytes of the checkpoints; None if the model's size is not known yet


@dataclass
class CheckReport:
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)
    settings: list[tuple[str, str]] = field(default_factory=list)
    rewards: list[RewardSample] = field(default_factory=list)
    disk: DiskSpace | None = None

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def free_disk_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


async def check_config(
    loaded: LoadedConfig,
    registry: Registry | None = None,
    *,
    num_samples: int = 0,
    free_bytes: Callable[[Path], int] = free_disk_bytes,
) -> CheckReport:
    """Validates a run of this configuration.

    Args:
        loaded: A configuration; problems of its own come first, and components with problems are left out.
        num_samples: How many examples to try the evaluators on; each may call a judge twice.
    """
    report = CheckReport(problems=list(loaded.problems))
    if not {"finetuning", "finetuning.enabled"} & {problem.path for problem in loaded.problems}:
        try:
            require_enabled(loaded)
        except ConfigError as error:
            report.problems += error.problems
            return report
    async with ComponentBuilder(loaded, registry, makes_models=False) as builder:
        attempt = Attempts(builder.locate)
        parts = await try_build_parts(builder, None, attempt)
        report.problems += attempt.problems
        if parts.splits and loaded.config.finetuning.reward_function is not None:
            report.examples = {name: len(items) for name, items in parts.splits.items()}
            evaluators = {name: made for name, made in parts.evaluators.items() if made is not None}
            report.rewards = await _try_rewards(evaluators, parts.splits["train"][:num_samples])
            report.notes += _find_reward_notes(report.rewards, parts.reward_metric)
            held_out = list(parts.held_out_evaluators or {})
            trains_on_reward = parts.trajectory_builder is None or parts.trajectory_builder.rewards_are_scores
            warnings = find_warnings(
                loaded.config.finetuning,
                parts.splits,
                parts.reward_metric,
                held_out,
                trains_on_reward=trains_on_reward,
            )
            report.notes += [event.text for event in warnings]
    if (obstacle := find_obstacle(Path(loaded.config.finetuning.output_dir))) is not None:
        message = f"cannot make a run folder in {loaded.config.finetuning.output_dir}: {obstacle}"
        fix = "choose a folder that you can write to: -o finetuning.output_dir FOLDER"
        report.problems.append(Problem(OUTPUT_DIR, message, fix, loaded.locate(OUTPUT_DIR)))
    report.disk = disk = _measure_disk(loaded, free_bytes)
    if disk.needed is not None and disk.free < disk.needed:
        needed = f"the checkpoints need {disk.needed / 2**30:.1f} GiB"
        message = f"{disk.folder} has {disk.free / 2**30:.1f} GiB free, but {needed}"
        fix = "free some space, or choose a folder on another disk"
        report.problems.append(Problem(OUTPUT_DIR, message, fix, loaded.locate(OUTPUT_DIR)))
    if report.ok:
        report.settings = effective_settings(parts)
    return report


async def refuse_problems(loaded: LoadedConfig, registry: Registry | None = None) -> None:
    if loaded.problems:
        raise ConfigError((await check_config(loaded, registry)).problems)


async def dry_run(loaded: LoadedConfig, options: RunOptions, registry: Registry | None = None) -> Path:
    """Validates a run, writes its resolved configuration, and returns that file.

    The folder's name ends with `-dry`, so that the name stays free for the run itself.
    """
    await refuse_problems(loaded, registry)
    require_enabled(loaded)
    folder = options.choose_folder(loaded.config.finetuning, DRY)
    async with ComponentBuilder(loaded, registry, makes_models=False) as builder:
        await build_parts(builder, None)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "config.yml", dump_config(loaded))
    return folder / "config.yml"


async def _try_rewards(evaluators: Mapping[str, Evaluator], items: list[EvalInputItem]) -> list[RewardSample]:
    tried = []
    for item in items:
        for name, evaluator in evaluators.items():
            if item.expected_output_obj is None and find_compared_parts(name, evaluators):
                continue  # it compares two answers, and there is only an empty one
            expected = await _score_output(evaluator, item, item.expected_output_obj)
            tried.append(RewardSample(str(item.id), name, expected, await _score_output(evaluator, item, "")))
    return tried


async def _score_output(evaluator: Evaluator, item: EvalInputItem, output: Any) -> float | str:
    scored = await score_item(evaluator, item.copy_with_updates(output_obj=output))
    return f"missing: {scored.error}" if scored.error is not None else float(scored.score)


def _find_reward_notes(tried: list[RewardSample], reward: str) -> list[str]:
    mine = [row for row in tried if row.evaluator == reward]
    known = [(row.on_expected, row.on_empty) for row in mine if isinstance(row.on_expected, float)]
    if mine and not known:
        return [f'the reward "{reward}" returns no score for any expected answer; a run needs a score for each answer']
    if known and all(expected == empty for expected, empty in known):
        return [
            f'the reward "{reward}" gives expected and empty answers the same score, so it cannot tell right from wrong'
        ]
    return []


def _measure_disk(loaded: LoadedConfig, free_bytes: Callable[[Path], int]) -> DiskSpace:
    folder = Path(loaded.config.finetuning.output_dir).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    policy = loaded.config.finetuning.policy
    size = _measure_model(policy.model)
    needed = size * (CHECKPOINTS_KEPT * _count_copies(policy) + 1) if size else None
    return DiskSpace(str(folder), free_bytes(folder), needed)


def _measure_model(model: str | None) -> int:
    """Returns the bytes of a model's weights; 0: they are not on this machine, or no folder and no GGUF file."""
    folder = Path(model or "")
    if model is not None and not folder.is_dir() and (source := find_weights(model)) is not None:
        if source.is_gguf:
            return BYTES_PER_WEIGHT * (count_parameters(model) or 0)
        folder = Path(source.location)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def _count_copies(policy: PolicyConfig) -> int:
    """Returns a checkpoint's size in models: the weights, the moments, and float32 copies of weights with fewer bits.

    Example: adamw -> 3; adamw in bfloat16 -> 1 + 2 (1 + 2) = 7.
    """
    moments = policy.optimizer.num_moments
    return 1 + moments if policy.dtype != "bfloat16" else 1 + 2 * (1 + moments)
