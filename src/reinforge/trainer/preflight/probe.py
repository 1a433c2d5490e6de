"""Samples a few training examples, scores answers twice, and trains an epoch or two on weights that are dropped.

    sample      num_examples x num_samples episodes of training examples, with the components of the file
    score again some of the same answers, by the same evaluators
    validate    the select examples, or as many as there is time for
    train       a small and a larger job on the sampled episodes; whole epochs, if they fit; else one of fewer groups

Each part begins only if it should end in time, and whatever runs when time is up is stopped. What a training job would
have shown then stays unknown, so the first one is as small as a guess of its time demands.

Everything is written into a folder that is removed at the end. `confirm` is not touched: the verdict needs examples
that no decision was based on. Only the embedded backend trains: a job at a service costs money and lasts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reinforge.adapters.local import LocalAdapter
from reinforge.algorithms.curriculum import split_by_signal
from reinforge.config.dump import dump_config
from reinforge.config.finetuning_blocks import LimitsConfig
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.pipeline import find_optional_answers, leave_out_answers, list_stages
from reinforge.engine.fast_paths import FastPaths
from reinforge.engine.garbage_collection import limit_garbage_collection
from reinforge.errors import BudgetReached, EvaluationError, JobFailed, ReinforgeError
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.files import find_existing_folder, replace_file
from reinforge.interfaces import TrainerAdapter
from reinforge.port_bases import find_plan
from reinforge.registry import Registry
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.models.openai_client import ModelUsage
from reinforge.runs.checkpoints import restore_weights
from reinforge.runs.forecast import TRAIN_FACTOR, RunSize
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.page.page import write_page
from reinforge.runs.plot import draw_reward_plot
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.runs.report import write_report
from reinforge.runs.rows import BASELINE, EpochMetrics
from reinforge.runs.summary import RunSummary, can_draw_plots
from reinforge.trainer import versions
from reinforge.trainer.context import RunContext
from reinforge.trainer.epoch_collection import attach_calls
from reinforge.trainer.preflight.costs import TokenPrice, copy_usage, measure_usage
from reinforge.trainer.preflight.durations import (
    JobTime,
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

SAMPLE_SHARE, SCORE_SHARE, VALIDATION_SHARE, EPOCH_SHARE = 0.4, 0.2, 0.25, 0.8
"""Shares of the time that is left which sampling, scoring again, validating and whole epochs may take."""
NUM_FIRST = 4  # examples that are sampled first, to see how many there is time for
MAX_EPOCHS = 4  # whole epochs of a probe: the first one is slower than the others, and short ones need not be many
SMALL_JOB = 4  # how many times fewer groups the smaller one of two jobs has that are timed
NAME = "preflight"
NUM_MOVED = 8  # replies whose log-probs are compared before and after the probed epochs


@dataclass(frozen=True, slots=True)
class PreflightOptions:
    """Options of one preflight."""

    num_examples: int = 20
    num_samples: int = 4
    max_probe_s: float = 60.0  # seconds after the model is loaded
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
    timings: Timings = field(default_factory=lambda: Timings(0.0, 0.0, 0.0))
    trains_here: bool = False
    config_text: str = ""  # the resolved configuration, as a run of it writes it
    failure: str = ""  # the error that would end the run; empty: none came up
    notes: list[str] = field(default_factory=list)  # what there was no time for
    moved: float | None = None  # nats by which the probed epochs changed the log-prob of a sampled token; None: unknown
    rows: list[EpochMetrics] = field(default_factory=list)  # the probed epochs
    max_model_len: int | None = None
    memory: MemoryUse | None = None

    @property
    def sampled_ids(self) -> list[str]:
        return list(dict.fromkeys(record.key.example_id for record in self.records))

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
    options.progress.stage(None, "PREPARE", None)
    await refuse_problems(loaded, registry)
    require_enabled(loaded)
    settle_dtype(loaded, None)
    if (answers := find_optional_answers(loaded.config)) is not None:
        leave_out_answers(loaded.config.finetuning)
    with _make_folder(Path(loaded.config.finetuning.output_dir)) as folder:
        async with ComponentBuilder(loaded, registry, progress=options.progress) as builder:
            parts = await build_parts(builder, None)
            clock = StageClock(options.progress)
            journal = RunJournal(folder / "probe")
            context = RunContext("preflight", journal, clock, LimitsConfig())
            try:
                enabled = FastPaths.switch(parts.config.policy.fast_paths).garbage_collection
                with limit_garbage_collection(enabled=enabled):
                    begun = started + builder.making_s  # a bundled model is made once, not by each run
                    prober = _Prober(loaded, parts, context, clock, options)
                    if answers is not None:
                        count, name = answers.settings.num_epochs, answers.name
                        prober.notes.append(f"the first {count} epochs of a run, stage {name}, are not probed")
                    return await prober.run(begun)
            finally:
                clock.close()
                journal.close()


@contextmanager
def _make_folder(output_dir: Path) -> Iterator[Path]:
    place = find_existing_folder(output_dir.expanduser())
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
        self.job: JobTime | None = None
        self.notes: list[str] = []
        self._end_s = math.inf

    @property
    def evaluation(self) -> DatasetEvaluation:
        evaluation = self.parts.trajectory_builder.evaluation
        assert isinstance(evaluation, DatasetEvaluation)  # `bind_parts` made it
        return evaluation

    async def run(self, started: float) -> Probe:
        parts, context = self.parts, self.context
        context.reward_metric, context.agent = parts.reward_metric, parts.workflow.source
        config_text = dump_config(self.loaded)  # before the probe changes it
        replace_file(context.folder / "config.yml", config_text)
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
        self._end_s = time.monotonic() + self.options.max_probe_s
        before = copy_usage(parts.llms)
        records = await self._sample()
        usage = measure_usage(parts.llms, before, records)
        episode_s = self.clock.measure("SAMPLE") / max(1, len(records))
        twice, why_not = await self._score_again(records)
        select_s = await self._validate(episode_s)
        found = Probe(parts, size, self.evaluation.report("train", 0, records), records, twice, why_not, usage)
        load_s = await self._train(found, episode_s, save_s) if self.trains_here else 0.0
        files_s = await self._time_files()
        epochs = list_probed_epochs(self.clock)
        larger = [epoch for epoch in epochs if size.group_size and epoch.num_episodes > len(records)]
        sampled = [epoch.collect_s / epoch.num_episodes for epoch in larger]
        each_s = min(episode_s, select_s, *sampled)
        job = None if self.is_whole else self.job
        found.timings = Timings(start_s, each_s, select_s, save_s, load_s, files_s, epochs, self.is_whole, job)
        found.rows, found.notes, found.trains_here = self.clock.rows, self.notes, self.trains_here
        found.config_text = config_text
        found.max_model_len = getattr(context.policy, "max_model_len", None)
        found.memory = parts.adapter.measure_memory() if isinstance(parts.adapter, LocalAdapter) else None
        return found

    def _left(self) -> float:
        """Returns the seconds that the probe still has."""
        return max(0.0, self._end_s - time.monotonic())

    def _allow(self, seconds: float) -> None:
        """Sets after how many seconds the episodes that follow are stopped, as by `limits.max_minutes`."""
        self.context.started_s, self.context.limits.max_minutes = time.monotonic(), max(seconds, 1e-3) / 60

    def _measure_size(self) -> RunSize:
        size, stages = self.parts.measure_size(), list_stages(self.config)
        if not stages:
            return size
        return replace(size, num_epochs=stages[0].settings.num_epochs)  # only the first one is probed

    async def _sample(self) -> list[EpisodeRecord]:
        """Runs the agent on the examples that the run collects first, on as many as there is time for."""
        known = self.evaluation.example_ids("train")
        ids = list(self.plan.example_ids if self.plan is not None else known)[: self.options.num_examples]
        self.clock.stage(None, "SAMPLE", len(ids) * self.options.num_samples)
        end_s = time.monotonic() + SAMPLE_SHARE * self._left()
        started = time.monotonic()
        records = await self._collect(ids[:NUM_FIRST], end_s)
        each_s = (time.monotonic() - started) / max(1, len(records)) * self.options.num_samples
        if affordable := max(0, int((end_s - time.monotonic()) / each_s)):
            records += await self._collect(ids[NUM_FIRST:][:affordable], end_s)
        self.clock.stop()
        num_sampled = len({record.key.example_id for record in records})
        if num_sampled < len(ids):
            self.notes.append(f"there was time for {num_sampled} of {len(ids)} examples; --probe_seconds allows more")
        if all(record.reward is None for record in records):
            late = f"none ended in {SAMPLE_SHARE * self.options.max_probe_s:.1f} s; --probe_seconds allows more"
            error = self.evaluation.report("train", 0, records).error if records else late
            raise EvaluationError(f"no sampled episode has a reward: {error}")
        return records

    async def _collect(self, ids: Sequence[str], end_s: float) -> list[EpisodeRecord]:
        """Returns the episodes of these examples that end in time."""
        keys = [EpisodeKey("collect", 0, example, n) for example in ids for n in range(self.options.num_samples)]
        self._allow(end_s - time.monotonic())
        try:
            return await self.evaluation.collect(keys)
        except BudgetReached:
            items = {str(item.id): item for item in self.evaluation.examples("train")}
            return [record for record in self.context.load_episodes(0, items) if record.key in set(keys)]

    async def _score_again(self, records: Sequence[EpisodeRecord]) -> tuple[list[tuple[float, float]], str]:
        self.clock.stage(None, "SCORE AGAIN", None)
        try:
            async with asyncio.timeout(SCORE_SHARE * self._left()):
                return await score_twice(self.evaluation, records, self.loaded.config.eval.general.max_concurrency)
        except TimeoutError:
            return [], "scoring again did not end in time"
        finally:
            self.clock.stop()

    async def _validate(self, episode_s: float) -> float:
        """Validates on as many select examples as there is time for; returns the seconds per episode."""
        items, before = self.evaluation.splits["select"], self.clock.measure("BASELINE")
        affordable = int(VALIDATION_SHARE * self._left() / max(episode_s, 1e-6))
        self.evaluation.splits["select"] = items[: max(1, affordable)]
        self._allow(2 * VALIDATION_SHARE * self._left())
        try:
            async with asyncio.timeout(self._left()):
                await versions.validate(self.parts.trainer, self.context, BASELINE)
        except (BudgetReached, TimeoutError):
            self.notes.append("there was no time to validate, so that is taken to be as fast as sampling")
            return episode_s
        finally:
            self.clock.stop()
        return (self.clock.measure("BASELINE") - before) / len(self.evaluation.splits["select"])

    async def _train(self, found: Probe, episode_s: float, save_s: float) -> float:
        """Times jobs and then epochs, as far as there is time; returns the seconds of loading a checkpoint.

        Records the error that ended them, which would end the run as well. A job that is late is left to its thread:
        it ends at its next micro-batch, when the engine is closed.
        """
        size, records, load_s = found.size, found.records, 0.0
        settings = self.parts.trajectory_builder.trajectory_builder_config
        least = max(2, -(-len(records) // max(1, size.group_size)))
        guess = JobTime(0.0, TRAIN_FACTOR * episode_s * max(1, size.group_size))
        recall = self.evaluation.recall
        try:
            if hasattr(settings, "examples_per_epoch"):
                settings.examples_per_epoch = min(least, size.examples_per_epoch)
            self._recall(records)
            self._allow(self._left())
            async with asyncio.timeout(self._left()):
                self.job = await time_jobs(self.parts, guess.group_s, self._left)
                load_s = await self._load_checkpoint()
            job = self.job or guess
            each_s = size.group_size * episode_s + size.groups_per_example * job.group_s
            available_s = EPOCH_SHARE * self._left() - job.fixed_s - save_s
            epoch_s, num_affordable = size.examples_per_epoch * each_s, int(max(0.0, available_s) / max(each_s, 1e-6))
            self.is_whole = size.group_size > 0 and num_affordable >= size.examples_per_epoch
            count = min(MAX_EPOCHS, size.num_epochs, int(available_s / max(epoch_s, 1e-6))) if self.is_whole else 1
            if len({record.reward for record in records}) == 1:  # perhaps nothing can be trained: one epoch shows it
                count = 1
            if not self.is_whole and num_affordable < 2:
                self.notes.append("there was no time for an epoch; --probe_seconds allows more")
                return load_s
            if num_affordable > least:
                self.evaluation.recall = recall
            if hasattr(settings, "examples_per_epoch"):
                settings.examples_per_epoch = min(num_affordable, size.examples_per_epoch)
            async with asyncio.timeout(self._left()):
                await self._run_epochs(found, count)
        except (BudgetReached, TimeoutError):
            self.notes.append("the probe of training was stopped when time was up; --probe_seconds allows more")
        except ReinforgeError as error:
            logger.debug("the probe of training failed", exc_info=True)
            found.failure = str(error)
        finally:
            self.clock.stop()
        return load_s

    async def _run_epochs(self, found: Probe, count: int) -> None:
        config, run = self.config, self.config.run_configuration
        config.limits.max_empty_updates = count + 1
        if not self.is_whole:
            config.limits.max_refills = 0
        if run is not None:
            run.validation_interval = count + 1
        before = await self._score_sample(found.records)
        self._allow(self._left())
        try:
            await self.parts.trainer.run(count)
        except asyncio.CancelledError:  # time is up, perhaps within a job, during which nothing is scored
            raise
        except ReinforgeError:
            await self._measure_move(found, before)
            raise
        await self._measure_move(found, before)

    async def _measure_move(self, found: Probe, before: NDArray[np.float64]) -> None:
        if len(before) and self.clock.rows:
            found.moved = float(np.abs(await self._score_sample(found.records) - before).mean())

    async def _score_sample(self, records: Sequence[EpisodeRecord]) -> NDArray[np.float64]:
        """Returns the log-probs of a few sampled replies by the weights that are served now."""
        policy, replies = self.parts.adapter.policy(), [call.reply.tokens for each in records for call in each.calls]
        known = [tokens for tokens in replies if tokens is not None and tokens.token_ids][:NUM_MOVED]
        if policy is None or not known:
            return np.zeros(0)
        scored = await policy.score([[*tokens.prompt_token_ids, *tokens.token_ids] for tokens in known])
        parts = [row[-len(tokens.token_ids) :] for row, tokens in zip(scored, known, strict=True)]
        return np.concatenate(parts, dtype=np.float64)

    def _recall(self, records: Sequence[EpisodeRecord]) -> None:
        known = {record.key: record for record in records}

        def recall(key: EpisodeKey, item: EvalInputItem) -> EpisodeRecord | None:
            return known.get(key)

        self.evaluation.recall = recall

    async def _load_checkpoint(self) -> float:
        """Loads a checkpoint as the verdict does; returns the seconds."""
        started, context = time.monotonic(), self.context
        name = context.policy_versions[0].checkpoint if context.policy_versions else None
        if name is None or not context.checkpoints.has(context.policy_versions[0].version):
            return 0.0
        await restore_weights(self.parts.adapter, context.checkpoints.verify(name), context.policy_versions[0].version)
        return time.monotonic() - started

    async def _time_files(self) -> float:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._left()):
                await run_in_daemon_thread(self._write_files, "preflight-files")
        except TimeoutError:
            self.notes.append("there was no time to write the files of a run; --probe_seconds allows more")
        return time.monotonic() - started

    def _write_files(self) -> None:
        folder = self.context.folder
        summary = RunSummary("preflight", "completed", folder)
        self.context.journal.flush()
        try:
            write_page(folder, summary)
            write_report(folder / "report.md", summary, self.clock.rows, self.context.validations)
            if can_draw_plots():
                draw_reward_plot(folder / "reward_plot.png", self.clock.rows, self.context.validations, title="probe")
        except ReinforgeError:
            logger.debug("the files of the probe were not written", exc_info=True)


async def time_jobs(parts: Parts, guess_s: float, left: Callable[[], float]) -> JobTime | None:
    """Trains a small and, if there is time, a larger job on what the builder collects for epoch 0; None: none.

    The small one is timed again afterwards, since much runs for the first time in it.

    Args:
        guess_s: Seconds that a group may take.
    """
    await parts.trajectory_builder.start_run(NAME, {"epoch": 0})
    collection = await parts.trajectory_builder.finalize(NAME, {"epoch": 0})
    attach_calls(collection, parts.trajectory_builder, parts.adapter)
    algorithm, least = parts.algorithm.for_epoch(0), parts.config.curriculum_learning.min_reward_diff
    kept = split_by_signal(collection.groups, least, algorithm.needs_groups, algorithm.has_signal).kept
    few = max(1, min(len(kept) // SMALL_JOB, int(left() / SMALL_JOB / max(guess_s, 1e-6))))
    if not kept or few * guess_s > left():
        return None
    try:
        small_s = await _time_job(parts.adapter, kept[:few], "first")
        if small_s / few * len(kept) > left() / 2:
            return JobTime(0.0, small_s / few)
        many_s = await _time_job(parts.adapter, kept, "large")
        return fit_job_time((few, await _time_job(parts.adapter, kept[:few], "small")), (len(kept), many_s))
    except JobFailed:  # such as a group that has no credit alone
        return None


async def _time_job(adapter: TrainerAdapter, groups: Sequence[TrajectoryGroup], name: str) -> float:
    started, collection = time.monotonic(), TrajectoryCollection.from_groups(groups, NAME, epoch=0)
    collection.job_key = f"{NAME}/{name}"
    versions.refuse_failed([await adapter.wait_until_complete(await adapter.submit(collection))])
    return time.monotonic() - started
