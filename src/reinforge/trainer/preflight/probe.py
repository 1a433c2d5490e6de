"""Samples a few training examples, scores answers twice, and trains an epoch or two on weights that are dropped.

    sample      num_examples x num_samples episodes of training examples, with the components of the file
    score again some of the same answers, by the same evaluators
    validate    the select examples, or as many as there is time for
    train       whole epochs, if one is short; else one epoch of a few groups, on the sampled episodes

Everything is written into a folder that is removed at the end. `confirm` is not touched: the verdict needs examples
that no decision was based on. Only the embedded backend trains: a job at a service costs money and lasts.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reinforge.adapters.local import LocalAdapter
from reinforge.algorithms.curriculum import split_by_signal
from reinforge.config.blocks import LimitsConfig
from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.pipeline import list_stages
from reinforge.engine.fast_paths import FastPaths
from reinforge.engine.garbage_collection import limit_garbage_collection
from reinforge.errors import EvaluationError, JobFailed, ReinforgeError
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.files import replace_file
from reinforge.interfaces import TrainerAdapter
from reinforge.port_bases import find_plan
from reinforge.registry import Registry
from reinforge.rollout.models.openai_client import ModelUsage
from reinforge.runs.checkpoints import restore_weights
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.page.page import write_page
from reinforge.runs.plot import can_draw_plots, draw_reward_plot
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.runs.report import write_report
from reinforge.runs.rows import BASELINE
from reinforge.runs.summary import RunSummary
from reinforge.trainer import versions
from reinforge.trainer.context import RunContext
from reinforge.trainer.epoch_collection import attach_calls
from reinforge.trainer.preflight.costs import TokenPrice, copy_usage, measure_usage
from reinforge.trainer.preflight.durations import (
    JobTime,
    RunSize,
    StageClock,
    Timings,
    fit_job_time,
    list_probed_epochs,
)
from reinforge.trainer.preflight.scoring import score_twice
from reinforge.trainer.setup.check import refuse_problems
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.trainer.setup.parts import Parts, bind_parts
from reinforge.trainer.setup.prepare import build_parts, require_enabled, settle_dtype
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem, EvaluationReport
from reinforge.types.trajectory import CollectionPlan, TrajectoryCollection, TrajectoryGroup

if TYPE_CHECKING:
    from reinforge.engine.devices import MemoryUse

logger = logging.getLogger(__name__)

VALIDATION_SHARE, TRAINING_SHARE = 0.25, 0.5
"""Shares of the time of a probe that validating and training may take."""
MIN_EPOCHS, MAX_EPOCHS = 2, 4
"""Whole epochs of a probe: the first one is slower than the others, and short ones need not be many."""
SMALL_JOB = 4
"""How many times fewer groups the smaller one of two jobs has that are timed."""
NAME = "preflight"
TRAIN_FACTOR = 2.0
"""How long an epoch is guessed to take, as a multiple of its sampling, before one has been measured."""


@dataclass(frozen=True, slots=True)
class PreflightOptions:
    """Options of one preflight."""

    num_examples: int = 20
    num_samples: int = 4
    max_probe_s: float = 60.0  # seconds that validating and training may take together, about
    prices: Mapping[str, TokenPrice] = field(default_factory=dict)
    training_price: float | None = None
    progress: RunProgress = field(default_factory=SilentProgress)


@dataclass
class Probe:
    """What a probe found."""

    parts: Parts  # the components of the run; closed by now
    size: RunSize
    report: EvaluationReport
    records: list[EpisodeRecord]
    scored_twice: list[tuple[float, float]]  # both rewards of each answer that was scored twice
    rescored: str  # why answers were not scored twice; empty: they were
    usage: dict[str, ModelUsage]
    timings: Timings
    trains_here: bool
    failure: str = ""  # the error that would end the run; empty: none came up
    max_model_len: int | None = None
    memory: MemoryUse | None = None

    def group_rewards(self) -> list[list[float]]:
        """Returns the rewards of each example's episodes; those that the environment failed are left out."""
        groups: dict[str, list[float]] = defaultdict(list)
        for record in self.records:
            if record.reward is not None and not record.outcome.is_missing:
                groups[record.key.example_id].append(record.reward)
        return list(groups.values())


async def probe_run(loaded: LoadedConfig, options: PreflightOptions, registry: Registry | None = None) -> Probe:
    """Returns what a run of this configuration does to a few examples, and how long it takes."""
    started = time.monotonic()
    await refuse_problems(loaded, registry)
    require_enabled(loaded)
    settle_dtype(loaded, None)
    with _make_folder(Path(loaded.config.finetuning.output_dir)) as folder:
        async with ComponentBuilder(loaded, registry) as builder:
            parts = await build_parts(builder, None)
            clock = StageClock(options.progress)
            journal = RunJournal(folder / "probe")
            context = RunContext("preflight", journal, clock, LimitsConfig())
            try:
                enabled = FastPaths.switch(parts.config.policy.fast_paths).garbage_collection
                with limit_garbage_collection(enabled=enabled):
                    begun = started + builder.making_s  # a bundled model is made once, not by each run
                    return await _Prober(loaded, parts, context, clock, options).run(begun)
            finally:
                clock.close()
                journal.close()


@contextmanager
def _make_folder(output_dir: Path) -> Iterator[Path]:
    place = output_dir.expanduser().absolute()
    while not place.is_dir():
        place = place.parent
    with tempfile.TemporaryDirectory(prefix=".reinforge-preflight-", dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class _Prober:
    """One probe: the components, the clock, and what it has found so far."""

    def __init__(
        self, loaded: LoadedConfig, parts: Parts, context: RunContext, clock: StageClock, options: PreflightOptions
    ):
        self.loaded, self.parts, self.config = loaded, parts, parts.config
        self.context, self.clock, self.options = context, clock, options
        self.plan: CollectionPlan | None = None
        self.trains_here = isinstance(parts.adapter, LocalAdapter)
        self.is_whole = False

    @property
    def evaluation(self) -> DatasetEvaluation:
        evaluation = self.parts.trajectory_builder.evaluation
        assert isinstance(evaluation, DatasetEvaluation)  # `bind_parts` made it
        return evaluation

    async def run(self, started: float) -> Probe:
        parts, context = self.parts, self.context
        context.reward_metric, context.agent = parts.reward_metric, parts.workflow.source
        replace_file(context.folder / "config.yml", dump_config(self.loaded))
        self.clock.stage(None, "LOAD", None)
        await bind_parts(self.loaded, parts, context)
        uses_policy = any(llm.is_policy for llm in parts.llms.values())
        if self.trains_here:
            await parts.trainer.initialize(self.config)
        else:
            await parts.trajectory_builder.initialize(self.config)
            if uses_policy:
                await parts.adapter.initialize(self.config)
        context.policy = parts.adapter.policy() if self.trains_here or uses_policy else None
        before_s = time.monotonic()
        if self.trains_here:
            await versions.record_base(context, parts.adapter)
        save_s = time.monotonic() - before_s if self.trains_here else 0.0
        self.clock.stop()
        start_s = time.monotonic() - started
        self.plan = find_plan(parts.trajectory_builder, 0)
        size = self._measure_size()
        before = copy_usage(parts.llms)
        records = await self._sample()
        usage = measure_usage(parts.llms, before, records)
        episode_s = self.clock.measure("SAMPLE") / max(1, len(records))
        twice, why_not = await self._score_again(records)
        select_s = await self._validate(episode_s)
        failure = await self._train(records, episode_s, size) if self.trains_here else ""
        is_timed = self.trains_here and not self.is_whole and not failure
        job = await self._time_jobs() if is_timed else None
        load_s = await self._load_checkpoint() if self.trains_here else 0.0
        files_s = self._write_files()
        epochs = list_probed_epochs(self.clock)
        larger = [epoch for epoch in epochs if size.group_size and epoch.num_episodes > len(records)]
        sampled = [epoch.collect_s / epoch.num_episodes for epoch in larger]
        timings = Timings(
            start_s, min(episode_s, select_s, *sampled), select_s, save_s, load_s, files_s, epochs, self.is_whole, job
        )
        report = self.evaluation.report("train", 0, records)
        found = Probe(parts, size, report, records, twice, why_not, usage, timings, self.trains_here, failure)
        found.max_model_len = getattr(context.policy, "max_model_len", None)
        found.memory = parts.adapter.measure_memory() if isinstance(parts.adapter, LocalAdapter) else None
        return found

    def _measure_size(self) -> RunSize:
        config, splits, plan = self.config, self.parts.splits, self.plan
        settings = self.parts.trajectory_builder.trajectory_builder_config
        wanted = getattr(settings, "examples_per_epoch", None) or len(splits["train"])
        interval = config.run_configuration.validation_interval if config.run_configuration is not None else 5
        inner = sum(epoch % interval == 0 for epoch in range(1, config.num_epochs))
        stages_of_run = list_stages(config)
        return RunSize(
            num_epochs=stages_of_run[0].settings.num_epochs if stages_of_run else config.num_epochs,
            examples_per_epoch=len(plan.example_ids) if plan is not None else min(wanted, len(splits["train"])),
            group_size=plan.episodes_per_example if plan is not None else 0,
            groups_per_example=plan.groups_per_example if plan is not None else 1,
            num_select=len(splits["select"]),
            num_validations=inner + 1,
            num_confirm=len(splits["confirm"]),
            num_samples=config.gate.num_samples,
        )

    async def _sample(self) -> list[EpisodeRecord]:
        """Runs the agent on the examples that the run collects first."""
        known = self.evaluation.example_ids("train")
        ids = list(self.plan.example_ids if self.plan is not None else known)[: self.options.num_examples]
        samples = range(self.options.num_samples)
        keys = [EpisodeKey("collect", 0, example, sample) for example in ids for sample in samples]
        self.clock.stage(None, "SAMPLE", len(keys))
        records = await self.evaluation.collect(keys)
        self.clock.stop()
        if all(record.reward is None for record in records):
            report = self.evaluation.report("train", 0, records)
            raise EvaluationError(f"no sampled episode has a reward: {report.error}")
        return records

    async def _score_again(self, records: Sequence[EpisodeRecord]) -> tuple[list[tuple[float, float]], str]:
        self.clock.stage(None, "SCORE AGAIN", None)
        found = await score_twice(self.evaluation, records, self.loaded.config.eval.general.max_concurrency)
        self.clock.stop()
        return found

    async def _validate(self, episode_s: float) -> float:
        """Validates on select examples, all of them if there is time; returns the seconds per episode."""
        items = self.evaluation.splits["select"]
        most = int(self.options.max_probe_s * VALIDATION_SHARE / max(episode_s, 1e-6))
        self.evaluation.splits["select"] = items[: max(1, self.options.num_examples, most)]
        before = self.clock.measure("BASELINE")
        await versions.validate(self.parts.trainer, self.context, BASELINE)
        self.clock.stop()
        return (self.clock.measure("BASELINE") - before) / len(self.evaluation.splits["select"])

    async def _train(self, records: Sequence[EpisodeRecord], episode_s: float, size: RunSize) -> str:
        """Runs a few epochs, or a small one; returns the error that ended them, which would end the run as well."""
        epoch_s = TRAIN_FACTOR * episode_s * size.examples_per_epoch * size.group_size
        available_s = self.options.max_probe_s * TRAINING_SHARE
        self.is_whole = size.group_size > 0 and epoch_s <= available_s
        affordable = max(MIN_EPOCHS, int(available_s / max(epoch_s, 1e-6)))
        count = min(MAX_EPOCHS, size.num_epochs, affordable) if self.is_whole else 1
        if len({record.reward for record in records}) == 1:  # perhaps nothing can be trained, which one epoch shows
            count = 1
        if not self.is_whole:
            self._shrink(records, size, int(size.examples_per_epoch * available_s / epoch_s) if epoch_s else 0)
        config, run = self.config, self.config.run_configuration
        config.limits.max_empty_updates = count + 1
        if run is not None:
            run.validation_interval = count + 1
        try:
            await self.parts.trainer.run(count)
        except ReinforgeError as error:
            logger.debug("the probe of training failed", exc_info=True)
            return str(error)
        finally:
            self.clock.stop()
        return ""

    def _shrink(self, records: Sequence[EpisodeRecord], size: RunSize, num_affordable: int) -> None:
        """Makes an epoch as large as there is time for; one that is no larger than the sample uses its episodes."""
        settings = self.parts.trajectory_builder.trajectory_builder_config
        least = max(2, -(-len(records) // max(1, size.group_size)))
        if hasattr(settings, "examples_per_epoch"):
            settings.examples_per_epoch = min(max(least, num_affordable), size.examples_per_epoch)
        self.config.limits.max_refills = 0
        if num_affordable <= least:
            self._recall(records)

    def _recall(self, records: Sequence[EpisodeRecord]) -> None:
        known = {record.key: record for record in records}

        def recall(key: EpisodeKey, item: EvalInputItem) -> EpisodeRecord | None:
            return known.get(key)

        self.evaluation.recall = recall

    async def _time_jobs(self) -> JobTime | None:
        self._recall(self.parts.trajectory_builder.records or [])
        return await time_jobs(self.parts)

    async def _load_checkpoint(self) -> float:
        """Loads a checkpoint as the verdict does; returns the seconds."""
        started, context = time.monotonic(), self.context
        name = context.policy_versions[0].checkpoint if context.policy_versions else None
        if name is None or not context.checkpoints.has(context.policy_versions[0].version):
            return 0.0
        await restore_weights(self.parts.adapter, context.checkpoints.verify(name), context.policy_versions[0].version)
        return time.monotonic() - started

    def _write_files(self) -> float:
        started, folder = time.monotonic(), self.context.folder
        summary = RunSummary("preflight", "completed", folder)
        self.context.journal.flush()
        try:
            write_page(folder, summary)
            write_report(folder / "report.md", summary, self.clock.rows, self.context.validations)
            if can_draw_plots():
                draw_reward_plot(folder / "reward_plot.png", self.clock.rows, self.context.validations, title="probe")
        except ReinforgeError:
            logger.debug("the files of the probe were not written", exc_info=True)
        return time.monotonic() - started


async def time_jobs(parts: Parts) -> JobTime | None:
    """Trains a small and a larger job on what the builder collects for epoch 0; None: nothing can be trained."""
    await parts.trajectory_builder.start_run(NAME, {"epoch": 0})
    collection = await parts.trajectory_builder.finalize(NAME, {"epoch": 0})
    attach_calls(collection, parts.trajectory_builder, parts.adapter)
    algorithm, least = parts.algorithm.for_epoch(0), parts.config.curriculum_learning.min_reward_diff
    kept = split_by_signal(collection.groups, least, algorithm.needs_groups, algorithm.has_signal).kept
    if not kept:
        return None
    few = max(1, len(kept) // SMALL_JOB)
    try:
        small_s = await _time_job(parts.adapter, kept[:few])
        return fit_job_time((few, small_s), (len(kept), await _time_job(parts.adapter, kept)))
    except JobFailed:  # such as a group that has no credit alone
        return None


async def _time_job(adapter: TrainerAdapter, groups: Sequence[TrajectoryGroup]) -> float:
    started, collection = time.monotonic(), TrajectoryCollection.from_groups(groups, NAME, epoch=0)
    collection.job_key = f"{NAME}/{len(groups)}"
    versions.refuse_failed([await adapter.wait_until_complete(await adapter.submit(collection))])
    return time.monotonic() - started
