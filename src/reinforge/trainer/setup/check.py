"""Validates a run without running it, and without torch: `reinforge check` and `finetune --dry_run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig
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
from reinforge.trainer.setup.disk_space import (
    OUTPUT_DIR,
    DiskSpace,
    find_disk_problems,
    free_disk_bytes,
    measure_disk,
)
from reinforge.trainer.setup.effective_settings import effective_settings
from reinforge.trainer.setup.prepare import build_parts, require_enabled, try_build_parts
from reinforge.types.evaluation import EvalInputItem

DRY = "-dry"  # suffix of a folder that holds only a resolved configuration


@dataclass(frozen=True, slots=True)
class RewardSample:
    example_id: str
    evaluator: str
    on_expected: float | str  # score of the dataset's expected answer; a text with the reason if it is missing
    on_empty: float | str


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
    report.disk = measure_disk(loaded, free_bytes)
    report.problems += find_disk_problems(loaded, report.disk)
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
