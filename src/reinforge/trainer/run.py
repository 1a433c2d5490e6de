"""One run around any trainer: folder, journal, baseline, training, final validation, the verdict, the files."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path
from typing import Any

from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.fast_paths import FastPaths
from reinforge.engine.garbage_collection import limit_garbage_collection
from reinforge.errors import BudgetReached, JobFailed, ReinforgeError
from reinforge.evaluation.run import DatasetEvaluation, choose_error_type
from reinforge.files import replace_file
from reinforge.registry import Registry
from reinforge.rollout.runner import EpisodeRunner
from reinforge.runs.checkpoints import copy_model
from reinforge.runs.journal import RunJournal, upgrade_journal
from reinforge.runs.journal_reader import JournalReader
from reinforge.runs.plot import NEEDS_MATPLOTLIB, can_draw_plots, draw_reward_plot
from reinforge.runs.progress import SilentProgress
from reinforge.runs.report import write_report
from reinforge.runs.rows import EpochMetrics, ValidationRow
from reinforge.runs.run_folder import ResumePoint
from reinforge.runs.summary import RunSummary, load_summary, write_summary
from reinforge.runs.validations import choose_best_validation
from reinforge.trainer import resume, stages
from reinforge.trainer.context import END, RunContext
from reinforge.trainer.gate import decide
from reinforge.trainer.options import RunOptions
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.trainer.setup.prepare import Parts, build_parts, effective_settings, require_enabled
from reinforge.trainer.setup.run_settings import shrink_for_smoke, shrink_splits
from reinforge.trainer.signals import describe_kept_work, run_with_signals
from reinforge.trainer.watchdog import log_to_folder, watch_progress
from reinforge.types.evaluation import EvalOutputItem, EvaluationReport, MetricSummary
from reinforge.version import __version__

CLEANUP_S = 5.0
"""Seconds that the cleanup may take after a run was stopped."""


def run_config(loaded: LoadedConfig, options: RunOptions | None = None, registry: Registry | None = None) -> RunSummary:
    """Runs a configuration to its end and returns the summary; the blocking form of `run_async`.

    Ctrl-C and SIGTERM stop the run; finished work stays in the run folder. A second signal ends the process.

    Raises:
        ConfigError: The configuration or the data is wrong; nothing was started.
        Interrupted: A signal stopped the run.
        ReinforgeError: The run failed; the summary in its folder holds the reason.
    """
    options = options or RunOptions()
    with asyncio.Runner() as runner:
        return runner.run(run_with_signals(run_async(loaded, options, registry), options))


async def run_async(loaded: LoadedConfig, options: RunOptions, registry: Registry | None = None) -> RunSummary:
    """Runs a configuration to its end inside a running event loop; see `run_config`."""
    config: FinetuneConfig = loaded.config.finetuning
    require_enabled(loaded)
    if options.smoke:
        shrink_for_smoke(loaded.config)
    folder = options.resume or options.choose_folder(config, "-smoke" if options.smoke else "")
    if options.resume is not None:
        upgrade_journal(folder)
        if (finished := read_summary(folder)) is not None:
            return finished
    async with ComponentBuilder(loaded, registry) as builder:
        parts = await build_parts(builder, None if options.resume else folder)
        if options.smoke:
            shrink_splits(parts.splits, loaded.config.trajectory_builders[str(config.trajectory_builder)])
        journal = RunJournal.open(folder) if options.resume else RunJournal(folder)
        options.folder = folder
        context = RunContext(folder.name, journal, options.progress or SilentProgress(), config.limits)
        context.transcripts = config.transcripts
        run = _Run(loaded, parts, context, options)
        with log_to_folder(folder):
            try:
                return await run.run()
            except JobFailed as error:
                if options.smoke:
                    error.add_note("--smoke collects only a few episodes; a full run may find a training signal")
                raise


def read_summary(folder: Path) -> RunSummary | None:
    """Returns the summary of a completed run; None: the run is not completed."""
    return load_summary(folder) if JournalReader(folder).facts().get("status") == "completed" else None


class _Run:
    """One run: its parts, its journal, and its summary as it fills."""

    def __init__(self, loaded: LoadedConfig, parts: Parts, context: RunContext, options: RunOptions):
        self.loaded, self.parts, self.context, self.options = loaded, parts, context, options
        self.config, self.trainer = parts.config, parts.trainer
        self._started = self._changed = False
        self.summary = RunSummary(run_id=context.run_id, status="failed", reason="", folder=context.folder)

    async def run(self) -> RunSummary:
        """Runs every stage; however the run ends, its folder then holds a summary with the reason."""
        try:
            await self._run_stages()
            self.summary.status = "completed"
        except BudgetReached as reached:
            self.summary.status, self.summary.reason = "stopped", str(reached)
            reached.add_note(describe_kept_work(self.context.folder))
            raise
        except asyncio.CancelledError:
            self.summary.status, self.summary.reason = "stopped", f"interrupted in stage {self.context.stage_name}"
            raise
        except Exception as error:
            if not self._started:  # refused before it started: the folder stays unchanged
                raise
            self.summary.reason = f"{self.context.stage_name}: {error}"
            logging.getLogger("reinforge").exception("the run failed in stage %s", self.context.stage_name)
            error.add_note(describe_kept_work(self.context.folder))
            raise
        finally:
            try:
                if self._started:
                    await self._commit_pending()
                    self._write_files()
            finally:  # on a full disk too, free the model, the journal and the folder's lock
                await self._clean_up()
                self.context.progress.close()
                self.context.journal.close()
        return self.summary

    async def _run_stages(self) -> None:
        config, context, trainer = self.config, self.context, self.trainer
        self._record_settings()
        context.journal.start_session()
        context.progress.start(context.run_id, context.folder, config.num_epochs, effective_settings(self.parts))
        runner = await self._bind_parts()
        context.begin_stage("LOAD")
        await trainer.initialize(config)
        context.policy = self.parts.adapter.policy()
        self._require_policy()
        if self.options.resume is None or not await self._resume():
            await self._record_base()
        async with watch_progress(context, runner):
            with limit_garbage_collection(enabled=FastPaths.switch(config.policy.fast_paths).garbage_collection):
                known = context.validations[:1]
                baseline = known[0] if known else await stages.validate(trainer, context, stages.BASELINE)
                self.summary.baseline = self._get_gate_summary(baseline)
                self._require_scored_baseline(baseline)
                statuses = await trainer.run(config.num_epochs) or []
                stages.refuse_failed(statuses)
                await stages.adopt_unpublished(context, self.parts.adapter, statuses)
                final = await self._final_validation()
                self.summary.final = self._get_gate_summary(final)
                await self._verdict()

    def _record_settings(self) -> None:
        """Writes the resolved configuration; refuses to resume with a changed one."""
        context, text = self.context, dump_config(self.loaded)
        data = resume.hash_data(self.parts.splits)
        if self.options.resume is not None:
            allowed = self.options.allow_config_change
            changed = resume.refuse_changes(context.journal, text, data, allowed=allowed)
            if changed:
                self._changed = True
                context.journal.record_stage(stages.BASELINE, "CONFIG", {"changed": changed})
        replace_file(context.folder / "config.yml", text)
        self.summary.config_sha256 = hashlib.sha256(text.encode()).hexdigest()
        context.journal.set_facts(
            run_id=context.run_id,
            config_sha256=self.summary.config_sha256,
            data_sha256=data,
            project_root=str(self.loaded.project_root),
            version=__version__,
            status="running",
            reason="",
        )
        self._started = True

    async def _resume(self) -> bool:
        """Restores the last durable state; False: there is none, so the run starts from the beginning."""
        context = self.context
        snapshot, notes = resume.choose_snapshot(context.journal, context.checkpoints)
        if snapshot is not None and not resume.can_reuse_episodes(self.trainer, self.parts.trajectory_builder):
            bases = [each for each in context.journal.snapshots() if each.epoch == stages.BASELINE]
            whole = [
                each for each in bases if not each.checkpoint or not context.checkpoints.find_damage(each.checkpoint)
            ]
            snapshot = next(iter(whole), None)
        context.recalls = {"validate", "confirm_base", "confirm_tuned"}
        if resume.can_reuse_episodes(self.trainer, self.parts.trajectory_builder):
            context.recalls.add("collect")
        if snapshot is None:
            notes.append("no usable checkpoint is left; restarting from the beginning")
            context.journal.rewind(stages.BASELINE - 1, forget_jobs=True, forget_episodes=self._changed)
        else:
            await resume.restore_snapshot(context, self.parts.adapter, snapshot, forget_episodes=self._changed)
            context.journal.record_resume(snapshot.epoch)
            notes.append(f"resuming {ResumePoint(snapshot.epoch, snapshot.checkpoint)}")
        for text in notes:
            logging.getLogger("reinforge").warning(text)
            context.progress.note(text)
        return snapshot is not None

    async def _commit_pending(self) -> None:
        """Makes the last adopted weights durable when the run stops between two checkpoints."""
        if self.context.pending is not None and self.summary.status == "stopped":
            write, self.context.pending = self.context.pending, None
            try:
                await write()
            except ReinforgeError as error:  # its jobs will run again: only time is lost
                logging.getLogger("reinforge").warning("cannot write the last checkpoint: %s", error)

    async def _bind_parts(self) -> EpisodeRunner:
        """Gives the builder its evaluation, and the trainer its builder and adapter."""
        parts, config = self.parts, self.config
        runner = EpisodeRunner.from_config(self.loaded.config, parts.workflow, parts.llms)
        parts.trajectory_builder.evaluation = DatasetEvaluation(
            runner,
            parts.splits,
            parts.evaluators,
            reward_metric=parts.reward_metric,
            outcomes=config.outcomes,
            compute_reward=self._compute_reward if parts.trajectory_builder.is_resumable else None,
            listener=self.context.record_episode,
            num_samples={"confirm": config.gate.num_samples},
            held_out_evaluators=parts.held_out_evaluators,
            recall=self.context.recall,
            load_episodes=self.context.load_episodes,
        )
        self.trainer.context = self.context  # type: ignore[attr-defined]  # a user's trainer may ignore it
        await self.trainer.bind_components(parts.trajectory_builder, parts.adapter)
        return runner

    async def _compute_reward(self, score: EvalOutputItem, meta: dict[str, Any]) -> float | None:
        """Returns the builder's reward of a score; a builder that drives its own collection calls it itself."""
        meta = {**meta, "trainer_run_id": self.context.run_id}
        return await self.parts.trajectory_builder.compute_reward(score, meta)

    async def _record_base(self) -> None:
        """Saves the weights before any training."""
        policy, state = self.context.policy, {"adopt": False, "trainer": None}
        version = policy.version if policy is not None else None
        checkpoint = await stages.commit(self.context, self.parts.adapter, stages.BASELINE, state, version=version)
        if policy is not None:
            self.context.record_version(policy.version, await policy.fingerprint(), 0, checkpoint)

    def _require_policy(self) -> None:
        """Raises a `ConfigError` if an entry of `llms` is the policy and the adapter serves none."""
        for llm in self.parts.llms.values():
            if llm.is_policy:
                _ = llm.model_name

    async def _clean_up(self) -> None:
        """Frees the trainer's resources; an error here never hides how the run ended."""
        try:
            async with asyncio.timeout(CLEANUP_S):
                await self.trainer.cleanup()
        except Exception:  # a user's cleanup may raise anything
            logging.getLogger("reinforge").exception("cleanup failed")

    def _get_gate_summary(self, row: ValidationRow | None) -> MetricSummary | None:
        """Returns a validation's summary of the gate metric."""
        return row.summaries.get(self.parts.gate_metric) if row is not None else None

    def _require_scored_baseline(self, baseline: ValidationRow) -> None:
        """Stops before training if too much of the baseline could not be scored."""
        if baseline.avg_reward is None:
            raise choose_error_type(baseline.outcomes)(f"the baseline could not be scored: {baseline.error}")
        num_unscored = baseline.num_unscored or 0
        total = (baseline.num_examples or 0) + num_unscored
        if num_unscored > self.config.outcomes.max_missing * total:
            outcomes = ", ".join(f"{count} {name}" for name, count in sorted(baseline.outcomes.items()))
            raise choose_error_type(baseline.outcomes)(
                f"{num_unscored} of {total} baseline examples have no score, more than outcomes.max_missing "
                f"({self.config.outcomes.max_missing:.0%}) allows; episodes by outcome: {outcomes}"
            )

    async def _final_validation(self) -> ValidationRow:
        context, policy = self.context, self.parts.adapter.policy()
        if policy is not None and not context.checkpoints.has(policy.version):
            await context.checkpoints.write(self.parts.adapter, policy.version)
        return await stages.validate(self.trainer, context, self.config.num_epochs - 1)

    async def _verdict(self) -> None:
        """Compares the base with the best checkpoint on `confirm`, once."""
        context, summary, config = self.context, self.summary, self.config
        best = choose_best_validation(context.validations, config.gate.metric)
        summary.best = self._get_gate_summary(best)
        if best is None or best.epoch == stages.BASELINE:
            summary.promoted = False
            summary.reason = "no checkpoint beat the base model on the select examples, so the base model stays"
            return
        base = context.validations[0]
        if not base.checkpoint or not best.checkpoint:
            summary.reason = (
                "the backend does not save its weights, so base and best cannot be compared on the confirm examples"
            )
            return
        arms = [
            await self._evaluate_arm(row, phase) for row, phase in ((base, "confirm_base"), (best, "confirm_tuned"))
        ]
        verdict = decide(config.gate, self.parts.reward_metric, *arms)
        summary.confirm_base, summary.confirm_tuned = verdict.confirm_base, verdict.confirm_tuned
        summary.improvement, summary.promoted, summary.reason = verdict.improvement, verdict.promoted, verdict.reason
        summary.checkpoint = best.checkpoint
        context.end_stage({"promoted": verdict.promoted, "reason": verdict.reason})
        if verdict.promoted:
            copy_model(context.checkpoints.verify(best.checkpoint), context.folder / "model")

    async def _evaluate_arm(self, row: ValidationRow, phase: str) -> EvaluationReport:
        """Evaluates one arm on `confirm` with fresh episodes; both arms run with the same environment seeds."""
        evaluation = self.parts.trajectory_builder.evaluation
        assert evaluation is not None
        total = len(evaluation.example_ids("confirm")) * self.config.gate.num_samples
        self.context.begin_stage(phase.upper(), None, total)
        assert row.checkpoint is not None
        assert row.version is not None
        await self.parts.adapter.restore(self.context.checkpoints.verify(row.checkpoint), row.version)
        report = await evaluation.validate("confirm", row.epoch, phase)
        self.context.end_stage({"outcomes": report.outcomes})
        return report

    def _write_files(self) -> None:
        """Writes summary, report and plot from the results so far."""
        context, summary = self.context, self.summary
        context.begin_stage(END)
        context.wall_time_s.pop("START", None)
        summary.episodes, summary.tokens = dict(context.episodes), dict(context.tokens)
        summary.wall_time_s = {name: round(seconds, 3) for name, seconds in context.wall_time_s.items()}
        summary.policy_versions = context.policy_versions
        history: list[EpochMetrics] = getattr(self.trainer, "_reward_history", [])
        write_summary(context.folder / "summary.json", summary)
        write_report(context.folder / "report.md", summary, history, context.validations)
        arms = {"base": summary.confirm_base, "tuned": summary.confirm_tuned}
        if can_draw_plots():
            draw_reward_plot(
                context.folder / "reward_plot.png", history, context.validations, title=context.run_id, confirm=arms
            )
        else:
            context.progress.note(f"no reward plot: {NEEDS_MATPLOTLIB}")
        context.journal.set_facts(status=summary.status, reason=summary.reason)
        context.journal.end_session(summary.status if not summary.reason else f"{summary.status}: {summary.reason}")
