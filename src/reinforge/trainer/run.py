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
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.garbage_collection import few_collections
from reinforge.errors import BudgetReached, ConfigError, Interrupted, JobFailed, Problem, ReinforgeError
from reinforge.evaluation.run import DatasetEvaluation, error_of
from reinforge.files import replace_file
from reinforge.interfaces import EvaluationReport
from reinforge.registry import REGISTRY, Registry
from reinforge.rollout.runner import EpisodeRunner
from reinforge.runs.checkpoints import copy_model
from reinforge.runs.journal import RunStore, read_facts
from reinforge.runs.plot import draw_reward_plot
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.runs.report import write_report
from reinforge.runs.summary import RunSummary, load_summary, write_summary
from reinforge.runs.validations import choose_best
from reinforge.trainer import resume, stages
from reinforge.trainer.context import END, RunContext
from reinforge.trainer.gate import decide
from reinforge.trainer.setup.components import Builder
from reinforge.trainer.setup.prepare import Parts, effective_settings, make_parts, refuse_disabled
from reinforge.trainer.setup.run_settings import cut_splits, make_small
from reinforge.types.evaluation import MetricSummary
from reinforge.version import __version__

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
        resume: Folder of the run to go on with; None: a new one.
        allow_config_change: Go on although the configuration is another one than before.
        folder: The run folder, set once it exists: where to look after a failure.
    """

    run_name: str | None = None
    progress: RunProgress | None = None
    smoke: bool = False
    resume: Path | None = None
    allow_config_change: bool = False
    folder: Path | None = None

    def folder_for(self, config: FinetuneConfig, suffix: str = "") -> Path:
        """Returns the folder of a run."""
        if self.run_name is not None and (Path(self.run_name).name != self.run_name or self.run_name == ".."):
            message = f'"{self.run_name}" is no name of a folder below {config.output_dir}'
            raise ConfigError(Problem("--run_name", message, "use letters, digits, - and _"))
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

    def stop(number: int, frame: object) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        loop.call_soon_threadsafe(task.cancel)

    before = {}
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs there handles signals
        for number in (signal.SIGINT, signal.SIGTERM):
            # not the loop's own handlers: those wait for an agent that blocks the loop, and so would the second signal
            before[number] = signal.signal(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if not seen:
            raise
        interrupted = Interrupted(signal.Signals(seen[0]).name, 128 + seen[0])
        if options.folder is not None:
            interrupted.add_note(kept_in(options.folder))
        raise interrupted from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kept_in(folder: Path) -> str:
    """Returns the sentences that say where the work of a run that did not finish lies, and how it goes on."""
    kept = f"kept: episodes, metrics and checkpoints up to then, and report.md, in {folder}; its log is run.log"
    return f"{kept}\ngo on with: reinforge finetune --resume {folder}"


async def run_async(loaded: LoadedConfig, options: RunOptions, registry: Registry = REGISTRY) -> RunSummary:
    """Runs a configuration to its end inside a running event loop; see `run_config`."""
    config: FinetuneConfig = loaded.config.finetuning
    refuse_disabled(loaded)
    if options.smoke:
        make_small(loaded.config)
    folder = options.resume or options.folder_for(config, "-smoke" if options.smoke else "")
    if options.resume is not None and (finished := read_summary(folder)) is not None:
        return finished
    async with Builder(loaded, registry) as builder:
        parts = await make_parts(builder, None if options.resume else folder)
        if options.smoke:
            cut_splits(parts.splits, loaded.config.trajectory_builders[str(config.trajectory_builder)])
        store = RunStore.open(folder) if options.resume else RunStore(folder)
        options.folder = folder
        context = RunContext(folder.name, store, options.progress or SilentProgress(), config.limits)
        context.transcripts = config.transcripts
        run = _Run(loaded, parts, context, options)
        with _run_log(folder):
            try:
                return await run.to_the_end()
            except JobFailed as error:
                if options.smoke:
                    error.add_note(
                        "--smoke collects a handful of episodes: a whole run may find signal where it did not"
                    )
                raise


def read_summary(folder: Path) -> RunSummary | None:
    """Returns the summary of a run that is done; None: it is not."""
    return load_summary(folder) if read_facts(folder).get("status") == "completed" else None


class _Run:
    """One run: its parts, its record, and the summary that fills as it goes."""

    def __init__(self, loaded: LoadedConfig, parts: Parts, context: RunContext, options: RunOptions):
        self.loaded, self.parts, self.context, self.options = loaded, parts, context, options
        self.config, self.trainer = parts.config, parts.trainer
        self._begun = self._changed = False
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
            if not self._begun:  # refused: what it was before stays as it is
                raise
            self.summary.reason = f"{self.context.stage_name}: {error}"
            logging.getLogger("reinforge").exception("the run failed in stage %s", self.context.stage_name)
            error.add_note(kept_in(self.context.folder))
            raise
        finally:
            try:
                if self._begun:
                    await self._commit_pending()
                    self._write_files()
            finally:  # a full disk must not keep the model, the journal or the folder's lock
                await self._clean_up()
                self.context.progress.close()
                self.context.store.close()
        return self.summary

    async def _all_stages(self) -> None:
        config, context, trainer = self.config, self.context, self.trainer
        self._record_settings()
        context.store.begin_session()
        context.progress.start(context.run_id, context.folder, config.num_epochs, effective_settings(self.parts))
        runner = await self._bind()
        context.begin_stage("LOAD")
        await trainer.initialize(config)
        context.policy = self.parts.adapter.policy()
        self._refuse_no_policy()
        if self.options.resume is None or not await self._go_on():
            await self._record_base()
        async with _watchdog(context, runner):
            with few_collections():
                known = context.validations[:1]
                baseline = known[0] if known else await stages.validate(trainer, context, stages.BASELINE)
                self.summary.baseline = self._figure(baseline)
                self._refuse_blind(baseline)
                statuses = await trainer.run(config.num_epochs) or []
                stages.refuse_failed(statuses)
                await stages.adopt_what_is_left(context, self.parts.adapter, statuses)
                final = await self._final_validation()
                self.summary.final = self._figure(final)
                await self._verdict()

    def _record_settings(self) -> None:
        """Writes the resolved configuration; a run that goes on must still be the same one."""
        context, text = self.context, dump_config(self.loaded)
        data = resume.data_sha256(self.parts.splits)
        if self.options.resume is not None:
            allowed = self.options.allow_config_change
            changed = resume.refuse_changes(context.store, text, data, allowed=allowed)
            if changed:
                self._changed = True
                context.store.stage(stages.BASELINE, "CONFIG", {"changed": changed})
        replace_file(context.folder / "config.yml", text)
        self.summary.config_sha256 = hashlib.sha256(text.encode()).hexdigest()
        context.store.set_run(
            run_id=context.run_id,
            config_sha256=self.summary.config_sha256,
            data_sha256=data,
            project_root=str(self.loaded.project_root),
            version=__version__,
            status="running",
            reason="",
        )
        self._begun = True

    async def _go_on(self) -> bool:
        """Puts everything back to where the run can go on; False: nothing durable is left, so it begins again."""
        context = self.context
        snapshot, said = resume.choose_snapshot(context.store, context.checkpoints)
        if snapshot is not None and not resume.is_ours(self.trainer, self.parts.trajectory_builder):
            bases = [each for each in context.store.snapshots() if each.epoch == stages.BASELINE]
            whole = [each for each in bases if not each.checkpoint or not context.checkpoints.damage(each.checkpoint)]
            snapshot = next(iter(whole), None)
        context.recalls = {"validate", "confirm_base", "confirm_tuned"}
        if resume.is_ours(self.trainer, self.parts.trajectory_builder):
            context.recalls.add("collect")
        if snapshot is None:
            said.append("nothing durable is left of it, so it begins again")
            context.store.go_back_to(stages.BASELINE - 1, forget_jobs=True, forget_episodes=self._changed)
        else:
            await resume.go_on_from(context, self.parts.adapter, snapshot, forget_episodes=self._changed)
            context.store.session_resumed(snapshot.epoch)
            done = "before the first epoch" if snapshot.epoch < 0 else f"after epoch {snapshot.epoch}"
            said.append(f"goes on {done}, with {snapshot.checkpoint or 'the weights that its backend holds'}")
        for text in said:
            logging.getLogger("reinforge").warning(text)
            context.progress.note(text)
        return snapshot is not None

    async def _commit_pending(self) -> None:
        """Makes the last adopted weights durable where the run stops between two checkpoints."""
        if self.context.pending is not None and self.summary.status == "stopped":
            write, self.context.pending = self.context.pending, None
            try:
                await write()
            except ReinforgeError as error:  # its jobs will be trained again: nothing is lost but time
                logging.getLogger("reinforge").warning("the last checkpoint could not be written: %s", error)

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
            recall=self.context.recall,
            journalled=self.context.recorded,
        )
        self.trainer.context = self.context  # type: ignore[attr-defined]  # a user's trainer need not look at it
        await self.trainer.bind_components(parts.trajectory_builder, parts.adapter)
        return runner

    async def _record_base(self) -> None:
        """Keeps the weights as they were before anything was trained."""
        policy, state = self.context.policy, {"adopt": False, "trainer": None}
        version = policy.version if policy is not None else None
        checkpoint = await stages.commit(self.context, self.parts.adapter, stages.BASELINE, state, version=version)
        if policy is not None:
            self.context.version_published(policy.version, await policy.fingerprint(), 0, checkpoint)

    def _refuse_no_policy(self) -> None:
        """Raises a configuration error where an llm is the policy and the adapter serves none."""
        for llm in self.parts.llms.values():
            if llm.is_policy:
                _ = llm.model_name

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
            raise error_of(baseline["outcomes"])(f"the baseline cannot be scored: {baseline['error']}")
        asked = baseline["num_examples"] + baseline["num_unscored"]
        if baseline["num_unscored"] > self.config.outcomes.max_missing * asked:
            raise error_of(baseline["outcomes"])(
                f"the baseline: {baseline['num_unscored']} of {asked} examples are missing, more than "
                f"outcomes.max_missing ({self.config.outcomes.max_missing:.0%}) allows: {baseline['outcomes']}"
            )

    async def _final_validation(self) -> dict[str, Any]:
        context, policy = self.context, self.parts.adapter.policy()
        if policy is not None and not context.checkpoints.has(policy.version):
            await context.checkpoints.keep(self.parts.adapter, policy.version)
        return await stages.validate(self.trainer, context, self.config.num_epochs - 1)

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
        summary.checkpoint = best["checkpoint"]
        context.end_stage({"promoted": verdict.promoted, "reason": verdict.reason})
        if verdict.promoted:
            copy_model(context.checkpoints.checked(best["checkpoint"]), context.folder / "model")

    async def _arm(self, row: dict[str, Any], phase: str) -> EvaluationReport:
        """Evaluates one arm on `confirm` with fresh episodes; both arms meet the same worlds."""
        evaluation = self.parts.trajectory_builder.evaluation
        assert evaluation is not None
        total = len(evaluation.example_ids("confirm")) * self.config.gate.draws
        self.context.begin_stage(phase.upper(), None, total)
        await self.parts.adapter.restore(self.context.checkpoints.checked(row["checkpoint"]), row["version"])
        report = await evaluation.validate("confirm", row["epoch"], phase)
        self.context.end_stage({"outcomes": report.outcomes})
        return report

    def _write_files(self) -> None:
        """Writes summary, report and plot from what is known by now."""
        context, summary = self.context, self.summary
        context.begin_stage(END)
        context.wall_time_s.pop("START", None)
        summary.episodes, summary.tokens = dict(context.episodes), dict(context.tokens)
        summary.wall_time_s = {name: round(seconds, 3) for name, seconds in context.wall_time_s.items()}
        summary.policy_versions = context.policy_versions
        history = getattr(self.trainer, "_reward_history", [])
        write_summary(context.folder / "summary.json", summary)
        write_report(context.folder / "report.md", summary, history, context.validations)
        arms = {"base": summary.confirm_base, "tuned": summary.confirm_tuned}
        confirm = {name: figure.as_dict() for name, figure in arms.items() if figure is not None} or None
        draw_reward_plot(
            context.folder / "reward_plot.png", history, context.validations, title=context.run_id, confirm=confirm
        )
        context.store.set_run(status=summary.status, reason=summary.reason)
        context.store.end_session(summary.status if not summary.reason else f"{summary.status}: {summary.reason}")


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
