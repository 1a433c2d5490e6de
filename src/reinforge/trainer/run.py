"""One run around any trainer: folder, journal, baseline, training, final validation, the verdict, the files."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.fast_paths import FastPaths
from reinforge.engine.garbage_collection import limit_garbage_collection
from reinforge.errors import (
    BudgetReached,
    ConfigError,
    EvaluationError,
    GuardHalted,
    JobFailed,
    Problem,
    ReinforgeError,
    RunPaused,
    describe_error,
)
from reinforge.files import remove_folder
from reinforge.port_bases import PreparesTraining, SavesWeights
from reinforge.registry import Registry
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import JOURNAL, JournalReader
from reinforge.runs.manifest import write_listed
from reinforge.runs.predictions import locate_predictions, measure_predictions, read_predictions
from reinforge.runs.progress import SilentProgress
from reinforge.runs.report import write_report
from reinforge.runs.rows import PHASES, EpochMetrics, ValidationRow, list_guard_events
from reinforge.runs.run_folder import ResumePoint
from reinforge.runs.summary import NEEDS_MATPLOTLIB, RunSummary, can_draw_plots, load_summary, write_summary
from reinforge.safe_text import redact_secrets
from reinforge.trainer import versions
from reinforge.trainer.context import END, RunContext
from reinforge.trainer.explanation import RunFigures, explain
from reinforge.trainer.gate import MODEL, BaseComparison
from reinforge.trainer.loop import EpochTrainer
from reinforge.trainer.options import RunOptions
from reinforge.trainer.provenance import Provenance, collect_provenance, hash_data, identify_evaluators, seal_run
from reinforge.trainer.refusals import build_no_job_error, refuse_unhealthy, refuse_unscored, refuse_untrained
from reinforge.trainer.run_log import LoggedProgress, log_to_folder, watch_progress
from reinforge.trainer.setup.compatibility import require_policy_llm
from reinforge.trainer.setup.components import BUNDLED, ComponentBuilder
from reinforge.trainer.setup.effective_settings import effective_settings
from reinforge.trainer.setup.parts import Parts, bind_parts, finish_trackers, start_guards, start_trackers
from reinforge.trainer.setup.prepare import build_parts, refuse_absent_model, require_enabled, settle_dtype
from reinforge.trainer.setup.run_settings import shrink_for_smoke, shrink_splits
from reinforge.trainer.shutdown import describe_kept_work, run_interruptible
from reinforge.types.job import TrainingJobStatus
from reinforge.version import __version__

if TYPE_CHECKING:
    from reinforge.engine.model.dtype import DtypeChoice

logger = logging.getLogger("reinforge")


def write_run_files(
    context: RunContext, summary: RunSummary, history: Sequence[EpochMetrics], config: FinetuneConfig
) -> None:
    """Writes summary, page, report and plot from the results so far, and ends the session in the journal."""
    context.begin_stage(END)
    context.wall_time_s.pop("START", None)
    summary.episodes, summary.tokens = dict(context.episodes), dict(context.tokens)
    summary.missing_reason = context.missing.find_commonest()
    summary.wall_time_s = {name: round(seconds, 3) for name, seconds in context.wall_time_s.items()}
    summary.policy_versions = context.policy_versions
    seconds, first = summary.wall_time_s if summary.status == "completed" else {}, context.journal.metrics(before=1)
    summary.predictions = measure_predictions(summary.predictions, summary.baseline, first, seconds)
    summary.guards = list_guard_events(context.journal.stages())
    summary.explanations = explain(RunFigures(summary, history, context.validations, config, context.is_relative))
    write_summary(context.folder / "summary.json", summary)
    if summary.is_incomplete:  # what follows takes seconds, and a second signal does not wait for it
        _record_end(context, summary)
    _write_page(context, summary)
    write_report(context.folder / "report.md", summary, history, context.validations)
    arms = {"base": summary.confirm_base, "tuned": summary.confirm_tuned}
    if can_draw_plots():
        from reinforge.runs.plot import draw_reward_plot  # where matplotlib is installed

        draw_reward_plot(
            context.folder / "reward_plot.png", history, context.validations, title=context.run_id, confirm=arms
        )
    else:
        context.progress.note(f"no reward plot: {NEEDS_MATPLOTLIB}")
    if not summary.is_incomplete:
        _record_end(context, summary)
    for line in summary.closing_lines(color=False):
        logger.info(line)


def _record_end(context: RunContext, summary: RunSummary) -> None:
    context.journal.set_facts(status=summary.status, reason=summary.reason, can_resume=summary.can_resume)
    context.journal.end_session(summary.status if not summary.reason else f"{summary.status}: {summary.reason}")
    context.journal.flush()


def _write_page(context: RunContext, summary: RunSummary) -> None:
    """Writes `report.html`; a run whose results are safe does not fail for lack of it."""
    try:
        from reinforge.runs.page.page import write_page

        write_page(context.folder, summary)
    except Exception as error:
        logger.exception("report.html was not written")
        command = f"`reinforge report {context.folder}` regenerates it"
        context.progress.note(f"no report.html: {describe_error(error)}; {command}")


CLEANUP_S = 5.0
"""Seconds that the cleanup may take after a run that was stopped or failed; a completed one waits for it."""


def run_config(loaded: LoadedConfig, options: RunOptions | None = None, registry: Registry | None = None) -> RunSummary:
    """Runs a configuration to its end and returns the summary; the blocking form of `run_async`.

    Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 stop the run; finished work stays in the run folder. A second signal, or a run
    that does not stop in time, ends the process.
    """
    options = options or RunOptions()
    with closing(options.progress or SilentProgress()):
        return run_interruptible(run_async(loaded, options, registry), options)


async def run_async(loaded: LoadedConfig, options: RunOptions, registry: Registry | None = None) -> RunSummary:
    """Runs a configuration to its end inside a running event loop; see `run_config`."""
    progress = options.progress or SilentProgress()
    progress.stage(None, "PREPARE", None)
    config: FinetuneConfig = loaded.config.finetuning
    if loaded.problems:
        from reinforge.trainer.setup.check import refuse_problems  # collects the problems of data and components too

        await refuse_problems(loaded, registry)
    require_enabled(loaded)
    if options.smoke:
        shrink_for_smoke(loaded.config)
    dtype = settle_dtype(loaded, options.resume)
    folder = options.resume or options.choose_folder(config, "-smoke" if options.smoke else "")
    if options.resume is not None:
        from reinforge.runs.journal.repair import repair_journal
        from reinforge.trainer.resume import count_added_epochs

        repair_journal(folder)
        added = count_added_epochs(folder, config.num_epochs)
        if not added and (finished := read_summary(folder)) is not None:
            return finished
    if options.overwrite:
        _ensure_replaceable(folder)
    async with ComponentBuilder(loaded, registry, progress=progress) as builder:
        parts = await build_parts(builder, None if options.resume or options.overwrite else folder)
        if options.smoke:
            shrink_splits(parts.splits, loaded.config.trajectory_builders[str(config.trajectory_builder)])
        refuse_absent_model(loaded.config)
        if options.overwrite and folder.exists():
            from reinforge.runs.removal import remove_run

            remove_run(folder)
        journal = RunJournal.open(folder) if options.resume else RunJournal(folder)
        try:
            options.folder = folder
            context = RunContext(folder.name, journal, LoggedProgress(progress), config.limits)
            context.transcripts, context.find_pause = config.transcripts, options.find_pause or context.find_pause
            context.baseline_from = options.baseline_from
            context.reward_metric, context.agent = parts.reward_metric, parts.workflow.source
            run = _Run(loaded, parts, context, options)
            run.dtype = dtype
            if (config.policy.model or "").startswith(BUNDLED):
                run.model_folder = await builder.get_model_path()
            with log_to_folder(folder):
                try:
                    return await run.run()
                except JobFailed as error:
                    if options.smoke:
                        error.add_note("--smoke collects only a few episodes; a full run may find a training signal")
                    raise
        finally:
            journal.close()


def _ensure_replaceable(folder: Path) -> None:
    """Refuses to overwrite what is not a run, or a run that a process works on."""
    if not folder.exists():
        return
    if not (folder / JOURNAL).is_file():
        message = f"{folder} is not a run folder, since it has no {JOURNAL}, so it is not overwritten"
        raise ConfigError(Problem("overwrite", message, "choose another run_name"))
    from reinforge.runs.removal import ensure_removable

    ensure_removable(folder)


def read_summary(folder: Path) -> RunSummary | None:
    return load_summary(folder) if JournalReader(folder).facts().get("status") == "completed" else None


class _Run:
    """One run: its parts, its journal, and its summary as it fills."""

    def __init__(self, loaded: LoadedConfig, parts: Parts, context: RunContext, options: RunOptions):
        self.loaded, self.parts, self.context, self.options = loaded, parts, context, options
        self.config, self.trainer = parts.config, parts.trainer
        self._started = self._changed = False
        self._made_of, self._predicted = Provenance(), dict[str, float]()
        self.model_folder: str | None = None
        self.dtype: DtypeChoice | None = None
        self.summary = RunSummary(run_id=context.run_id, status="failed", reason="", folder=context.folder)
        self.summary.smoke, self.summary.can_resume = options.smoke, not options.smoke
        self._comparison = BaseComparison(parts, context, self.summary)
        self.summary.stages = {name: stage.num_epochs for name, stage in self.config.pipeline.items()}

    async def run(self) -> RunSummary:
        """Runs every stage; however the run ends, its folder then holds a summary with the reason."""
        try:
            await self._run_stages()
            self.summary.status = "completed"
        except BudgetReached as reached:
            self.summary.status, self.summary.policy_versions = "stopped", self.context.policy_versions
            self.summary.reason = f"{self.summary.reason}; {reached}" if self.summary.reason else str(reached)
            self._comparison.record_best_so_far()
            reached.add_note(describe_kept_work(self.context.folder, self.summary))
            raise
        except asyncio.CancelledError:
            self.summary.status, self.summary.reason = "stopped", f"interrupted in stage {self.context.stage_name}"
            self._comparison.record_best_so_far()
            raise
        except Exception as error:
            if not self._started:  # refused before it started: the folder stays unchanged
                raise
            self.summary.reason = redact_secrets(f"{self.context.stage_name}: {error}")
            logging.getLogger("reinforge").exception("the run failed in stage %s", self.context.stage_name)
            self._comparison.record_best_so_far()
            nothing = self.context.tally.describe_none_outputs(self.context.agent)
            if nothing is not None and isinstance(error, EvaluationError) and nothing not in str(error):
                error.add_note(nothing)
            self.summary.can_resume = self.summary.can_resume and getattr(error, "can_resume", True)
            error.add_note(describe_kept_work(self.context.folder, self.summary))
            raise
        finally:
            try:
                if self._started and self.summary.status == "stopped":
                    await self._commit_pending()
                if self._started:
                    write_run_files(
                        self.context, self.summary, getattr(self.trainer, "_reward_history", []), self.config
                    )
            finally:  # on a full disk too, free the model, the journal and the folder's lock
                await self._clean_up()
                finish_trackers(self.parts, self.context, self.summary, self.options.live)
                self.context.progress.close()
        return self.summary

    def _list_sent_variables(self) -> list[tuple[str, str]]:
        run = self.loaded.config.finetuning.run_configuration
        may_send = self.loaded.placeholders or (run is not None and run.validation_config_file)
        if not may_send and "reinforge.rollout.models.endpoint_config" not in sys.modules:
            return []  # without variables in it, only an endpoint reads one
        from reinforge.trainer.setup.reach import list_reach

        return list_reach(self.loaded).format_sent_variables()

    async def _run_stages(self) -> None:
        config, context, trainer = self.config, self.context, self.trainer
        self._record_settings()
        self.options.live.blocked_s = config.limits.episode_timeout_s
        self.options.live.folder = context.folder
        self.options.live.record_end = self._record_forced_end
        settings = [*effective_settings(self.parts), *self._list_sent_variables()]
        if self.dtype is not None:
            settings.append(("dtype", str(self.dtype)))
            if self.options.resume is None:
                context.journal.set_facts(dtype=str(self.dtype))
        context.progress.start(context.run_id, context.folder, config.num_epochs, settings)
        runner = await bind_parts(self.loaded, self.parts, self.context)
        context.begin_stage("LOAD")
        await trainer.initialize(config)
        await refuse_unhealthy(self.parts.adapter)
        if isinstance(adapter := self.parts.adapter, PreparesTraining):
            await adapter.prepare_training()
        context.policy = self.parts.adapter.policy()
        self._require_policy()
        size = self.parts.measure_size()
        context.progress.plan(size, self._predicted)
        context.journal.set_facts(size=asdict(size), each_s=self._predicted)
        if self.options.resume is None or not await self._resume():
            await versions.record_base(context, self.parts.adapter)
        start_guards(self.parts, context)
        start_trackers(self.loaded, self.parts, context)
        self.summary.ignored = runner.ignored
        async with watch_progress(context, runner):
            with limit_garbage_collection(enabled=FastPaths.switch(config.policy.fast_paths).garbage_collection):
                known = context.validations[:1]
                baseline = known[0] if known else await versions.validate(trainer, context, versions.BASELINE)
                self.summary.baseline = self._comparison.get_summary(baseline)
                context.report_constant_reward("note: before training")
                refuse_unscored(baseline, config.outcomes.max_missing)
                self._record_late_provenance()
                self._reserve_verdict()
                try:
                    await self._judge(await self._train())
                except RunPaused:
                    await self._commit_pending()
                    await self._final_validation(early=True)
                    raise
                except BudgetReached as reached:
                    await self._judge_early(reached)
                    raise
                except ReinforgeError as error:
                    if not error.is_exhausted or not self.summary.num_jobs or self.options.find_pause is not None:
                        raise
                    await self._judge_exhausted(error)
                finally:
                    runner.note_unused_prompts(context.progress.note)

    def _reserve_verdict(self) -> None:
        """Lets the limits keep what the verdict needs."""
        evaluation = self.trainer.trajectory_builder.evaluation
        assert evaluation is not None
        if isinstance(self.parts.adapter, SavesWeights):
            confirm = 2 * len(evaluation.example_ids("confirm")) * self.config.gate.num_samples
            self.context.verdict_size = 1 + confirm / len(evaluation.example_ids("select"))

    async def _judge_early(self, reached: BudgetReached) -> None:
        """Takes the verdict of a run that reached a limit while it trained, with what the limits keep for it."""
        if isinstance(reached, GuardHalted) or not self.context.verdict_size or not self.summary.num_jobs:
            return
        await self._commit_pending()
        if self.context.pending is None:  # otherwise the adapter alone holds the last weights
            await self._judge([], early=True)

    async def _judge_exhausted(self, error: ReinforgeError) -> None:
        """Takes the verdict of a run whose last epochs had nothing left to learn from."""
        self.context.progress.note(f"training ends early, and what it has learned is judged: {error}")
        await self._commit_pending()
        if self.context.pending is not None:  # the adapter alone holds the last weights
            raise error
        await self._judge([], early=True)

    async def _judge(self, statuses: list[TrainingJobStatus], *, early: bool = False) -> None:
        """Validates the last weights and takes the verdict."""
        context = self.context
        context.verdict_size = 0.0
        await versions.adopt_unpublished(context, self.parts.adapter, statuses)
        final = await self._final_validation(early=early)
        self.summary.final = self._comparison.get_summary(final)
        refuse_unscored(final, self.config.outcomes.max_missing)
        await self._comparison.decide()
        if not self.summary.promoted and (context.folder / MODEL).exists():  # of the verdict after fewer epochs
            remove_folder(context.folder / MODEL)

    async def _train(self) -> list[TrainingJobStatus]:
        num_epochs, may_train_nothing = self.config.num_epochs, self.config.limits.allow_no_training
        if isinstance(self.trainer, EpochTrainer):
            try:
                statuses = await self.trainer.run(num_epochs)
            finally:
                self.summary.num_jobs = len(self.trainer._statuses)
        else:
            from reinforge.trainer.observer import TrainerObserver  # of a user's trainer

            observer = TrainerObserver(self.trainer, self.context)
            observer.begin()
            try:
                statuses = await self.trainer.run(num_epochs) or []
            finally:
                self.summary.num_jobs = observer.num_jobs
            versions.refuse_failed(statuses)
            self.summary.num_jobs = max(len(statuses), observer.num_jobs)
            if not self.summary.num_jobs and not may_train_nothing and not self.summary.smoke:
                raise build_no_job_error(type(self.trainer).__name__, observer.num_collections, num_epochs)
        if not may_train_nothing:
            refuse_untrained(statuses)
        return statuses

    def _record_settings(self) -> None:
        """Writes the resolved configuration; refuses to resume with a changed one."""
        context, text, root = self.context, dump_config(self.loaded), self.loaded.project_root
        data = hash_data(self.parts.splits)
        made_of, changes = collect_provenance(self.loaded, self.model_folder), list[dict[str, object]]()
        if self.options.resume is not None:
            from reinforge.trainer import resume  # only where a run resumes

            allowed = self.options.allow_config_change
            judge_only = self.options.judge_only
            changed = resume.refuse_changes(
                context.journal, text, data, made_of, root, allowed=allowed, judge_only=judge_only
            )
            if not changed:
                known = resume.read_provenance(context.journal.facts())
                made_of = made_of if known is None else known.extended_by(made_of)
            else:
                self._changed = True
                changes.append({"changed": changed})
            if added := resume.count_added_epochs(context.folder, self.config.num_epochs):
                changes.append({"added_epochs": added})
                context.progress.note(f"{added} more epochs than before; the verdict is computed again at the end")
            text = resume.keep_settings_of_one_call(context.folder, text)
        write_listed(context.folder, "config.yml", text)
        self.summary.config_sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.summary.predictions, self._predicted = read_predictions(locate_predictions(text, data))
        self.summary.evaluators_sha256 = identify_evaluators(self.loaded)
        context.journal.set_facts(
            run_id=context.run_id,
            config_sha256=self.summary.config_sha256,
            data_sha256=data,
            clusters=self.parts.clusters,
            project_root=str(root),
            seal=seal_run(context.folder, root),
            provenance=made_of.as_dict(),
            evaluators=self.summary.evaluators_sha256,
            version=__version__,
            status="running",
            reason="",
            can_resume=True,
            resumes_epochs=self._can_reuse_episodes,
        )
        self._started, self._made_of = True, made_of
        context.journal.start_session()
        for change in changes:
            context.journal.record_stage(versions.BASELINE, "CONFIG", change)

    def _record_late_provenance(self) -> None:
        """Adds the modules that the agent imported only when it ran, and a hub model that was not in the cache."""
        found = self._made_of.extended_by(collect_provenance(self.loaded, self.model_folder))
        self.context.journal.set_facts(provenance=found.as_dict())

    @property
    def _can_reuse_episodes(self) -> bool:
        """True if a resumed run may reuse collected episodes; other trainers and builders collect again."""
        return self.trainer.is_resumable and self.parts.trajectory_builder.is_resumable

    async def _resume(self) -> bool:
        """Restores the last durable state; False: there is none, so the run starts from the beginning."""
        from reinforge.trainer import resume

        context = self.context
        snapshot, notes = resume.choose_snapshot(context.journal, context.checkpoints)
        if snapshot is not None and not self._can_reuse_episodes:
            snapshot = context.journal.find_snapshot(versions.BASELINE)
            if snapshot is not None and snapshot.checkpoint and context.checkpoints.find_damage(snapshot.checkpoint):
                snapshot = None
        context.recalls = set(PHASES.values()) - {"collect"}
        if self._can_reuse_episodes:
            context.recalls.add("collect")
        recorded = {} if snapshot is None else snapshot.state["counters"]["wall_time_s"]
        context.add_earlier_time(recorded, resume.read_time_spent(context.folder))
        if snapshot is None:
            notes.append("no usable checkpoint is left; restarting from the beginning")
            context.journal.rewind(versions.BASELINE - 1, forget_jobs=True, forget_episodes=self._changed)
        else:
            await resume.restore_snapshot(context, self.parts.adapter, snapshot, forget_episodes=self._changed)
            context.journal.record_resume(snapshot.epoch)
            notes.append(f"resuming {ResumePoint(snapshot.epoch, snapshot.checkpoint)}")
        for text in notes:
            context.progress.note(text)
        return snapshot is not None

    async def _commit_pending(self) -> None:
        """Makes the last adopted weights durable when the run stops between two checkpoints."""
        if self.context.pending is not None:
            live = self.options.live
            live.is_saving = True
            try:
                await self.context.pending()
                self.context.pending = None
            except ReinforgeError as error:  # its jobs will run again: only time is lost
                logging.getLogger("reinforge").warning("cannot write the last checkpoint: %s", error)
            finally:
                live.is_saving = False

    def _record_forced_end(self, why: str) -> str:
        """Records, from another thread, that the process exits now; returns the message for the user."""
        context, summary = self.context, self.summary
        if context.stage_name == END:  # cleaning up hangs: the files say how the run itself ended
            if summary.status == "completed":
                return f"{why}; the run itself was over, and its files are in {context.folder}"
            return f"{why}\n{describe_kept_work(context.folder, summary)}"
        epoch = "" if context.stage_epoch is None else f" of epoch {context.stage_epoch}"
        summary.status, summary.reason = "stopped", f"{why} in stage {context.stage_name}{epoch}"
        self._comparison.record_best_so_far()
        text = describe_kept_work(context.folder, summary)
        if context.pending is not None:
            text = f"the jobs since the last checkpoint are not saved; the next --resume trains them again\n{text}"
        context.begin_stage(END)
        summary.episodes, summary.tokens = dict(context.episodes), dict(context.tokens)
        summary.policy_versions, summary.wall_time_s = list(context.policy_versions), dict(context.wall_time_s)
        write_summary(context.folder / "summary.json", summary)
        _record_end(context, summary)
        return f"{summary.reason}\n{text}"

    def _require_policy(self) -> None:
        """Raises a `ConfigError` if an entry of `llms` is the policy and the adapter serves none, or the other way."""
        for llm in self.parts.llms.values():
            if llm.is_policy:
                _ = llm.model_name
        if self.parts.adapter.policy() is not None and self.parts.trajectory_builder.requires_policy_llm:
            problems = require_policy_llm(self.loaded.config)
            if problems:
                raise ConfigError([replace(each, location=self.loaded.locate(each.path)) for each in problems])

    async def _clean_up(self) -> None:
        """Frees the trainer's resources; an error here never hides how the run ended."""
        self.context.policy = None  # it has the model, and the context is part of reference cycles
        try:
            async with asyncio.timeout(CLEANUP_S if self.summary.is_incomplete else None):
                await self.trainer.cleanup()
        except Exception:  # a user's cleanup may raise anything
            logging.getLogger("reinforge").exception("cleanup failed")

    async def _final_validation(self, *, early: bool) -> ValidationRow:
        context, policy = self.context, self.parts.adapter.policy()
        if policy is not None and not context.checkpoints.has(policy.version):
            await context.checkpoints.write(self.parts.adapter, policy.version)
        if not early or not isinstance(self.trainer, EpochTrainer):
            return await versions.validate(self.trainer, context, self.config.num_epochs - 1)
        last, epoch = context.validations[-1], len(self.trainer._reward_history) - 1
        return last if last.epoch == epoch else await versions.validate(self.trainer, context, epoch)
