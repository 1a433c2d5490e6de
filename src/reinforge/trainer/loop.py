"""The training loop: each epoch collects, scores, selects, submits a job, awaits and adopts it, and validates.

`EpochTrainer` has the methods of NeMo Agent Toolkit's ARTTrainer and works with any builder and any adapter. Baseline,
final validation, gate and summary belong to `trainer/run.py`, which does them around every trainer.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from reinforge.algorithms.curriculum import (
    ExampleFilter,
    Selection,
    compute_included_share,
    split_by_share,
    split_by_signal,
    subsample,
)
from reinforge.algorithms.grpo import GRPO
from reinforge.config.pipeline import find_stage, list_stages
from reinforge.config.schema import FinetuneConfig, TrainerConfig
from reinforge.crash import crash_point
from reinforge.errors import JobFailed
from reinforge.evaluation.statistics import compute_mean_interval, list_names
from reinforge.files import append_line, replace_file, to_json, write_json
from reinforge.interfaces import Algorithm, Builder, Trainer
from reinforge.port_bases import RefillsEpochs, find_plan
from reinforge.registry import register_trainer
from reinforge.runs.rows import EpochMetrics, ValidationRow
from reinforge.runs.summary import can_draw_plots
from reinforge.trainer import versions
from reinforge.trainer.context import RunContext
from reinforge.trainer.epoch_collection import EpochCollector, ExampleChoice
from reinforge.trainer.refusals import (
    build_empty_epochs_error,
    explain_empty_selection,
    find_episode_command,
    refuse_identical,
    refuse_unhealthy,
    refuse_unscored,
    refuse_untrainable,
)
from reinforge.trainer.versions import Prompts, pick_prompts
from reinforge.types.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup

logger = logging.getLogger(__name__)

METRICS = "training_metrics.jsonl"
FOLLOW_S = 1.0  # seconds between two looks at a job in this process


class EpochTrainerConfig(TrainerConfig, name="epoch"):
    """The epoch loop; all of its other settings are in `finetuning`."""

    save_every: int = Field(default=1, ge=1, description="Jobs between checkpoints; a validated epoch always gets one.")
    keep_last: int = Field(
        default=2, ge=1, description="How many of the newest checkpoints to keep, besides base and best."
    )
    pin_every: int | None = Field(default=None, ge=1, description="Keep the checkpoint of every n-th version.")


class EpochTrainer(Trainer):
    """Runs the stages of each epoch over any builder and any adapter.

    Args:
        kwargs: `algorithm`, which is GRPO if it is left out; others are ignored.
    """

    is_resumable = True
    collects_ahead = True
    trainer_config: EpochTrainerConfig

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        super().__init__(trainer_config, **kwargs)
        self.context: RunContext = None  # type: ignore[assignment]  # a run sets it, or else `initialize`
        self.algorithm: Algorithm = kwargs.get("algorithm") or GRPO()
        self._job_refs: list[TrainingJobRef] = []
        self._statuses: list[TrainingJobStatus] = []
        self._prompts: Prompts = {}
        self._run_id: str | None = None
        self._reward_history: list[EpochMetrics] = []
        self._validation_history: list[ValidationRow] = []
        self._selection = Selection()
        self._example_filter = ExampleFilter()
        self._num_empty = 0
        self._num_identical_epochs = 0
        self._collector: EpochCollector = None  # type: ignore[assignment]

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        self.context = self.context or RunContext.stand_in(run_config.output_dir)
        self._example_filter = ExampleFilter(run_config.curriculum_learning)
        self._collector = EpochCollector(self, self._example_filter, self.context)
        if not self.context.is_run:  # a run asks around every trainer
            await refuse_unhealthy(self.trainer_adapter)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Runs all epochs; a failed job stops the run.

        Raises:
            JobFailed: A job failed or was cancelled, or too many epochs in a row had nothing to train on.
            BudgetReached: A limit of time or tokens was reached, or a guard stops the run.
        """
        if self.run_config is None:
            raise JobFailed(f"{type(self).__name__} is not initialized: call initialize(run_config) before run")
        if not self.context.is_run:
            self.context.run_id = f"run-{uuid.uuid4().hex[:8]}"
        self._run_id = self.context.run_id
        first = await self._resume(self.context, num_epochs) if self.context.is_run else 0
        self._collector.early.num_epochs = num_epochs
        try:
            for epoch in range(first, num_epochs):
                self.context.pause_if_due(epoch)
                await self._run_whole_epoch(epoch, num_epochs, self._run_id)
            self.context.pause_if_due(num_epochs)
        finally:
            await self._collector.discard_early(self._run_id)
        return self._statuses

    async def _run_whole_epoch(self, epoch: int, num_epochs: int, run_id: str) -> None:
        stage = find_stage(self.run_config, epoch)
        if stage is not None and stage.first == epoch:
            self.context.job_rows = 0  # its jobs are of another size than those before
        self.context.check_budget()
        if self.context.is_run and stage is not None and stage.first == epoch and stage.settings.start_from == "best":
            await versions.return_to_best(self.context, self.trainer_adapter, self.run_config.gate.metric)
        ref = await self.run_epoch(epoch, run_id)
        status = await self._await(epoch, ref) if ref is not None else None
        if status is not None:
            self._num_empty = 0
            self._statuses.append(status)
        elif not self.trajectory_builder.may_train_nothing:
            self._count_empty(epoch, is_last=epoch + 1 == num_epochs)
        await self._commit(epoch, num_epochs, status)
        await self._finish_epoch(epoch, num_epochs, status)

    async def _finish_epoch(self, epoch: int, num_epochs: int, status: TrainingJobStatus | None) -> None:
        """Adopts, logs and validates after an epoch's job; repeating it after a stop gives the same result."""
        if status is not None:
            await self._adopt(epoch, status)
        config = self.trainer_config
        if self.context.is_run:
            keep_last, pin_every = getattr(config, "keep_last", 2), getattr(config, "pin_every", None)
            metric = self.run_config.gate.metric
            ends = {stage.last for stage in list_stages(self.run_config)}
            versions.drop_checkpoints(self.context, metric, keep_last=keep_last, pin_every=pin_every, stage_ends=ends)
        self.log_progress(epoch, self._reward_history[-1].as_dict())
        await self._validate_if_due(epoch, num_epochs)
        if self.context.guards is not None:
            is_last = epoch + 1 >= num_epochs
            self.context.guards.check(self._reward_history, self.context.validations, is_last=is_last)

    async def _commit(self, epoch: int, num_epochs: int, status: TrainingJobStatus | None) -> None:
        """Makes the epoch durable: now, or between checkpoints only if the run stops before the next job."""
        context = self.context
        self._prompts = pick_prompts(self._selection.kept)
        if not context.is_run:
            return
        policy = self.trainer_adapter.policy()
        version = None if policy is None else policy.version + (status is not None)
        # counted now: what follows this point is counted again when the run resumes from it
        state = {"adopt": status is not None, "trainer": self._resume_state(), "counters": context.counters()}
        state["status"] = None if status is None else status.model_dump(mode="json")  # should its journal be damaged
        write = partial(versions.commit, context, self.trainer_adapter, epoch, state, version=version)
        if self._is_checkpoint_due(epoch, num_epochs) or status is None:
            await write()
        else:
            context.pending = write

    def _is_checkpoint_due(self, epoch: int, num_epochs: int) -> bool:
        due = (epoch + 1) % getattr(self.trainer_config, "save_every", 1) == 0
        return due or self._is_validation_due(epoch) or epoch + 1 == num_epochs

    def _resume_state(self) -> dict[str, Any]:
        return {
            "row": self._reward_history[-1].as_dict(),
            "prompts": self._prompts,
            "curriculum": self.get_curriculum_state(),
            "mean_rewards": dict(self._example_filter.mean_rewards),
            "num_empty": self._num_empty,
            "num_identical_epochs": self._num_identical_epochs,
            **({"early": early} if (early := self._collector.early.as_dict()) else {}),
        }

    async def _resume(self, context: RunContext, num_epochs: int) -> int:
        """Restores the state after the last finished epoch; returns the first epoch to collect."""
        if context.resumed is None or context.resumed.epoch < 0:
            (context.folder / METRICS).unlink(missing_ok=True)  # its epochs will run again
            return 0
        epoch, state = context.resumed.epoch, context.resumed.state["trainer"]
        self._reward_history = [*context.journal.metrics(before=epoch), EpochMetrics.from_dict(state["row"])]
        self._validation_history = list(context.validations[1:])
        included = set(state["curriculum"]["included_groups"])
        self._curriculum_state = {**state["curriculum"], "included_groups": included}
        if context.levels is not None:
            context.levels.restore(state["curriculum"])
        self._example_filter.mean_rewards = dict(state["mean_rewards"])
        self._prompts = state["prompts"]
        self._num_empty, self._num_identical_epochs = state["num_empty"], state["num_identical_epochs"]
        self._collector.early.restore(state.get("early", {}))
        jobs = [job for job in context.journal.jobs() if job.epoch <= epoch and job.ref and job.status]
        self._job_refs = [job.ref for job in jobs if job.ref]
        self._statuses = [job.status for job in jobs if job.status]
        if context.resumed.state["adopt"] and not any(job.epoch == epoch and job.status for job in jobs):
            self._statuses.append(TrainingJobStatus.model_validate(context.resumed.state["status"]))
        lines = "".join(to_json(row.as_dict()) + "\n" for row in self._reward_history[:-1])
        replace_file(context.folder / METRICS, lines)
        await self._finish_epoch(epoch, num_epochs, self._statuses[-1] if context.resumed.state["adopt"] else None)
        return epoch + 1

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collects, selects and submits once; None: no group has signal, so nothing was submitted."""
        self._collector.begin_epoch()
        algorithm = self.algorithm.for_epoch(epoch)
        groups = await self._collect(epoch, run_id, self._collector.plan_first(epoch, run_id))
        if epoch == 0 or not self._reward_history:
            trains_on = "messages" if self._is_remote() else self.trainer_adapter.trains_on
            refuse_untrainable(groups, self.trajectory_builder, self.run_config, trains_on=trains_on)
        if algorithm.needs_groups:
            self._num_identical_epochs = refuse_identical(
                groups,
                epoch=epoch,
                epochs_before=self._num_identical_epochs,
                temperature=None if self._is_remote() else self.run_config.sampling.temperature,
            )
        chosen = self._select(epoch, run_id, groups)
        groups, chosen = await self._refill(epoch, run_id, groups, chosen)
        kept = chosen.groups
        if kept and (reason := algorithm.skip_reason(kept)) is not None:
            self._selection = replace(self._selection, kept=[], skip_reason=reason)
            kept = []
        self._reward_history.append(self._epoch_metrics(epoch, groups, kept))
        self._record_level(groups)
        in_stage = {} if (name := self._name_stage(epoch)) is None else {"stage": name}
        self.context.end_stage({"kept": len(kept), "groups": len(groups), **in_stage})
        crash_point("batch.sealed")
        if not kept:
            return None
        self.context.check_job(chosen.num_trajectories)
        self.context.begin_stage("SUBMIT", epoch)
        chosen = chosen.model_copy(update={"epoch": epoch, "run_id": run_id, "job_key": f"{run_id}/{epoch}"})
        ref = await versions.submit(self.context, self.trainer_adapter, epoch, chosen)
        self._job_refs.append(ref)
        self.context.end_stage({"job": ref.model_dump(mode="json")})
        return ref

    def _record_level(self, groups: Sequence[TrajectoryGroup]) -> None:
        if (levels := self.context.levels) is None:
            return
        if levels.record_rewards(self.trajectory_builder.example_rewards(groups)):
            self.context.progress.note(f"examples of level {levels.highest} take part from the next epoch on")
        self._curriculum_state.update(levels.as_dict())

    def _is_remote(self) -> bool:
        """Returns True if the adapter trains a model that it does not serve itself, so it decides what it trains on."""
        return self.trainer_adapter is not None and self.trainer_adapter.policy() is None

    def _compares_siblings(self, epoch: int, groups: Sequence[TrajectoryGroup]) -> bool:
        is_single = self._is_remote() and all(len(each.trajectories) < 2 for each in groups)
        return self.algorithm.for_epoch(epoch).needs_groups and not is_single

    async def _collect(self, epoch: int, run_id: str, meta: dict[str, Any]) -> list[TrajectoryGroup]:
        """Collects once; a trainer of several collections an epoch overrides it."""
        return await self._collector.collect(epoch, run_id, meta)

    def _select(self, epoch: int, run_id: str, groups: Sequence[TrajectoryGroup]) -> TrajectoryCollection:
        self.context.begin_stage("SELECT", epoch)
        return self.apply_curriculum_learning(TrajectoryCollection.from_groups(groups, run_id, epoch), epoch)

    async def _refill(
        self, epoch: int, run_id: str, groups: list[TrajectoryGroup], chosen: TrajectoryCollection
    ) -> tuple[list[TrajectoryGroup], TrajectoryCollection]:
        """Collects further examples while too few groups have signal, up to `limits.max_refills` times."""
        limits, builder = self.run_config.limits, self.trajectory_builder
        plan = find_plan(builder, epoch)
        if plan is None or not isinstance(builder, RefillsEpochs) or not self._compares_siblings(epoch, groups):
            return groups, chosen
        used = list(plan.example_ids)
        num_planned = len(used) - len(self._example_filter.skipped)
        for round_ in range(1, limits.max_refills + 1):
            if len(chosen.groups) >= limits.min_groups * num_planned * plan.groups_per_example:
                break
            extra = builder.further_examples(epoch, set(used), num_planned)
            if not extra:
                break
            used = used + extra
            outside = self._example_filter.find_skipped(used, epoch)
            extra = [id_ for id_ in extra if id_ not in outside]
            if not extra:
                continue
            meta = {**self._collector.build_meta(epoch, run_id, ExampleChoice(extra)), "round": round_}
            groups = [*groups, *await self._collect(epoch, run_id, meta)]
            chosen = self._select(epoch, run_id, groups)
        return groups, chosen

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """Drops groups without signal, then takes the curriculum's share, then subsamples each group.

        Outside a run, groups of plain messages, which no run has recorded, are judged by their rewards alone.
        """
        config, groups = self.curriculum_config, trajectory_collection.groups
        compares, has_signal = self._compares_siblings(epoch, groups), self.algorithm.for_epoch(epoch).has_signal
        is_run = self.context is not None and self.context.is_run
        is_recorded = any(each.is_trainable for group in groups for each in group.trajectories)
        selection = split_by_signal(
            groups, config.min_reward_diff, compares, has_signal, needs_tokens=is_run or is_recorded
        )
        kept = selection.kept
        # the rewards of a stage on rows do not say how hard an example is to solve
        tells_difficulty = find_stage(self.run_config, epoch) is None or self.trajectory_builder.example_rewards(groups)
        if tells_difficulty:
            self._example_filter.record_rewards(groups, kept)
        outside: list[TrajectoryGroup] = []
        state = self._curriculum_state
        share = compute_included_share(config, epoch) if config.enabled else 1.0
        if config.enabled and tells_difficulty:
            num_skipped = len(self._example_filter.skipped)
            kept, outside = split_by_share(kept, share, hardest_first=config.sort_ascending, num_skipped=num_skipped)
            if share > state["current_percentile"]:
                state["last_expansion_epoch"] = epoch
            state["current_percentile"] = share
        if config.random_subsample is not None:
            rng = stable_random(self.run_config.seed, "subsample", epoch)
            kept = [subsample(group, config.random_subsample, rng) for group in kept]
        if config.max_variance_subsample is not None:
            kept = [subsample(group, config.max_variance_subsample) for group in kept]
        state["total_groups"] = len(groups)
        state["included_groups"] = {group.group_id for group in kept}
        if config.collect_only_included:
            state["mean_rewards"] = dict(self._example_filter.mean_rewards)
        self._selection = replace(selection, kept=kept, outside=outside)
        return TrajectoryCollection.from_groups(kept, trajectory_collection.run_id, epoch)

    async def _await(self, epoch: int, ref: TrainingJobRef) -> TrainingJobStatus:
        self.context.begin_stage("AWAIT", epoch)
        async with self._follow_job(ref):
            status = await self.trainer_adapter.wait_until_complete(ref)
        self.context.journal.record_job(ref, status, f"{self._run_id}/{epoch}")
        if status.status is not TrainingStatusEnum.COMPLETED or not status.produced_model:
            raise JobFailed(
                f"the job of epoch {epoch} ended with status {status.status}: {status.message or 'no reason given'}"
            )
        reported = status.metadata or {}
        metrics = {
            k: v for k, v in reported.items() if isinstance(v, int | float) or k in ("skipped_episodes", "groups")
        }
        self._reward_history[-1].job.update(metrics)
        self.context.end_stage(metrics)
        return status

    @asynccontextmanager
    async def _follow_job(self, ref: TrainingJobRef) -> AsyncIterator[None]:
        """Shows meanwhile how much of a job is done, if the backend knows at no cost."""

        async def follow() -> None:
            while self.trainer_adapter.reports_progress:
                await asyncio.sleep(FOLLOW_S)
                self.context.advance(((await self.trainer_adapter.status(ref)).progress or 0.0) / 100)

        task = asyncio.create_task(follow())
        try:
            yield
        finally:
            task.cancel()

    async def _adopt(self, epoch: int, status: TrainingJobStatus) -> None:
        """Publishes the new weights; without a policy server, version and canary stay unknown (None)."""
        policy = self.trainer_adapter.policy()
        if policy is None:
            self._reward_history[-1].job["policy_version"] = None
            return
        self.context.begin_stage("ADOPT", epoch)
        canary = await versions.adopt(self.context, policy, prompts=self._prompts, num_updates=status.num_updates)
        self._reward_history[-1].job.update(
            policy_version=canary.version,
            canary_difference=canary.max_difference,
            canary_mean_difference=canary.mean_difference,
            canary_k3=canary.k3,
        )
        self.context.tokens["trained"] += int((status.metadata or {}).get("num_tokens", 0))
        self.context.end_stage({"version": canary.version, "fingerprint": canary.fingerprint})

    def _is_validation_due(self, epoch: int) -> bool:
        run = self.run_config.run_configuration
        interval = run.validation_interval if run is not None else 5
        stage = find_stage(self.run_config, epoch)
        return (epoch + 1) % interval == 0 or (stage is not None and epoch == stage.last)

    async def _validate_if_due(self, epoch: int, num_epochs: int) -> None:
        run, is_last = self.run_config.run_configuration, epoch + 1 == num_epochs
        has_data = self.context.is_run or (
            run is not None and bool(run.validation_dataset or run.validation_config_file)
        )
        if has_data and self._is_validation_due(epoch) and not (is_last and self.context.is_run):
            self._validation_history.append(await versions.validate(self, self.context, epoch))
            refuse_unscored(self._validation_history[-1], self.run_config.outcomes.max_missing)

    def _count_empty(self, epoch: int, *, is_last: bool) -> None:
        self._num_empty += 1
        reasons = explain_empty_selection(self._selection)
        logger.warning("epoch %d trained nothing: %s", epoch, reasons)
        where = f"epoch {epoch} trains nothing"
        found = self.context.report_constant_reward(where)
        limits = self.run_config.limits
        setting = "max_empty_updates" if self._num_empty >= limits.max_empty_updates else ""
        if is_last and not self._statuses and not limits.allow_no_training:
            setting = setting or "allow_no_training"
        if setting:
            command = find_episode_command(self._selection, str(self.context.folder), epoch)
            raise build_empty_epochs_error(self._num_empty, setting, reasons, found, command)

    def _epoch_metrics(
        self, epoch: int, groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup]
    ) -> EpochMetrics:
        selection, builder = self._selection, self.trajectory_builder
        rewards = builder.example_rewards(groups)
        clusters = list_names((example for example, _ in rewards), getattr(builder.evaluation, "clusters", None))
        average = low = high = None
        if rewards:
            average, low, high = compute_mean_interval([reward for _, reward in rewards], names=clusters)
        filtered = [reward for _, reward in builder.example_rewards(kept)]
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if low is not None and high is not None and {each.reward for each in trajectories} <= {0, 1}:
            low, high = max(0.0, low), min(1.0, high)  # Student's interval of the groups' means has no limits
        num_untrained = sum(turn.trained is False for each in trajectories for turn in each.turns)
        return EpochMetrics(
            epoch,
            stage=self._name_stage(epoch),
            avg_reward=average,
            ci_low=low,
            ci_high=high,
            filtered_avg_reward=sum(filtered) / len(filtered) if filtered else None,
            num_clusters=len(set(clusters)) if rewards else None,
            num_groups=len(groups),
            num_groups_kept=len(kept),
            num_groups_zero_variance=len(selection.zero_variance),
            num_groups_low_spread=len(selection.low_spread),
            num_groups_outside=len(selection.outside),
            num_groups_spared=len(self._example_filter.skipped),
            num_trajectories=len(trajectories),
            num_missing=self._collector.num_missing if builder.records is not None else None,
            missing_reason=self._collector.missing_reasons.find_commonest(),
            curriculum_percentile=self._curriculum_state["current_percentile"]
            if self.curriculum_config.enabled
            else 1.0,
            job={
                **({"num_groups_stale": self._collector.num_stale} if self.run_config.limits.max_staleness else {}),
                **({"num_untrained_turns": num_untrained} if num_untrained else {}),
                **({"level": levels.highest} if (levels := self.context.levels) is not None else {}),
            },
            **self.context.tally.summarize(),
        )

    def _name_stage(self, epoch: int) -> str | None:
        stage = find_stage(self.run_config, epoch)
        return None if stage is None else stage.name

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Returns the histories and the status of every job; `total_epochs` counts the epochs that submitted one."""
        running = self._job_refs[len(self._statuses) :]
        jobs = [*self._statuses, *await asyncio.gather(*map(self.trainer_adapter.status, running))]
        return {
            "run_id": run_id,
            "num_epochs": len(self._reward_history),
            "total_epochs": len(self._job_refs),
            "jobs": [job.model_dump(mode="json") for job in jobs],
            "reward_history": [row.as_dict() for row in self._reward_history],
            "validation_history": [row.as_dict() for row in self._validation_history],
            "curriculum": self.get_curriculum_state(),
        }

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Writes the metrics files and updates the progress display.

        Args:
            output_dir: Write here and draw the plot; None: the run folder, where the run draws the plot at its end.
        """
        folder = Path(output_dir) if output_dir else self.context.folder
        folder.mkdir(parents=True, exist_ok=True)
        if all(row.epoch != epoch for row in self._reward_history):  # called by the user, not by `run`
            self._reward_history.append(EpochMetrics.from_dict({**metrics, "epoch": epoch}))
        self._log_metrics_to_file(epoch, metrics, folder)
        if output_dir and can_draw_plots():
            self._create_reward_plot(epoch, folder)
        row = EpochMetrics.from_dict({**metrics, "epoch": epoch})
        self.context.journal.record_metrics(row)
        self.context.journal.export_epoch(epoch)
        self.context.progress.epoch_done(row)

    def _log_metrics_to_file(self, epoch: int, metrics: dict[str, Any], output_dir: Path) -> None:
        append_line(output_dir / METRICS, {"epoch": epoch, **metrics})
        for name, value in (
            ("reward_history.json", [row.as_dict() for row in self._reward_history]),
            ("validation_history.json", [row.as_dict() for row in self.context.validations]),
            ("curriculum_state.json", self.get_curriculum_state()),
        ):
            write_json(output_dir / name, value)

    def _create_reward_plot(self, epoch: int, output_dir: Path) -> None:
        from reinforge.runs.plot import draw_reward_plot  # where matplotlib is installed

        history = [row for row in self._reward_history if row.epoch <= epoch]
        draw_reward_plot(output_dir / "reward_plot.png", history, self.context.validations, title=f"{self._run_id}")


@register_trainer(config_type=EpochTrainerConfig)
async def epoch_trainer(config: EpochTrainerConfig, builder: Builder) -> AsyncIterator[EpochTrainer]:
    yield EpochTrainer(config, algorithm=await builder.get_algorithm())
