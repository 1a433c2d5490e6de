"""Looks at everything that a run needs without running: `reinforge check` and `finetune --dry_run`. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import PolicyConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.evaluators.base import score_item
from reinforge.files import replace_file
from reinforge.interfaces import Evaluator
from reinforge.registry import REGISTRY, Registry
from reinforge.trainer.run import RunOptions
from reinforge.trainer.setup.components import Builder
from reinforge.trainer.setup.prepare import Attempts, effective_settings, gather_parts, make_parts, refuse_disabled
from reinforge.types.evaluation import EvalInputItem

CHECKPOINTS_KEPT = 3
"""A run keeps the base, the best and the newest checkpoint."""

DRY = "-dry"
"""Ends the name of a folder that holds nothing but a resolved configuration."""


@dataclass(frozen=True, slots=True)
class TriedReward:
    """What one evaluator says about one example.

    Attributes:
        example_id: The example.
        evaluator: Its name.
        on_expected: Its score of the dataset's own expected answer; a text says why there is none.
        on_empty: Its score of an empty answer.
    """

    example_id: str
    evaluator: str
    on_expected: float | str
    on_empty: float | str


@dataclass(frozen=True, slots=True)
class Disk:
    """Room for the run folder, in bytes.

    Attributes:
        folder: The nearest folder that exists.
        free: What is free there.
        needed: What the checkpoints take; None where the model's size is not known yet.
    """

    folder: str
    free: int
    needed: int | None


@dataclass
class CheckReport:
    """What was found.

    Attributes:
        problems: Everything that would stop a run.
        notes: What would not, and is worth knowing.
        examples: Number of examples by split.
        settings: What takes effect, name and value.
        rewards: What the evaluators say about the samples.
        disk: Room for the run folder.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)
    settings: list[tuple[str, str]] = field(default_factory=list)
    rewards: list[TriedReward] = field(default_factory=list)
    disk: Disk | None = None

    @property
    def ok(self) -> bool:
        """True if a run could start."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Returns the report, ready for JSON."""
        return {"ok": self.ok, **asdict(self)}


def free_on_disk(folder: Path) -> int:
    """Returns the free bytes of the disk that a folder is on."""
    return shutil.disk_usage(folder).free


async def check_config(
    loaded: LoadedConfig,
    registry: Registry = REGISTRY,
    *,
    num_samples: int = 0,
    free_bytes: Callable[[Path], int] = free_on_disk,
) -> CheckReport:
    """Returns what a run of this configuration would meet.

    Args:
        loaded: A configuration that was read without problems.
        registry: Where component types are looked up.
        num_samples: Examples on which the evaluators are tried; each may call a judge twice.
        free_bytes: Room on a folder's disk.
    """
    report = CheckReport()
    try:
        refuse_disabled(loaded)
    except ConfigError as error:
        report.problems += error.problems
        return report
    async with Builder(loaded, registry, makes_models=False) as builder:
        attempt = Attempts(builder.placed)
        parts = await gather_parts(builder, None, attempt)
        report.problems = attempt.problems
        if parts.splits:
            report.examples = {name: len(items) for name, items in parts.splits.items()}
            evaluators = {name: made for name, made in parts.evaluators.items() if made is not None}
            report.rewards = await _try_rewards(evaluators, parts.splits["train"][:num_samples])
            report.notes += _reward_notes(report.rewards, parts.reward_metric)
    report.disk = _disk(loaded, free_bytes)
    if report.disk.needed is not None and report.disk.free < report.disk.needed:
        report.problems.append(_no_room(loaded, report.disk))
    if report.ok:
        report.settings = effective_settings(parts)
    return report


async def dry_run(loaded: LoadedConfig, options: RunOptions, registry: Registry = REGISTRY) -> Path:
    """Makes everything that a run would check and writes its resolved configuration; returns that file.

    The folder's name ends with `-dry`, so that the run itself finds its own name free.

    Raises:
        ConfigError: Everything that is wrong.
    """
    refuse_disabled(loaded)
    folder = options.folder_for(loaded.config.finetuning, DRY)
    async with Builder(loaded, registry, makes_models=False) as builder:
        await make_parts(builder, None)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "config.yml", dump_config(loaded))
    return folder / "config.yml"


async def _try_rewards(evaluators: Mapping[str, Evaluator], items: list[EvalInputItem]) -> list[TriedReward]:
    tried = []
    for item in items:
        for name, evaluator in evaluators.items():
            expected = await _score(evaluator, item, item.expected_output_obj)
            tried.append(TriedReward(str(item.id), name, expected, await _score(evaluator, item, "")))
    return tried


async def _score(evaluator: Evaluator, item: EvalInputItem, output: Any) -> float | str:
    scored = await score_item(evaluator, item.copy_with_updates(output_obj=output))
    return f"missing: {scored.error}" if scored.error is not None else float(scored.score)


def _reward_notes(tried: list[TriedReward], reward: str) -> list[str]:
    mine = [row for row in tried if row.evaluator == reward]
    known = [(row.on_expected, row.on_empty) for row in mine if isinstance(row.on_expected, float)]
    if mine and not known:
        return [
            f'the reward "{reward}" scores none of the expected answers; a run needs it to score what the agent gives'
        ]
    if known and all(expected == empty for expected, empty in known):
        return [f'the reward "{reward}" scores the expected answers like empty ones; it cannot tell right from wrong']
    return []


def _disk(loaded: LoadedConfig, free_bytes: Callable[[Path], int]) -> Disk:
    folder = Path(loaded.config.finetuning.output_dir).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    policy = loaded.config.finetuning.policy
    model = Path(policy.model or "")
    sizes = [file.stat().st_size for file in model.glob("*.safetensors")] if model.is_dir() else []
    needed = sum(sizes) * (CHECKPOINTS_KEPT * _copies(policy) + 1) if sizes else None
    return Disk(str(folder), free_bytes(folder), needed)


def _copies(policy: PolicyConfig) -> int:
    """Returns the sizes of the model that a checkpoint takes: weights and moments, and those in float32 with a copy.

    Example: adamw -> 3; adamw in bfloat16 -> 1 + 2 (1 + 2) = 7.
    """
    moments = policy.optimizer.num_moments
    return 1 + moments if policy.precision == "float32" else 1 + 2 * (1 + moments)


def _no_room(loaded: LoadedConfig, disk: Disk) -> Problem:
    path = "finetuning.output_dir"
    message = (
        f"{disk.free / 2**30:.1f} GiB are free on {disk.folder}, and the checkpoints take {disk.needed or 0:,} bytes"
    )
    return Problem(path, message, "make room, or name a folder on another disk", loaded.locate(path))
