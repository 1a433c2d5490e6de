"""What one job does on the embedded engine: build samples, score, credit and update, for each model group in turn.

groups of     prover  verifier  prover   =>  adapter prover: groups 0, 2;  adapter verifier: group 1
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from reinforge.algorithms.samples import num_left_out, num_of_other_choices, weigh_agents
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import JobFailed
from reinforge.interfaces import Algorithm
from reinforge.types.sample import FloatArray, TrainingSample, UpdateReport, are_finite
from reinforge.types.seeding import stable_random
from reinforge.types.supports import MAX_SUPPORT
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup

if TYPE_CHECKING:
    from reinforge.engine import Engine

MAX_NAMED = 5
DIRECTION_SAMPLES = (8, 256)
"""Of a job's samples an eighth, at least and at most so many, are scored again after it to see which way their
log-probs moved: a forward pass of all of them would cost a third of the update."""


class StepsRefused(JobFailed):
    """Numbers were not finite; `told` is what the job's record keeps of it."""

    def __init__(self, message: str, told: dict[str, Any]):
        super().__init__(message)
        self.told = told


class NothingToLearn(JobFailed):
    """What was collected for one adapter cannot move it."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one job trains one adapter on.

    Attributes:
        name: The adapter; empty: it has no name, being the only one.
        groups: What was collected for it.
        samples: What the algorithm took of those.
        epoch: From 0.
    """

    name: str
    groups: list[TrajectoryGroup]
    samples: list[TrainingSample]
    epoch: int

    @property
    def adapter(self) -> str | None:
        """The adapter as the engine knows it."""
        return self.name or None


@dataclass(frozen=True, slots=True)
class Trained:
    """What a job did to one adapter.

    Attributes:
        report: Of the engine.
        skipped: Episodes in refused optimizer steps.
        moved: Sum of advantage x change of log-prob over the watched tokens.
        num_watched: How many those are.
    """

    report: UpdateReport
    skipped: list[str]
    moved: float
    num_watched: int

    def as_dict(self, **counts: int) -> dict[str, Any]:
        """Returns the metrics of the job's record; `direction` is positive if the job did its work.

        Args:
            counts: Further ones.
        """
        report = self.report
        return {
            "num_updates": report.num_updates,
            "num_skipped_steps": report.num_skipped_steps,
            "num_samples": report.num_samples,
            "num_tokens": report.num_tokens,
            **counts,
            "direction": self.moved / max(1, self.num_watched),
            **({"skipped_episodes": self.skipped} if self.skipped else {}),
            **report.metrics,
        }


class Training:
    """Runs jobs on an engine, one after the other.

    Args:
        algorithm: Which tokens earn which credit, and the name of the loss.
        from_scratch: Each job begins with the weights that the engine was loaded with.
    """

    def __init__(self, algorithm: Algorithm, *, from_scratch: bool = False):
        self.algorithm, self.from_scratch = algorithm, from_scratch
        self._refused_in_a_row: Counter[str] = Counter()

    def run(
        self,
        engine: Engine,
        trajectories: TrajectoryCollection,
        config: FinetuneConfig,
        keep: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Trains on a collection and returns the job's metrics; of several adapters also each one's, as `groups`.

        An adapter without anything to learn from keeps its weights. Where one fails, none has changed.

        Args:
            engine: What is trained.
            trajectories: On what.
            config: The run's.
            keep: Writes the weights that came of it, which are then put back to what they were; None: they stay, and
                are served from the next `publish` on.

        Raises:
            JobFailed: Nothing could be trained, or too many steps were refused.
        """
        parts = parts_of(trajectories, list(engine.policies))
        samples = {name: self.algorithm.build_samples(groups) for name, groups in parts.items()}
        if not any(samples.values()):
            raise JobFailed(self._why_nothing(trajectories))
        done: dict[str, Trained] = {}
        idle: dict[str, str] = {}
        engine.begin_job(*engine.policies)
        try:
            for name, groups in parts.items():
                part = Part(name if len(engine.policies) > 1 else "", groups, samples[name], trajectories.epoch or 0)
                try:
                    done[name] = self._train(engine, part, config)
                except NothingToLearn as reason:
                    idle[name] = str(reason)
            if not done:
                raise JobFailed("; ".join(idle.values() if len(parts) == 1 else (f"{n}: {r}" for n, r in idle.items())))
            if keep is not None:
                keep()
        except BaseException:
            engine.rollback()
            raise
        if keep is None:
            engine.end_job()
        else:
            engine.rollback()
        found = totals_of(list(done.values())).as_dict(
            num_tokens_left_out=num_left_out(trajectories.groups),
            num_tokens_of_other_choices=num_of_other_choices(trajectories.groups),
        )
        if len(engine.policies) > 1:
            waits = {name: {"num_updates": 0, "reason": idle.get(name, "no group")} for name in engine.policies}
            found["groups"] = {**waits, **{name: trained.as_dict() for name, trained in done.items()}}
        return found

    def _why_nothing(self, trajectories: TrajectoryCollection) -> str:
        left_out = num_left_out(trajectories.groups)
        unrecorded = (
            f"; {left_out:,} sampled tokens may not be: drawn at temperature 0, or from more than {MAX_SUPPORT} "
            "that finetuning.sampling's top_p, top_k or min_p kept"
        )
        return (
            f"nothing to train: of {trajectories.num_trajectories} trajectories {type(self.algorithm).__name__} "
            "took none: no turn has token ids that may be trained, or none is good enough (min_reward, min_margin)"
            f"{unrecorded if left_out else ''}"
        )

    def _train(self, engine: Engine, part: Part, config: FinetuneConfig) -> Trained:
        """Trains one adapter within the open job."""
        samples = part.samples
        if not samples:
            raise NothingToLearn(f"nothing to train: {type(self.algorithm).__name__} took none of its trajectories")
        weigh_agents(samples)
        engine.score(samples, self.algorithm.needs, part.adapter)
        for sample, advantages in zip(samples, self.algorithm.credit(samples), strict=True):
            sample.advantages = advantages
        if not any(np.any(sample.advantages) for sample in samples):
            raise NothingToLearn("nothing to learn: every token's credit is zero")
        if not any(sample.weight > 0 for sample in samples):
            raise NothingToLearn("nothing to learn: every sample's weight is zero (overlong_filtering, agent_weights)")
        start, end = progress_of(part.epoch, config.num_epochs)
        if self.from_scratch:
            engine.reset(part.adapter)
        watched = _watched(engine, part, config.seed, drawn_by_these=not self.from_scratch)
        report = engine.update(
            samples, self.algorithm.loss, progress_start=start, progress_end=end, epoch=part.epoch, adapter=part.adapter
        )
        skipped = episodes_of(part.groups, samples, report.skipped_samples)
        self._refuse_broken(part.name, report, skipped, config.limits.max_refused_steps)
        return Trained(report, skipped, *_direction(engine, part, watched))

    def _refuse_broken(self, name: str, report: UpdateReport, skipped: list[str], limit: int) -> None:
        """Stops where no step could be made, or too many in a row could not, those of jobs before included.

        Raises:
            StepsRefused: The job is to be rolled back, with the episodes of the refused steps.
        """
        longest = 0
        for step in range(report.num_updates + report.num_skipped_steps):
            self._refused_in_a_row[name] = self._refused_in_a_row[name] + 1 if step in report.skipped_steps else 0
            longest = max(longest, self._refused_in_a_row[name])
        if report.num_updates and longest < limit:
            return
        why = f"{longest} optimizer steps in a row were refused (finetuning.limits.max_refused_steps: {limit})"
        if report.num_updates == 0:
            why = f"no optimizer step was made: {report.num_skipped_steps} were refused"
        named = ", ".join(skipped[:MAX_NAMED]) + (
            f" and {len(skipped) - MAX_NAMED} more" if skipped[MAX_NAMED:] else ""
        )
        raise StepsRefused(
            f"{f'{name}: ' if name else ''}{why}, since numbers were not finite (run.log says which); the weights are "
            f"those from before the job. The refused steps held the episodes {named}; all are in the job's record in "
            "run.sqlite",
            {"num_skipped_steps": report.num_skipped_steps, "skipped_episodes": skipped},
        )


def parts_of(trajectories: TrajectoryCollection, names: Sequence[str]) -> dict[str, list[TrajectoryGroup]]:
    """Returns the groups that train each adapter, in the order of the names; those without any are left out.

    Args:
        trajectories: What was collected; who is trained on a group is its `model_group`, or else the collection's, or
            else the first. One policy is trained on all.
        names: Of the adapters.

    Raises:
        JobFailed: A group is of an adapter that is not there.
    """
    if len(names) == 1:
        return {names[0]: trajectories.groups}
    parts: dict[str, list[TrajectoryGroup]] = {name: [] for name in names}
    for group in trajectories.groups:
        name = group.model_group or trajectories.model_group or names[0]
        if name not in parts:
            raise JobFailed(f"the group {group.group_id} is to train {name}, and there are only {', '.join(names)}")
        parts[name].append(group)
    return {name: groups for name, groups in parts.items() if groups}


def totals_of(done: Sequence[Trained]) -> Trained:
    """Returns what a job did to all its adapters: sums, and means over their steps."""
    if len(done) == 1:
        return done[0]
    reports = [trained.report for trained in done]
    return Trained(
        UpdateReport(
            num_updates=sum(report.num_updates for report in reports),
            num_skipped_steps=sum(report.num_skipped_steps for report in reports),
            num_samples=sum(report.num_samples for report in reports),
            num_tokens=sum(report.num_tokens for report in reports),
            metrics=_means([(report.metrics, report.num_updates) for report in reports]),
        ),
        skipped=list(dict.fromkeys(chain.from_iterable(trained.skipped for trained in done))),
        moved=sum(trained.moved for trained in done),
        num_watched=sum(trained.num_watched for trained in done),
    )


def _means(metrics: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    names = dict.fromkeys(name for found, _ in metrics for name in found)
    having = {name: [(found[name], count) for found, count in metrics if name in found] for name in names}
    return {name: sum(x * n for x, n in pairs) / sum(n for _, n in pairs) for name, pairs in having.items()}


def watched_samples(samples: list[TrainingSample], rng: random.Random) -> list[TrainingSample]:
    """Returns some of a job's samples, in whole groups where they fit: siblings share the cost of their prompt.

    Example: 64 samples in groups of 8 -> the 8 of one group; 20 samples of one group -> 8 of them.
    """
    least, most = DIRECTION_SAMPLES
    count = min(most, max(least, len(samples) // 8))
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    order = rng.sample(list(groups.values()), len(groups))
    return list(chain.from_iterable(order))[:count]


def episodes_of(groups: Sequence[TrajectoryGroup], samples: list[TrainingSample], indices: Sequence[int]) -> list[str]:
    """Returns the ids of the episodes that samples are of, each once; `GROUP#INDEX` of one without an id."""
    episodes = [
        trajectory.episode_id or f"{group.group_id}#{index}"
        for group in groups
        for index, trajectory in enumerate(group.trajectories)
    ]
    return list(dict.fromkeys(episodes[samples[index].trajectory_index] for index in indices))


def _watched(engine: Engine, part: Part, seed: int, *, drawn_by_these: bool) -> list[tuple[TrainingSample, FloatArray]]:
    """Returns samples whose log-probs are looked at again after the job, with what they are before it.

    Args:
        engine: What is trained.
        part: Of the job.
        seed: The run's.
        drawn_by_these: The weights that the job begins with are those that drew what was sampled.
    """
    samples = [sample for sample in part.samples if sample.weight > 0]
    chosen = watched_samples(samples, stable_random(seed, "direction", part.epoch))
    if not are_finite(chosen):
        chosen = [sample for sample in chosen if are_finite([sample])]
    before = [s.sampling_logprobs if s.old_logprobs is None else s.old_logprobs for s in chosen]
    if not drawn_by_these or any(np.isnan(logprobs).any() for logprobs in before):  # NaN: nobody sampled these
        before = engine.logprobs(chosen, part.adapter)
    return list(zip(chosen, before, strict=True))


def _direction(engine: Engine, part: Part, watched: list[tuple[TrainingSample, FloatArray]]) -> tuple[float, int]:
    """Returns the sum of advantage x change of log-prob over trained tokens, and the number of tokens."""
    moved, count = 0.0, 0
    after = engine.logprobs([sample for sample, _ in watched], part.adapter)
    for (sample, before), now in zip(watched, after, strict=True):
        assert sample.advantages is not None
        moved += float(np.sum(sample.advantages * (now - before) * sample.loss_mask, dtype=np.float64))
        count += sample.num_trained
    return moved, count


def progress_of(epoch: int, num_epochs: int) -> tuple[float, float]:
    """Returns the shares of the run that are done before and after an epoch's job, for the schedule.

    Example: epoch 1 of 4 -> (0.25, 0.5).
    """
    total = max(1, num_epochs)
    number = min(epoch, total - 1)
    return number / total, (number + 1) / total
