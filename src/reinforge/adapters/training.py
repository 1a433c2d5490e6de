"""Runs one job on the embedded engine: builds samples, scores, assigns advantages and updates, adapter by adapter.

groups of     prover  verifier  prover   =>  adapter prover: groups 0, 2;  adapter verifier: group 1
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from reinforge.algorithms.samples import count_tokens_of_other_choices, count_untrainable_tokens, weight_by_agent
from reinforge.config.pipeline import find_stage
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import JobFailed
from reinforge.interfaces import Algorithm, Teacher
from reinforge.types.sample import FloatArray, TrainingSample, UpdateReport, are_finite
from reinforge.types.seeding import stable_random
from reinforge.types.supports import MAX_SUPPORT
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup

if TYPE_CHECKING:
    from reinforge.engine import Engine

MAX_LISTED_EPISODES = 5
PROBE_SAMPLES = (8, 256)
"""Minimum and maximum number of samples that are scored again after a job, to see which way their log-probs moved. An
eighth of a job's samples is used: a forward pass over all of them would cost a third of the update."""


class StepsSkipped(JobFailed):
    """Too many optimizer steps were skipped; `metadata` is for the job's record."""

    def __init__(self, message: str, metadata: dict[str, Any]):
        super().__init__(message)
        self.metadata = metadata


class NoTrainingSignal(JobFailed):
    """The trajectories of one adapter carry no training signal."""


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """The training data of one adapter in one job."""

    name: str  # the adapter's name; empty for a single policy
    groups: list[TrajectoryGroup]
    samples: list[TrainingSample]
    epoch: int
    algorithm: Algorithm

    @property
    def adapter(self) -> str | None:
        """The adapter's name for the engine; None for a single policy."""
        return self.name or None


@dataclass(frozen=True, slots=True)
class AdapterResult:
    """What a job did to one adapter."""

    report: UpdateReport
    skipped_episodes: list[str]
    logprob_gain: float  # sum of advantage x change of log-prob over the trained tokens of the probe samples
    num_probe_tokens: int

    def as_dict(self, **counts: int) -> dict[str, Any]:
        """Returns metrics for the job's record; `direction` is positive if log-probs moved with the advantages."""
        report = self.report
        return {
            "num_updates": report.num_updates,
            "num_skipped_steps": report.num_skipped_steps,
            "num_samples": report.num_samples,
            "num_tokens": report.num_tokens,
            **counts,
            "direction": self.logprob_gain / max(1, self.num_probe_tokens),
            **({"skipped_episodes": self.skipped_episodes} if self.skipped_episodes else {}),
            **report.metrics,
        }


class JobRunner:
    """Runs jobs on an engine, one after the other.

    Args:
        from_scratch: Start each job from the weights that the engine was loaded with.

    Attributes:
        loop: The event loop on which a teacher answers; jobs run in other threads. None: there is no teacher.
        before_end: Called with the engine once it is trained, before a reply can be sampled from the new weights; if it
            raises, the job fails and changes nothing. None: nothing is called.
    """

    def __init__(self, algorithm: Algorithm, *, from_scratch: bool = False):
        self.algorithm, self.from_scratch = algorithm, from_scratch
        self.loop: asyncio.AbstractEventLoop | None = None
        self.before_end: Callable[[Engine], None] | None = None
        self._num_skipped_in_a_row: Counter[str] = Counter()

    def run(
        self,
        engine: Engine,
        trajectories: TrajectoryCollection,
        config: FinetuneConfig,
        save: Callable[[], None] | None = None,
        version: int | None = None,
    ) -> dict[str, Any]:
        """Trains on a collection and returns the job's metrics, with those of each of several adapters as `groups`.

        An adapter without training signal keeps its weights. If one adapter fails, none is changed.

        Args:
            save: Saves the new weights, after which the engine is rolled back to the old ones; None: the engine keeps
                the new weights and serves them from the next `publish` on.
            version: Version of the weights that the job starts from, if older ones may have sampled tokens; None: they
                have not.

        Raises:
            JobFailed: There was no training signal, or too many steps were skipped.
        """
        groups_by_adapter = split_by_adapter(trajectories, list(engine.policies))
        algorithm = self.algorithm.for_epoch(trajectories.epoch)
        samples = {name: algorithm.build_samples(groups) for name, groups in groups_by_adapter.items()}
        if not any(samples.values()):
            raise JobFailed(self._explain_no_samples(trajectories))
        staleness = {} if version is None else mark_stale(list(chain.from_iterable(samples.values())), version)
        results: dict[str, AdapterResult] = {}
        idle: dict[str, str] = {}
        engine.begin_job(*engine.policies)
        try:
            for name, groups in groups_by_adapter.items():
                label = name if len(engine.policies) > 1 else ""
                batch = AdapterBatch(label, groups, samples[name], trajectories.epoch or 0, algorithm)
                try:
                    results[name] = self._train(engine, batch, config)
                except NoTrainingSignal as reason:
                    idle[name] = str(reason)
            if not results:
                reasons = [
                    reason if len(groups_by_adapter) == 1 else f"{name}: {reason}" for name, reason in idle.items()
                ]
                raise JobFailed("; ".join(reasons))
            if save is not None:
                save()
            if self.before_end is not None:
                self.before_end(engine)
        except BaseException:
            engine.rollback()
            raise
        if save is None:
            engine.end_job()
        else:
            engine.rollback()
        metrics = sum_results(list(results.values())).as_dict(
            num_tokens_left_out=count_untrainable_tokens(trajectories.groups),
            num_tokens_of_other_choices=count_tokens_of_other_choices(trajectories.groups),
        )
        metrics |= staleness
        episodes = {(name, sample.trajectory_index) for name, each in samples.items() for sample in each}
        metrics["samples_per_episode"] = sum(map(len, samples.values())) / len(episodes)
        if len(engine.policies) > 1:
            skipped = {name: {"num_updates": 0, "reason": idle.get(name, "no group")} for name in engine.policies}
            metrics["groups"] = {**skipped, **{name: result.as_dict() for name, result in results.items()}}
        return metrics

    def _explain_no_samples(self, trajectories: TrajectoryCollection) -> str:
        algorithm = self.algorithm.for_epoch(trajectories.epoch)
        num_untrainable = count_untrainable_tokens(trajectories.groups)
        untrainable = (
            f"; {num_untrainable:,} sampled tokens cannot be trained: they were sampled at temperature 0, with "
            "penalties or a logit_bias, or top_p, top_k or min_p (finetuning.sampling) kept more than "
            f"{MAX_SUPPORT} tokens"
        )
        return (
            f"nothing to train: {type(algorithm).__name__} uses none of {trajectories.num_trajectories} "
            "trajectories: no turn has trainable token ids, or no reward is good enough (min_reward, min_margin)"
            f"{untrainable if num_untrainable else ''}"
        )

    def _train(self, engine: Engine, batch: AdapterBatch, config: FinetuneConfig) -> AdapterResult:
        samples, algorithm = batch.samples, batch.algorithm
        if not samples:
            raise NoTrainingSignal(f"nothing to train: {type(algorithm).__name__} uses none of its trajectories")
        weight_by_agent(samples)
        stage = find_stage(config, batch.epoch)
        if stage is not None:
            engine.use_stage(stage.name, batch.adapter)
        engine.score(samples, algorithm.needs, batch.adapter, defer=not self.from_scratch)
        if algorithm.teacher is not None:
            self._score_with_teacher(algorithm.teacher, samples)
        for sample, advantages in zip(samples, algorithm.credit(samples), strict=True):
            sample.advantages = advantages
        if not any(np.any(sample.advantages) for sample in samples):
            raise NoTrainingSignal("nothing to learn: all advantages are zero")
        if not any(sample.weight > 0 for sample in samples):
            raise NoTrainingSignal("nothing to learn: all sample weights are zero (overlong_filtering, agent_weights)")
        first, num_epochs = (0, config.num_epochs) if stage is None else (stage.first, stage.settings.num_epochs)
        start, end = compute_progress(batch.epoch - first, num_epochs)
        if self.from_scratch:
            engine.reset(batch.adapter)
        probes = _choose_probes(engine, batch, config.seed, sampled_by_current=not self.from_scratch)
        report = engine.update(
            samples, algorithm.loss, progress_start=start, progress_end=end, epoch=batch.epoch, adapter=batch.adapter
        )
        skipped = find_episode_ids(batch.groups, samples, report.skipped_samples)
        self._check_skipped_steps(batch.name, report, skipped, config.limits.max_skipped_steps)
        return AdapterResult(report, skipped, *_measure_logprob_gain(engine, batch, probes))

    def _score_with_teacher(self, teacher: Teacher, samples: Sequence[TrainingSample]) -> None:
        """Sets the teacher's log-probs as those of the reference; it answers on the run's event loop."""
        if self.loop is None:
            raise JobFailed("a teacher needs the event loop of the run: initialize the trainer adapter first")
        rows = asyncio.run_coroutine_threadsafe(teacher.score_samples(samples), self.loop).result()
        for sample, logprobs in zip(samples, rows, strict=True):
            if not np.isfinite(logprobs).all():
                raise JobFailed(f"the teacher {teacher.model_name} returned log-probs that are not finite")
            sample.ref_logprobs = logprobs

    def _check_skipped_steps(self, name: str, report: UpdateReport, skipped: list[str], limit: int) -> None:
        """Fails the job if all its steps were skipped, or `limit` in a row, counting those of earlier jobs."""
        longest = 0
        for step in range(report.num_updates + report.num_skipped_steps):
            self._num_skipped_in_a_row[name] = (
                self._num_skipped_in_a_row[name] + 1 if step in report.skipped_steps else 0
            )
            longest = max(longest, self._num_skipped_in_a_row[name])
        if report.num_updates and longest < limit:
            return
        reason = f"{longest} optimizer steps in a row were skipped (finetuning.limits.max_skipped_steps: {limit})"
        if report.num_updates == 0:
            reason = f"no optimizer step was made: {report.num_skipped_steps} were skipped"
        num_more = len(skipped) - MAX_LISTED_EPISODES
        listed = ", ".join(skipped[:MAX_LISTED_EPISODES]) + (f" and {num_more} more" if num_more > 0 else "")
        raise StepsSkipped(
            f"{f'{name}: ' if name else ''}{reason}, because numbers were not finite (run.log has the details); the "
            f"weights from before the job are restored. Episodes in the skipped steps: {listed}; the job's record in "
            "run.sqlite lists them all",
            {"num_skipped_steps": report.num_skipped_steps, "skipped_episodes": skipped},
        )


def mark_stale(samples: Sequence[TrainingSample], version: int) -> dict[str, float]:
    """Sets `is_stale` of each sample; returns by how many versions the trained tokens are older: the mean and the most.

    Example: version 3 and trained tokens of the versions 3, 3, 2 and 1 -> {"staleness": 0.75, "staleness_max": 2}.
    """
    ages = []
    for sample in samples:
        age = version - sample.policy_versions[sample.loss_mask]
        age = age[sample.policy_versions[sample.loss_mask] >= 0]  # others were given, not sampled
        sample.is_stale = bool((age > 0).any())
        ages.append(age)
    every = np.concatenate(ages) if ages else np.zeros(0, np.int64)
    return {"staleness": float(every.mean()), "staleness_max": float(every.max())} if len(every) else {}


def split_by_adapter(trajectories: TrajectoryCollection, names: Sequence[str]) -> dict[str, list[TrajectoryGroup]]:
    """Returns the groups that train each adapter, in the order of the names; adapters without groups are left out."""
    if len(names) == 1:
        return {names[0]: trajectories.groups}
    groups_by_adapter: dict[str, list[TrajectoryGroup]] = {name: [] for name in names}
    for group in trajectories.groups:
        name = group.model_group or trajectories.model_group or names[0]
        if name not in groups_by_adapter:
            raise JobFailed(
                f"group {group.group_id} trains the adapter {name}, but the adapters are {', '.join(names)}"
            )
        groups_by_adapter[name].append(group)
    return {name: groups for name, groups in groups_by_adapter.items() if groups}


def sum_results(results: Sequence[AdapterResult]) -> AdapterResult:
    """Returns the result of a job over all its adapters: sums of counts, and means of metrics over steps."""
    if len(results) == 1:
        return results[0]
    reports = [result.report for result in results]
    return AdapterResult(
        UpdateReport(
            num_updates=sum(report.num_updates for report in reports),
            num_skipped_steps=sum(report.num_skipped_steps for report in reports),
            num_samples=sum(report.num_samples for report in reports),
            num_tokens=sum(report.num_tokens for report in reports),
            metrics=_average([(report.metrics, report.num_updates) for report in reports]),
        ),
        skipped_episodes=list(dict.fromkeys(chain.from_iterable(result.skipped_episodes for result in results))),
        logprob_gain=sum(result.logprob_gain for result in results),
        num_probe_tokens=sum(result.num_probe_tokens for result in results),
    )


def _average(metrics: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    names = dict.fromkeys(name for values, _ in metrics for name in values)
    weighted = {name: [(values[name], count) for values, count in metrics if name in values] for name in names}
    return {name: sum(x * n for x, n in pairs) / sum(n for _, n in pairs) for name, pairs in weighted.items()}


def choose_probe_samples(samples: list[TrainingSample], rng: random.Random) -> list[TrainingSample]:
    """Returns some of a job's samples, in whole groups where possible: siblings share the cost of their prompt.

    Example: 64 samples in groups of 8 -> the 8 of one group; 20 samples of one group -> 8 of them.
    """
    least, most = PROBE_SAMPLES
    count = min(most, max(least, len(samples) // 8))
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    order = rng.sample(list(groups.values()), len(groups))
    return list(chain.from_iterable(order))[:count]


def find_episode_ids(
    groups: Sequence[TrajectoryGroup], samples: list[TrainingSample], indices: Sequence[int]
) -> list[str]:
    """Returns the episode ids of some samples, without duplicates; `GROUP#INDEX` for an episode without an id."""
    episodes = [
        trajectory.episode_id or f"{group.group_id}#{index}"
        for group in groups
        for index, trajectory in enumerate(group.trajectories)
    ]
    return list(dict.fromkeys(episodes[samples[index].trajectory_index] for index in indices))


def _choose_probes(
    engine: Engine, batch: AdapterBatch, seed: int, *, sampled_by_current: bool
) -> list[tuple[TrainingSample, FloatArray | None]]:
    """Returns probe samples with their log-probs before the job, or None where the update sets them as
    `old_logprobs`; they are scored again after it.

    Args:
        sampled_by_current: True if the weights at the start of the job sampled the data.
    """
    samples = [sample for sample in batch.samples if sample.weight > 0]
    chosen = choose_probe_samples(samples, stable_random(seed, "direction", batch.epoch))
    if not are_finite(chosen):
        chosen = [sample for sample in chosen if are_finite([sample])]
    before = [s.sampling_logprobs if s.old_logprobs is None else s.old_logprobs for s in chosen]
    if any(sample.defers_old_logprobs for sample in chosen):
        return [(s, None if s.defers_old_logprobs else row) for s, row in zip(chosen, before, strict=True)]
    # the log-probs of older weights would count their jobs too; NaN: given, not sampled
    has_older = any(sample.is_stale and sample.old_logprobs is None for sample in chosen)
    if not sampled_by_current or has_older or any(np.isnan(logprobs).any() for logprobs in before):
        before = engine.logprobs(chosen, batch.adapter)
    return list(zip(chosen, before, strict=True))


def _measure_logprob_gain(
    engine: Engine, batch: AdapterBatch, probes: list[tuple[TrainingSample, FloatArray | None]]
) -> tuple[float, int]:
    """Returns the sum of advantage x change of log-prob over trained tokens, and the number of tokens."""
    gain, count = 0.0, 0
    probes = [(sample, sample.old_logprobs if before is None else before) for sample, before in probes]
    probes = [(sample, before) for sample, before in probes if before is not None]  # None: its step was skipped
    after = engine.logprobs([sample for sample, _ in probes], batch.adapter)
    for (sample, before), now in zip(probes, after, strict=True):
        assert sample.advantages is not None
        assert before is not None
        gain += float(np.sum(sample.advantages * (now - before) * sample.loss_mask, dtype=np.float64))
        count += sample.num_trained
    return gain, count


def compute_progress(epoch: int, num_epochs: int) -> tuple[float, float]:
    """Returns the shares of the run done before and after an epoch's job, for the learning rate schedule.

    Example: epoch 1 of 4 -> (0.25, 0.5).
    """
    total = max(1, num_epochs)
    number = min(epoch, total - 1)
    return number / total, (number + 1) / total
