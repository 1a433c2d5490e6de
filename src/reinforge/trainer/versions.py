"""Versions of the policy: commit a checkpoint, validate, adopt new weights if they are the trained ones."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reinforge.crash import crash_point
from reinforge.errors import JobFailed
from reinforge.files import write_json
from reinforge.interfaces import PolicyServer, ServesSeveral, Trainer, TrainerAdapter
from reinforge.port_bases import Resubmits
from reinforge.runs.checkpoints import restore_weights
from reinforge.runs.rows import BASELINE, EpochSnapshot, ValidationRow, choose_best_validation
from reinforge.types.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.request import Message, ModelReply, ModelRequest, SamplingParams
from reinforge.types.trajectory import EpisodeItem, TrajectoryCollection, TrajectoryGroup

if TYPE_CHECKING:
    from reinforge.trainer.context import RunContext


async def commit(
    context: RunContext, adapter: TrainerAdapter, epoch: int, state: dict[str, Any], *, version: int | None
) -> str | None:
    """Makes an epoch durable: its weights first, then, in one transaction, the point to resume from.

    Args:
        state: What a resume needs; the current counters are added unless it holds some.

    Returns:
        The checkpoint; None if the backend does not save its weights.
    """
    newest = asdict(context.policy_versions[-1]) if context.policy_versions else None  # to rebuild a damaged journal
    state = {"epoch": epoch, "version": version, "newest_version": newest, "counters": context.counters(), **state}
    number = epoch + 1 if version is None else version
    name = context.checkpoints.name(number)
    holds = not state["adopt"] and context.checkpoints.has(number) and context.checkpoints.find_damage(name) is None
    checkpoint = name if holds else await context.checkpoints.write(adapter, number, state)
    context.journal.record_snapshot(EpochSnapshot(epoch, version, checkpoint, state))
    return checkpoint


async def record_base(context: RunContext, adapter: TrainerAdapter) -> None:
    """Saves the weights before any training."""
    policy, state = context.policy, {"adopt": False, "trainer": None}
    version = policy.version if policy is not None else None
    checkpoint = await commit(context, adapter, BASELINE, state, version=version)
    if policy is not None:
        context.record_version(policy.version, await policy.fingerprint(), 0, checkpoint)


async def validate(trainer: Trainer, context: RunContext, epoch: int) -> ValidationRow:
    """Validates on `select` and records the result with the version of the weights.

    Args:
        epoch: -1 for the baseline.
    """
    evaluation = trainer.trajectory_builder.evaluation  # None outside a run
    total = None if evaluation is None else len(evaluation.example_ids("select"))
    context.begin_stage("BASELINE" if epoch == BASELINE else "VALIDATE", None if epoch == BASELINE else epoch, total)
    report = await trainer.run_validation_evaluation(epoch, context.run_id)
    policy = trainer.trainer_adapter.policy()
    version = policy.version if policy is not None else epoch + 1
    checkpoint = context.checkpoints.name(version) if context.checkpoints.has(version) else None
    row = ValidationRow.from_dict({**report, "epoch": epoch, "version": version, "checkpoint": checkpoint})
    context.validations.append(row)
    context.journal.record_validation(row)
    write_json(context.folder / "validation_history.json", [each.as_dict() for each in context.validations])
    context.end_stage(row.as_dict())
    context.progress.validation(row)
    return row


async def submit(
    context: RunContext, adapter: TrainerAdapter, epoch: int, chosen: TrajectoryCollection
) -> TrainingJobRef:
    """Submits a job once: after a resume, the backend may already have it."""
    key = str(chosen.job_key)
    context.pending = None  # from here on the weights may change
    known = context.journal.find_job(key) if context.resumed is not None else None
    if known is None:
        context.journal.record_job_intent(key, epoch, chosen.run_id)
        crash_point("submit.after_intent")
        ref = await adapter.submit(chosen)
    elif isinstance(adapter, Resubmits):
        ref = await adapter.resubmit(chosen, known.ref)
    else:
        ref = known.ref or await adapter.submit(chosen)
    crash_point("submit.after_send")
    context.journal.record_job_submission(key, ref)
    crash_point("submit.after_id")
    return ref


def drop_checkpoints(
    context: RunContext,
    gate_metric: str | None,
    *,
    keep_last: int,
    pin_every: int | None,
    stage_ends: Collection[int] = (),
) -> None:
    """Removes all checkpoints except the base, the best, the newest, the pinned ones and those between two stages.

    Args:
        stage_ends: The last epochs of the stages of a pipeline; the model after one is the reference of the next stage,
            unless that starts from an earlier one, which `return_to_best` has copied.
    """
    names, versions = context.checkpoints.names(), context.policy_versions
    if versions:  # those after it are of a process that died before it recorded them
        names = [name for name in names if name <= context.checkpoints.name(versions[-1].version)]
    best = choose_best_validation(context.validations, gate_metric)
    kept = {*names[:1], *names[-keep_last:], *([best.checkpoint] if best is not None and best.checkpoint else [])}
    kept |= {row.checkpoint for row in context.validations if row.epoch in stage_ends and row.checkpoint}
    kept |= {row.checkpoint for row in versions if row.num_updates == 0 and row.checkpoint}
    if pin_every is not None:
        kept |= {name for name in names if int(name.rpartition("-")[2]) % pin_every == 0}
    for name in context.checkpoints.remove_except(kept):
        context.journal.forget_checkpoint(name)


async def adopt(
    context: RunContext, policy: PolicyServer, *, prompts: Prompts, num_updates: int | None
) -> CanaryReport:
    """Publishes the weights of a finished job as the next version and checks that the agent is served them.

    Args:
        num_updates: Optimizer steps of the job; None: the backend does not report them.
    """
    before = context.policy_versions[-1] if context.policy_versions else None
    version = policy.version
    if before is None or version == before.version:  # otherwise the trainer has published already
        version += 1
    crash_point("publish.before")
    await policy.publish(version)
    crash_point("publish.mid")
    report = await probe(policy, version, prompts, before.fingerprint if before else None)
    if context.is_run:
        checkpoint = context.checkpoints.name(version) if context.checkpoints.has(version) else None
        context.record_version(version, report.fingerprint, num_updates, checkpoint)
    return report


async def return_to_best(context: RunContext, adapter: TrainerAdapter, metric: str | None) -> None:
    """Continues from the best checkpoint so far, as a new version, unless the newest is as good.

    That version has a checkpoint of its own, since it is the reference of the stage that begins with it.
    """
    best, policy = choose_best_validation(context.validations, metric, prefers_last=True), adapter.policy()
    if policy is None or best is None or best.checkpoint is None or best.version == policy.version:
        return
    version = policy.version + 1
    if not await restore_weights(adapter, context.checkpoints.verify(best.checkpoint), version):
        return
    checkpoint = await context.checkpoints.write(adapter, version)
    context.record_version(version, await policy.fingerprint(), 0, checkpoint)
    whose = "of the untouched model" if best.epoch == BASELINE else f"after epoch {best.epoch}"
    context.progress.note(f"training continues from the weights {whose}, which are the best so far on select")


async def adopt_unpublished(
    context: RunContext, adapter: TrainerAdapter, statuses: Sequence[TrainingJobStatus]
) -> None:
    """Adopts weights that a trainer has trained but not published, as one version."""
    policy = adapter.policy()
    if policy is None:
        return
    known = [version.fingerprint for version in context.policy_versions]
    if len(known) > 1 and await policy.fingerprint() == known[-1]:
        return
    if len(known) == 1 and not statuses and await policy.fingerprint() == known[-1]:
        return  # nothing was trained
    counts = [status.num_updates for status in statuses if status.num_updates is not None]
    context.begin_stage("ADOPT")
    report = await adopt(context, policy, prompts={}, num_updates=sum(counts) if counts else None)
    context.end_stage({"version": report.version, "fingerprint": report.fingerprint})


def refuse_failed(statuses: Sequence[TrainingJobStatus]) -> None:
    """Stops the run if the trainer returned a job that did not complete."""
    for status in statuses:
        if status.status is not TrainingStatusEnum.COMPLETED:
            reason = status.message or "no reason given"
            raise JobFailed(f"the job {status.run_id} on {status.backend} ended with status {status.status}: {reason}")


NOISE_FACTOR = 10.0
"""Sampler and learner may differ by the policy's tolerance, or by this many times the noise of scoring twice."""

MAX_OUTLIER = 1e-2
OUTLIER_SHARE = 1 / 8
"""This share of the tokens may differ by `MAX_OUTLIER` nats: other weights change nearly every token. Where attention
hangs between two keys with large scores, though, float32 may round one token differently: with a learning rate of 30
times the default, 7e-5 nats were seen in one of 15,000 replies, of which 99 % agreed to 1e-6."""

NUM_CANARY_PROMPTS = 4
CANARY_CHARACTERS = 2000
"""Maximum number of characters of all prompts together, so that the check takes a small share of a job."""
PROBE_TOKENS = 4
PROBE: list[Message] = [{"role": "user", "content": "1 2 3"}]  # the prompt if none of the agent's is known yet


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """What the canary measured."""

    version: int
    fingerprint: str
    max_difference: float | None  # largest |sampler - learner| log-prob, in nats; None: no token was compared
    mean_difference: float | None  # mean |sampler - learner| log-prob; None as above
    k3: float | None
    """Estimate of KL(sampler, learner) per token in nats: the mean of exp(d) - 1 - d with d = learner - sampler
    (Schulman, "Approximating KL divergence", 2020); None as above."""
    num_tokens: int


Prompts = Mapping[str, Sequence[list[Message]]]
"""A few of the agent's conversations by adapter; a single policy has the name ""."""


async def probe(policy: PolicyServer, version: int, prompts: Prompts, previous_fingerprint: str | None) -> CanaryReport:
    """Checks that the policy and each of its adapters serve `version`, with new weights."""
    fingerprint = await policy.fingerprint()
    if fingerprint == previous_fingerprint:
        raise JobFailed(
            f"the job did not change the weights (fingerprint {fingerprint}); the learning rate may be zero, "
            "or too small for the precision of the weights"
        )
    policies = {"": policy}
    if isinstance(policy, ServesSeveral):
        policies = {name: policy.get_policy(name) for name in policy.names}
    results = [await _compare(each, name, version, prompts.get(name, [])) for name, each in policies.items()]
    d_N = np.concatenate([np.zeros(0), *(each for each in results if each is not None)])
    if not len(d_N):  # nothing was compared: unknown, not 0.0
        return CanaryReport(version, fingerprint, None, None, None, 0)
    distances_N, k3_N = np.abs(d_N), np.expm1(d_N) - d_N
    return CanaryReport(
        version, fingerprint, float(distances_N.max()), float(distances_N.mean()), float(k3_N.mean()), len(d_N)
    )


async def _compare(
    policy: PolicyServer, name: str, version: int, prompts: Sequence[list[Message]]
) -> NDArray[np.float64] | None:
    """Returns learner minus sampler log-prob of each token of a few replies, in nats; None: no tokens are known."""
    requests = [
        ModelRequest(list(messages), SamplingParams(max_tokens=PROBE_TOKENS, seed=index + 1))
        for index, messages in enumerate(prompts or [PROBE])
    ]
    replies = await asyncio.gather(*(policy.sample(request) for request in requests))
    _refuse_other_version(replies, version)
    if all(reply.tokens is None for reply in replies):
        return None
    sequences = [[*r.tokens.prompt_token_ids, *r.tokens.token_ids] for r in replies if r.tokens]
    once = await policy.score(sequences)
    differences = [
        scored[-len(r.tokens.token_ids) :] - np.asarray(r.tokens.logprobs)
        for scored, r in zip(once, (r for r in replies if r.tokens), strict=True)
        if r.tokens and r.tokens.token_ids
    ]
    d_N = np.concatenate(differences, dtype=np.float64) if differences else np.zeros(0)
    largest = float(np.abs(d_N).max(initial=0.0))
    if largest <= policy.tolerance or _are_outliers(np.abs(d_N), policy.tolerance):
        return d_N
    again = await policy.score(sequences[:1])
    noise = max((float(np.max(np.abs(a - b))) for a, b in zip(once, again, strict=False)), default=0.0)
    if not largest <= NOISE_FACTOR * noise:  # NaN fails too
        of = f" of the adapter {name}" if name else ""
        raise JobFailed(
            f"the policy does not serve the trained weights{of}: log-probs of the same tokens differ by up to "
            f"{largest:.2e} nats between sampler and learner (noise floor {noise:.1e})"
        )
    return d_N


def _are_outliers(distances_N: NDArray[np.float64], tolerance: float) -> bool:
    num_beyond = np.count_nonzero(~(distances_N <= tolerance))
    return bool(distances_N.max() <= MAX_OUTLIER and num_beyond <= OUTLIER_SHARE * len(distances_N))


def _refuse_other_version(replies: Sequence[ModelReply], version: int) -> None:
    served = {reply.version for reply in replies if reply.version is not None}
    if served - {version}:
        raise JobFailed(f"version {version} was published, but replies carry version {sorted(served)}")


def pick_prompts(groups: Iterable[TrajectoryGroup]) -> dict[str, list[list[Message]]]:
    parts: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        parts.setdefault(group.model_group or "", []).append(group)
    return {name: shortest_prompts(part) for name, part in parts.items()}


def shortest_prompts(groups: list[TrajectoryGroup]) -> list[list[Message]]:
    """Returns the shortest prompts of a job's trajectories: everything before the first assistant turn."""
    openings: dict[str, list[Message]] = {}
    for group in groups:
        opening: list[Message] = []
        for item in group.trajectories[0].episode:
            if not isinstance(item, EpisodeItem) or item.role == "assistant":
                break
            opening.append({"role": item.role.value, "content": item.content})
        if opening:
            openings[str(opening)] = opening
    chosen: list[list[Message]] = []
    left = CANARY_CHARACTERS
    for messages in sorted(openings.values(), key=lambda messages: len(str(messages)))[:NUM_CANARY_PROMPTS]:
        left -= len(str(messages))
        if chosen and left < 0:
            break
        chosen.append(messages)
    return chosen
