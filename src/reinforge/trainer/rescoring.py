"""Scores the recorded outputs of two runs again by the evaluators of one of them, so that they can be compared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from reinforge.config.loaded_config import LoadedConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.registry import Registry
from reinforge.rollout.runner import EpisodeRunner
from reinforge.runs.comparison import EVALUATORS, Arm, Rescored, read_arms
from reinforge.runs.journal.episode_json import parse_episode
from reinforge.runs.journal.reader import JournalReader
from reinforge.trainer.provenance import hash_data, identify_evaluators
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.trainer.setup.prepare import build_parts
from reinforge.types.episode import EpisodeRecord

FLAG = "--score_with"


async def rescore(
    runs: Sequence[Path], judge: Path, loaded: LoadedConfig, registry: Registry | None = None
) -> Rescored:
    """Returns the scores of both runs' compared episodes by the evaluators of `judge`, whose configuration is `loaded`.

    Raises:
        ConfigError: Those evaluators have changed since, ask the policy or compare answers; or a run has other examples
            or did not record its outputs.
    """
    async with ComponentBuilder(loaded, registry) as builder:
        parts = await build_parts(builder, None)
        facts = JournalReader(judge).facts()
        recorded, now = facts.get(EVALUATORS) or {}, identify_evaluators(loaded)
        if changed := sorted(name for name in now if recorded.get(name, now[name]) != now[name]):
            message = f"{', '.join(changed)} changed since {judge.name}, so its evaluators are not here any more"
            raise ConfigError(Problem(FLAG, message, "name the other run, or restore the code"))
        evaluation = DatasetEvaluation(
            EpisodeRunner.from_config(loaded.config, parts.workflow, parts.llms),
            parts.splits,
            parts.evaluators,
            reward_metric=parts.reward_metric,
            outcomes=parts.config.outcomes,
            held_out_evaluators=parts.held_out_evaluators,
        )
        items = {str(item.id): item for split in parts.splits.values() for item in split}
        data = hash_data(parts.splits)
        limit = asyncio.Semaphore(loaded.config.eval.general.max_concurrency)

        async def score(record: EpisodeRecord) -> EpisodeRecord:
            async with limit:
                return await evaluation.score_again(record)

        found = []
        for folder, arm in zip(runs, read_arms(*runs)[1], strict=True):
            if JournalReader(folder).facts().get("data_sha256") != data:
                message = f"{folder.name} ran on other examples than {judge.name} has now"
                raise ConfigError(Problem(FLAG, message, "compare runs on the same data"))
            records = [parse_episode(_read(folder, arm, head.key), items[head.example_id]) for head in arm.heads]
            again = await asyncio.gather(*(score(record) for record in records if not record.outcome.is_missing))
            errors = [record.scores[parts.reward_metric].error for record in again]
            if errors and all(errors):
                message = f"{parts.reward_metric} has no score of the outputs of {folder.name}: {errors[0]}"
                raise ConfigError(
                    Problem(FLAG, message, "an evaluator that asks the policy or compares answers cannot")
                )
            found.append({str(r.key): {name: score.as_reward() for name, score in r.scores.items()} for r in again})
    return Rescored(judge.name, found)


def _read(folder: Path, arm: Arm, key: str) -> dict[str, object]:
    row = arm.reader.find_episode(key)
    if row is None or (row.data["outcome"] == "ok" and row.data["output"] is None):
        message = f"{folder.name} did not record the output of {key}, so it cannot be scored again"
        raise ConfigError(Problem(FLAG, message, "leave it out"))
    return row.data
