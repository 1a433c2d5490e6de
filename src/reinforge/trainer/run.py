"""One run around any trainer: folder, journal, baseline, training, final validation, the verdict, the files."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.config.dump import dump_config
from reinforge.config.loader import LoadedConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BudgetReached, EvaluationError, Interrupted
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.interfaces import EvaluationReport
from reinforge.registry import REGISTRY, Registry
from reinforge.rollout.runner import EpisodeRunner
from reinforge.trainer import stages
from reinforge.trainer.components import Builder
from reinforge.trainer.context import RunContext
from reinforge.trainer.gate import choose_best, decide
from reinforge.trainer.plot import draw_reward_plot
from reinforge.trainer.prepare import Parts, effective_settings, make_parts, refuse_disabled
from reinforge.trainer.progress import RunProgress, SilentProgress
from reinforge.trainer.report import RunSummary, write_report, write_summary
from reinforge.trainer.run_settings import cut_splits, make_small
from reinforge.trainer.store import RunStore
from reinforge.types.evaluation import MetricSummary

WATCHDOG_S = 5.0
"""Seconds between two looks of the watchdog."""

CLEANUP_S = 5.0
"""Seconds that tearing down may take after a run was stopped."""


@dataclass
class RunOptions:
    """What one call adds to the configuration.

    Attributes:
        run_name: Name of the run folder; None: made from the date and a random word.
        progress: What a person sees.
        smoke: Run everything once, as small as it can be, under a name that says so.
        folder: The run folder, set once it exists: where to look after a failure.
    """

    run_name: str | None = None
    progress: RunProgress | None = None
    smoke: bool = False
    folder: Path | None = None

    def folder_for(self, config: FinetuneConfig, suffix: str = "") -> Path:
        """Returns the folder of a run."""
        name = self.run_name or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        return Path(config.output_dir).expanduser() / f"{name}{suffix}"


def run_config(loaded: LoadedConfig, options: RunOptions | None = None, registry: Registry = REGISTRY) -> RunSummary:
    """Runs a configuration to its end and returns the summary; the blocking form of `run_async`.

    Ctrl-C and SIGTERM stop the run: what is finished is in the run folder. A second one ends the process.

    Raises:
        ConfigError: Something was wrong that could be seen before any work started.
        Interrupted: A signal stopped the run.
        ReinforgeError: The run failed; its folder holds a summary with the reason.
    """
    options = options or RunOptions()
    with asyncio.Runner() as runner:
        return runner.run(_with_signals(run_async(loaded, options, registry), options))


async def _with_signals(work: Coroutine[Any, Any, RunSummary], options: RunOptions) -> RunSummary:
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def stop(number: int) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        task.cancel()

    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread, or not Unix
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not seen:
            raise
        interrupted = Interrupted(signal.Signals(seen[0]).name, 128 + seen[0])
        if options.folder is not None:
            interrupted.add_note(kept_in(options.folder))
        raise interrupted from None


def kept_in(folder: Path) -> str:
    """Returns the sentence that says where the work of a run that did not finish lies."""
    return f"kept: episodes, metrics and checkpoints up to then, and report.md, in {folder}; its log is run.log"


async def run_async(loaded: LoadedConfig, options: RunOptions, registry: Registry = REGISTRY) -> RunSummary:
    """Runs a configuration to its end inside a running event loop; see `run_config`."""
    config: FinetuneConfig = loaded.config.finetuning
    refuse_disabled(loaded)
    if options.smoke:
        make_small(loaded.config)
    folder = options.folder_for(config, "-smoke" if options.smoke else "")
    async with Builder(loaded, registry) as builder:
        parts = await make_parts(builder, folder)
        if options.smoke:
            cut_splits(parts.splits, loaded.config.trajectory_builders[str(config.trajectory_builder)])
        options.folder = folder
        context = RunContext(folder.name, RunStore(folder), options.progress or SilentProgress(), config.limits)
        run = _Run(loaded, parts, context)
        with _run_log(folder):
            return await run.to_the_end()


class _Run:
    """One run: its parts, its record, and the summary that fills as it goes."""

    def __init__(self, loaded: LoadedConfig, parts: Parts, context: RunContext):
        self.loaded, self.parts, self.context = loaded, parts, context
        self.config, self.trainer = parts.config, parts.trainer
        self.summary = RunSummary(run_id=context.run_id, status="failed", reason="", folder=context.folder)

    async def to_the_end(self) -> RunSummary:
        """Runs everything; whatever happens, the folder holds a summary with the reason afterwards."""
        try:
            await self._all_stages()
            self.summary.status = "completed"
        except BudgetReached as reached:
            self.summary.status, self.summary.reason = "stopped", str(reached)
            reached.add_note(kept_in(self.context.folder))
            raise
        except asyncio.CancelledError:
            self.summary.status, self.summary.reason = "stopped", f"interrupted in stage {self.context.stage_name}"
            raise
        except Exception as error:
            self.summary.reason = f"{self.context.stage_name}: {error}"
            logging.getLogger("reinforge").exception("the run failed in stage %s", self.context.stage_name)
            error.add_note(kept_in(self.context.folder))
            raise
        finally:
            try:
                self._write_files()
            finally:  # a full disk must not keep the model, the journal or the folder's lock
                await self._clean_up()
                self.context.progress.close()
                self.context.store.close()
        return self.summary

    async def _all_stages(self) -> None:
        config, context, trainer = self.config, self.context, self.trainer
        text = dump_config(self.loaded)
        (context.folder / "config.yml").write_text(text, encoding="utf-8")
        self.summary.config_sha256 = hashlib.sha256(text.encode()).hexdigest()
        context.store.set_run(run_id=context.run_id, config_sha256=self.summary.config_sha256, status="running")
        context.progress.start(context.run_id, context.folder, config.num_epochs, effective_settings(self.parts))
        runner = await self._bind()
        context.begin_stage("LOAD")
        await trainer.initialize(config)
        await self._record_base()
        async with _watchdog(context, runner):
            baseline = await stages.validate(trainer, context, stages.BASELINE, config.gate.metric)
            self.summary.baseline = self._figure(baseline)
            self._refuse_blind(baseline)
            statuses = await trainer.run(config.num_epochs) or []
            stages.refuse_failed(statuses)
            await stages.adopt_what_is_left(context, self.parts.adapter, statuses)
            final = await self._final_validation()
            self.summary.final = self._figure(final)
            await self._verdict()

    async def _bind(self) -> EpisodeRunner:
        """Binds the trainer to its parts and gives the builder something to evaluate with."""
        parts, config = self.parts, self.config
        runner = EpisodeRunner.configured(self.loaded.config, parts.workflow, parts.llms)
        parts.trajectory_builder.evaluation = DatasetEvaluation(
            runner,
            parts.splits,
            parts.evaluators,
            reward_metric=parts.reward_metric,
            outcomes=config.outcomes,
            listener=self.context.episode_done,
            draws={"confirm": config.gate.draws},
            held_out_evaluators=parts.held_out_evaluators,
        )
        self.trainer.context = self.context  # type: ignore[attr-defined]  # a user's trainer need not look at it
        await self.trainer.bind_components(parts.trajectory_builder, parts.adapter)
        return runner

    async def _record_base(self) -> None:
        """Keeps the weights as they were before anything was trained."""
        policy = self.parts.adapter.policy()
        for llm in self.parts.llms.values():
            if llm.is_policy:
                _ = llm.model_name  # a configuration error where the adapter serves no policy
        if policy is not None:
            checkpoint = await stages.keep_checkpoint(self.context, self.parts.adapter, policy.version)
            self.context.version_published(policy.version, await policy.fingerprint(), 0, checkpoint)

    async def _clean_up(self) -> None:
        """Frees what the trainer holds; what goes wrong here never hides how the run ended."""
        try:
            async with asyncio.timeout(CLEANUP_S):
                await self.trainer.cleanup()
        except Exception:  # a user's cleanup may raise anything
            logging.getLogger("reinforge").exception("cleaning up after the run failed")

    def _figure(self, row: dict[str, Any] | None) -> MetricSummary | None:
        """Returns a validation's figure on the metric that decides."""
        found = (row or {}).get("summaries", {}).get(self.parts.gate_metric)
        return MetricSummary(**found) if found else None

    def _refuse_blind(self, baseline: dict[str, Any]) -> None:
        """Stops before training where the baseline shows that nothing can be measured."""
        if baseline["avg_reward"] is None:
            raise EvaluationError(f"the baseline cannot be scored: {baseline['error']}")
        asked = baseline["num_examples"] + baseline["num_unscored"]
        if baseline["num_unscored"] > self.config.outcomes.max_missing * asked:
            raise EvaluationError(
                f"the baseline: {baseline['num_unscored']} of {asked} examples are missing, more than "
                f"outcomes.max_missing ({self.config.outcomes.max_missing:.0%}) allows: {baseline['outcomes']}"
            )

    async def _final_validation(self) -> dict[str, Any]:
        policy = self.parts.adapter.policy()
        if policy is not None:
            await stages.keep_checkpoint(self.context, self.parts.adapter, policy.version)
        return await stages.validate(self.trainer, self.context, self.config.num_epochs - 1, self.config.gate.metric)

    async def _verdict(self) -> None:
        """Looks at `confirm` once, with the base and with the best checkpoint of `select`."""
        context, summary, config = self.context, self.summary, self.config
        best = choose_best(context.validations, config.gate.metric)
        summary.best = self._figure(best)
        if best is None or best["epoch"] == stages.BASELINE:
            summary.promoted = False
            summary.reason = "no checkpoint was better than the base on the select examples, so the base is kept"
            return
        base = context.validations[0]
        if not base["checkpoint"] or not best["checkpoint"]:
            summary.reason = "this backend keeps its weights to itself: base and best cannot be compared on confirm"
            return
        arms = [await self._arm(row, phase) for row, phase in ((base, "confirm_base"), (best, "confirm_tuned"))]
        verdict = decide(config.gate, self.parts.reward_metric, *arms)
        summary.confirm_base, summary.confirm_tuned = verdict.confirm_base, verdict.confirm_tuned
        summary.improvement, summary.promoted, summary.reason = verdict.improvement, verdict.promoted, verdict.reason
        summary.checkpoint = str(Path(best["checkpoint"]).relative_to(context.folder))
        context.end_stage({"promoted": verdict.promoted, "reason": verdict.reason})
        if verdict.promoted:
            from reinforge.engine.checkpoint import copy_model

            copy_model(Path(best["checkpoint"]), context.folder / "model")

    async def _arm(self, row: dict[str, Any], phase: str) -> EvaluationReport:
        """Evaluates one arm on `confirm` with fresh episodes; both arms meet the same worlds."""
        evaluation = self.parts.trajectory_builder.evaluation
        assert evaluation is not None
        total = len(evaluation.example_ids("confirm")) * self.config.gate.draws
        self.context.begin_stage(phase.upper(), None, total)
        await self.parts.adapter.restore(Path(row["checkpoint"]), row["version"])
        report = await evaluation.validate("confirm", row["epoch"], phase)
        self.context.end_stage({"outcomes": report.outcomes})
        return report

    def _write_files(self) -> None:
        """Writes summary, report and plot from what is known by now."""
        context, summary = self.context, self.summary
        context.begin_stage("END")
        context.wall_time_s.pop("START", None)
        summary.episodes, summary.tokens = dict(context.episodes), dict(context.tokens)
        summary.wall_time_s = {name: round(seconds, 3) for name, seconds in context.wall_time_s.items()}
        summary.policy_versions = context.policy_versions
        history = getattr(self.trainer, "_reward_history", [])
        context.store.set_run(status=summary.status, reason=summary.reason)
        write_summary(context.folder / "summary.json", summary)
        write_report(context.folder / "report.md", summary, history, context.validations)
        arms = {"base": summary.confirm_base, "tuned": summary.confirm_tuned}
        confirm = {name: figure.as_dict() for name, figure in arms.items() if figure is not None} or None
        draw_reward_plot(
            context.folder / "reward_plot.png", history, context.validations, title=context.run_id, confirm=confirm
        )


@contextlib.contextmanager
def _run_log(folder: Path) -> Iterator[None]:
    """Sends the package's log to `run.log` for the length of the run."""
    handler = logging.FileHandler(folder / "run.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("reinforge")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


@contextlib.asynccontextmanager
async def _watchdog(context: RunContext, runner: EpisodeRunner) -> AsyncIterator[None]:
    """Names the stage in which a run hangs, once per silence."""

    async def watch() -> None:
        told = 0.0
        while True:
            await asyncio.sleep(min(WATCHDOG_S, context.limits.stage_timeout_s / 2))
            silent = time.monotonic() - context.last_progress_s
            if silent >= context.limits.stage_timeout_s and told != context.last_progress_s:
                told = context.last_progress_s
                epoch = "" if context.stage_epoch is None else f" of epoch {context.stage_epoch}"
                text = (
                    f"no progress for {silent:.0f} s in stage {context.stage_name}{epoch}: "
                    f"{runner.status.num_running} episodes are running, {runner.status.num_abandoned} were abandoned"
                )
                logging.getLogger("reinforge").warning(text)
                context.progress.note(text)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
