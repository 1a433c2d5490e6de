"""Runs episodes under one concurrency limit and retries environment failures.

A failed episode is recorded with its outcome and does not affect the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

from reinforge.config.schema import Config, LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.errors import (
    BackendError,
    ConfigError,
    ContextOverflow,
    EngineError,
    MessagesRejected,
    Problem,
    RecordError,
    describe_error,
)
from reinforge.interfaces import ChatModel
from reinforge.rollout.capture import AsyncLLM, BlockingLLM, Capture
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.http.endpoint import EpisodeEndpoint
from reinforge.rollout.isolation.agent_call import call_agent
from reinforge.rollout.isolation.containment import Abandoned, Blocked
from reinforge.rollout.isolation.isolated_agent import Episode, IsolatedWorkflow
from reinforge.rollout.isolation.worker_pool import SharedWorkerEnded
from reinforge.rollout.recording import drop_unrecordable, fail_unrecordable
from reinforge.rollout.slots import EpisodeSlots
from reinforge.rollout.workflow import PolicyFailure, refuse_coroutine
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import SamplingParams
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import Outcome
from reinforge.types.workflow import BoundWorkflow

logger = logging.getLogger(__name__)

Score = Callable[[EpisodeRecord], Awaitable[None]]


async def score_alone(record: EpisodeRecord) -> None:
    """Completes an episode whose scores do not depend on others."""


@dataclass(slots=True)
class RunnerStatus:
    """The runner's progress, for the watchdog and the final summary.

    Attributes:
        num_running: Episodes in flight.
        num_finished: Episodes that have ended.
        num_abandoned: Workflows that did not end after their timeout and still run: in a thread, or as a task that
            ignores its cancellation.
        last_progress_s: `time.monotonic()` when the latest episode ended.
    """

    num_running: int = 0
    num_finished: int = 0
    num_abandoned: int = 0
    last_progress_s: float = 0.0


def choose_llm(workflow: BoundWorkflow, llms: Mapping[str, ChatModel]) -> str:
    """Returns the entry of `llms` to pass to the workflow: the one it names, the only one, or the only trained one.

    Example: no name, {"agent": a policy, "judge": a hosted model} -> "agent".

    Raises:
        ConfigError: There is no such entry, or more than one choice.
    """
    name = workflow.llm
    listed = ", ".join(llms) or "none"
    if name is not None:
        if name not in llms:
            message = f'llms has no entry "{name}"; it has {listed}'
            raise ConfigError(Problem("workflow.llm", message, "name one of these, or add the entry"))
        return name
    policies = [entry for entry, llm in llms.items() if llm.is_policy]
    choices = policies if len(llms) > 1 else list(llms)
    if len(choices) != 1:
        trained = f"{len(policies)} of them trained" if policies else "none of them `_type: policy`"
        message = f"not set, but llms has {len(llms)} entries ({listed}), {trained}"
        if not llms:
            message = "not set, and llms has no entry"
        fix = "name the one that the agent calls" if llms else "add the entry that the agent calls"
        raise ConfigError(Problem("workflow.llm", message, fix))
    return choices[0]


class EpisodeRunner:
    """Runs a workflow on examples.

    Args:
        workflow: The agent.
        llms: Models by entry of `llms`.
        sampling: Sampling settings of trained policies.
        limits: The episode's timeout.
        outcomes: The number of retries after an environment failure.
        run_seed: The run's seed, from which all other seeds are derived.
        max_concurrency: Maximum number of episodes in flight, over all calls of `run`.

    Attributes:
        limit: Opened around each call of `run`, to end it when the run has reached a limit.
    """

    def __init__(
        self,
        workflow: BoundWorkflow,
        llms: Mapping[str, ChatModel],
        *,
        sampling: SamplingConfig,
        limits: LimitsConfig,
        outcomes: OutcomesConfig,
        run_seed: int,
        max_concurrency: int,
    ):
        self.workflow, self.llms = workflow, dict(llms)
        self.limits, self.outcomes, self.run_seed = limits, outcomes, run_seed
        self.limit: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self.status = RunnerStatus(last_progress_s=time.monotonic())
        self._sampling = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        self._warned: set[str] = set()
        self._slots = EpisodeSlots(max_concurrency)
        self._main_llm = choose_llm(workflow, self.llms)

    @classmethod
    def from_config(cls, config: Config, workflow: BoundWorkflow, llms: Mapping[str, ChatModel]) -> Self:
        """Returns a runner with the configuration's settings."""
        finetuning = config.finetuning
        return cls(
            workflow,
            llms,
            sampling=finetuning.sampling,
            limits=finetuning.limits,
            outcomes=finetuning.outcomes,
            run_seed=finetuning.seed,
            max_concurrency=config.eval.general.max_concurrency,
        )

    async def run(
        self,
        episodes: Sequence[tuple[EpisodeKey, EvalInputItem]],
        score: Score,
        done: Callable[[EpisodeRecord], None],
        complete: Score = score_alone,
    ) -> list[EpisodeRecord]:
        """Runs and scores episodes and returns them in the given order.

        Args:
            episodes: The key and the example of each episode.
            score: Sets the record's scores and reward; may change the outcome to `judge_error`.
            done: Called once for each finished episode, in the order they finish.
            complete: Completes the scores of an episode, missing ones too, once it no longer counts as in flight: it
                may wait for other episodes of this call.
        """
        num_held = 0

        async def run_one(key: EpisodeKey, item: EvalInputItem) -> EpisodeRecord:
            nonlocal num_held
            self.status.num_running += 1
            try:
                record = await self._run_with_retries(key, item, score)
            finally:
                self.status.num_running -= 1
                num_held -= 1
                self._slots.release()
            await complete(record)
            self.status.num_finished += 1
            self.status.last_progress_s = time.monotonic()
            try:
                done(record)
            except RecordError as error:
                fail_unrecordable(record, str(error))
                done(record)
            return record

        tasks = []
        try:
            async with self.limit(), asyncio.TaskGroup() as group:
                for key, item in episodes:  # one that has to wait for its turn is not even a task yet
                    await self._slots.acquire(key)
                    num_held += 1
                    tasks.append(group.create_task(run_one(key, item)))
        finally:
            for _ in range(num_held):  # of tasks that were cancelled before they began
                self._slots.release()
        return [task.result() for task in tasks]

    async def _run_with_retries(self, key: EpisodeKey, item: EvalInputItem, score: Score) -> EpisodeRecord:
        num_ends = 0
        for attempt in range(self.outcomes.retries + 1):
            record, num_ends = await self._run_attempt(key, item, attempt, num_ends)
            if not record.outcome.is_missing:
                await score(record)  # retries a failed judge itself, without running the episode again
                break
        return record

    async def _run_attempt(
        self, key: EpisodeKey, item: EvalInputItem, attempt: int, num_ends: int
    ) -> tuple[EpisodeRecord, int]:
        """Runs an attempt to its end: again, with the same seeds, if the worker ends that it shares with others.

        Args:
            key: The episode.
            item: Its example.
            attempt: Number of earlier attempts.
            num_ends: How many shared workers have ended with this episode in them.

        Returns:
            The episode, and the number of such workers by now.
        """
        while True:
            try:
                return await self._run_once(key, item, attempt, num_ends), num_ends
            except SharedWorkerEnded as end:
                num_ends += 1
                logger.warning("the episode %s runs again, since its worker ended: %s", key, end)

    def derive_environment_seed(self, key: EpisodeKey) -> int:
        """Returns the environment seed of an episode: equal for siblings, and for both models of a comparison."""
        # validations and the verdict compare models and epochs in pairs, so they use the same seeds every time
        epoch = key.epoch if key.phase == "collect" else 0
        phase = "collect" if key.phase == "collect" else "evaluate"
        sibling = key.generation if phase == "evaluate" or not self.workflow.share_environment_seed else 0
        return stable_seed(self.run_seed, "world", phase, epoch, key.round, key.example_id, sibling)

    async def _run_once(self, key: EpisodeKey, item: EvalInputItem, attempt: int, num_ends: int = 0) -> EpisodeRecord:
        capture = Capture(seed=stable_seed(self.run_seed, "draws", str(key), attempt))
        record = EpisodeRecord(key, item, seed=self.derive_environment_seed(key), attempt=attempt)
        started = time.monotonic()
        try:
            output = refuse_coroutine(await self._call_workflow(record, capture, num_ends), self.workflow)
            capture.match_output(output)
            record.item = item.copy_with_updates(output_obj=output)
        except SharedWorkerEnded:
            raise  # no attempt of this episode: another one may be to blame
        except TimeoutError as error:
            record.outcome, record.reason = self._classify_timeout(capture)
            if isinstance(error, Blocked):
                record.outcome, record.reason = Outcome.TIMEOUT, str(error)
        except PolicyFailure as failure:
            capture.match_output(failure.output)
            is_cut = bool(capture.calls) and capture.calls[-1].reply.finish_reason == "length"
            record.outcome = Outcome.OVERLONG if is_cut else Outcome.POLICY_ERROR
            record.reason = str(failure)
            record.item = item.copy_with_updates(output_obj=failure.output)
        except ContextOverflow as overflow:
            record.outcome, record.reason = Outcome.CONTEXT_OVERFLOW, str(overflow)
        except (BackendError, EngineError, ConnectionError) as error:
            is_own = isinstance(error, MessagesRejected)  # the agent's doing
            record.outcome = Outcome.TOOL_ERROR if is_own else Outcome.BACKEND_ERROR
            record.reason = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            record.outcome, record.reason = Outcome.CANCELLED, "the agent raised CancelledError"
        except (Exception, SystemExit) as error:  # noqa: BLE001  a user's agent may raise anything; it fails only this episode
            record.outcome, cause = _find_cause(capture)
            described = describe_error(error)
            record.reason = described if cause is None else f"{cause}; the agent then failed: {described}"
        capture.closed = True
        record.calls, record.marks, record.overflow = capture.calls, capture.marks, capture.overflow
        record.wall_s = time.monotonic() - started
        drop_unrecordable(record, lambda name: self.llms[name].is_policy)
        return record

    def _classify_timeout(self, capture: Capture) -> tuple[Outcome, str]:
        """Returns the outcome and reason of a timeout: the policy's fault if finished replies took most of the time."""
        limit, replies = self.limits.episode_timeout_s, len(capture.calls)
        replying_s = sum(call.ended_s - call.started_s for call in capture.calls)
        if replying_s > limit / 2:
            return Outcome.POLICY_TIMEOUT, f"{replies} replies took {replying_s:.1f} s of the time limit of {limit:g} s"
        waiting = f", {capture.pending} model call(s) unanswered" if capture.pending else ""
        return Outcome.TIMEOUT, f"not finished after {limit:g} s ({replies} replies{waiting})"

    def _create_handle(self, name: str, capture: Capture, blocks: asyncio.AbstractEventLoop | None) -> AsyncLLM:
        """Returns the handle of an entry of `llms`; a blocking one if it gets the loop that its calls run in."""
        if name not in self.llms:
            raise KeyError(f'llms has no entry "{name}"; it has {", ".join(self.llms)}')
        if blocks is None:
            return AsyncLLM(name, self.llms[name], capture, self._sampling, self._warned)
        return BlockingLLM(name, self.llms[name], capture, self._sampling, blocks, self._warned)

    def _build_context(self, record: EpisodeRecord, capture: Capture) -> EpisodeContext:
        loop = asyncio.get_running_loop()
        blocks = None if self.workflow.is_async else loop

        def open_endpoint() -> EpisodeEndpoint:
            return EpisodeEndpoint(
                lambda name: self._create_handle(name, capture, None),
                self._main_llm,
                {name: llm.model_name for name, llm in self.llms.items()},
                loop=loop,
                is_closed=lambda: capture.closed,
                warned=self._warned,
            )

        return EpisodeContext(
            record.seed,
            record.key.example_id,
            capture,
            lambda name: self._create_handle(name, capture, blocks),
            open_endpoint,
            is_training=record.key.phase == "collect",
            epoch=record.key.epoch,
        )

    async def _call_workflow(self, record: EpisodeRecord, capture: Capture, num_ends: int) -> object:
        context, timeout_s = self._build_context(record, capture), self.limits.episode_timeout_s
        llm = context.llm(self._main_llm)
        try:
            if isinstance(self.workflow, IsolatedWorkflow):
                names = {name: each.model_name for name, each in self.llms.items()}
                episode = Episode(record.item, llm, names, context, capture)
                return await self.workflow.run_episode(episode, timeout_s, num_ends)
            return await call_agent(self.workflow, record.item, llm, context, timeout_s)
        except Abandoned:
            self.status.num_abandoned += 1
            raise


def _find_cause(capture: Capture) -> tuple[Outcome, str | None]:
    """Returns the outcome of an episode whose agent raised an error, and what it raised it about, if that is known."""
    if capture.overflow:
        return Outcome.CONTEXT_OVERFLOW, capture.overflow
    if capture.lost_call is not None:
        return Outcome.BACKEND_ERROR, capture.lost_call
    return (Outcome.TOOL_ERROR if capture.bad_call is None else Outcome.POLICY_ERROR), capture.bad_call
