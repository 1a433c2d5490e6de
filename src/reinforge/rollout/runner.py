"""Runs episodes under one concurrency limit and retries environment failures.

A failed episode is recorded with its outcome and does not affect the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.config.pipeline import PipelineStage, choose_stage, list_stages
from reinforge.config.schema import Config, LLMConfig
from reinforge.errors import ConfigError, Problem, RecordError, did_you_mean
from reinforge.interfaces import ChatModel
from reinforge.rollout.capture import AsyncLLM, BlockingLLM, Capture
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.ending import drop_unrecordable, fail_unrecordable, record_ending
from reinforge.rollout.isolation.containment import (
    SCOPE,
    Abandoned,
    ContainedTask,
    Settled,
    SharedWorkerEnded,
    TimeLimit,
)
from reinforge.rollout.slots import EpisodeSlots
from reinforge.rollout.workflow import call_agent, enter_agent
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import SamplingParams
from reinforge.types.seeding import stable_seed
from reinforge.types.workflow import BoundWorkflow

if TYPE_CHECKING:
    from reinforge.rollout.http.endpoint import EpisodeEndpoint
    from reinforge.rollout.http.routes import LLMRoutes

logger = logging.getLogger(__name__)

Score = Callable[[EpisodeRecord], Awaitable[None]]


async def score_alone(record: EpisodeRecord) -> None:
    """Completes an episode whose scores do not depend on others."""


@dataclass(slots=True)
class RunnerStatus:
    """The runner's progress, for the watchdog and the final summary."""

    num_running: int = 0
    num_finished: int = 0
    num_abandoned: int = 0  # workflows that still run after their timeout, as a thread or an uncancellable task
    last_progress_s: float = 0.0


def choose_llm(workflow: BoundWorkflow, llms: Mapping[str, ChatModel], untrained: Collection[str] = ()) -> str:
    """Returns the entry of `llms` to pass to the workflow: the one it names, the only one, or the only trained one.

    Example: no name, {"agent": a policy, "judge": a hosted model} -> "agent".
    """
    name = workflow.llm
    listed = ", ".join(llms) or "none"
    if name is not None:
        if name not in llms:
            message = f'llms has no entry "{name}"; it has {listed}'
            raise ConfigError(Problem("workflow.llm", message, "name one of these, or add the entry"))
        return name
    policies = [entry for entry, llm in llms.items() if llm.is_policy and entry not in untrained]
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
        max_concurrency: Maximum number of episodes in flight, over all calls of `run`.
        entries: The configuration of the entries of `llms`.

    Attributes:
        ignored: Fields of the agent's requests that nothing has used so far.
        prompts: What `context.text` returns in place of the agent's own texts, by name.
        texts: The texts that the agent has asked for, by name, with its own wording.
        limit: Opened around each call of `run`, to end it when the run has reached a limit.
        main_llm: The entry of `llms` that the workflow gets.
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
        entries: Mapping[str, LLMConfig] | None = None,
        prompts: Mapping[str, str] | None = None,
        stages: Sequence[PipelineStage] = (),
    ):
        self.workflow, self.llms, self._entries = workflow, dict(llms), entries or {}
        self.limits, self.outcomes, self.run_seed = limits, outcomes, run_seed
        self.limit: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self.status = RunnerStatus(last_progress_s=time.monotonic())
        self._sampling, self._stages = SamplingParams(**sampling.model_dump()), stages
        self._told, self.ignored = set[str](), list[str]()
        self.prompts, self.texts = dict(prompts or {}), dict[str, str]()
        self.slots = EpisodeSlots(max_concurrency)
        self.main_llm = choose_llm(workflow, llms, {name for name, each in self._entries.items() if not each.train})
        self._answers_any = workflow.llm is not None or len(llms) < 2

    @classmethod
    def from_config(cls, config: Config, workflow: BoundWorkflow, llms: Mapping[str, ChatModel]) -> Self:
        finetuning = config.finetuning
        return cls(
            workflow,
            llms,
            sampling=finetuning.sampling,
            limits=finetuning.limits,
            outcomes=finetuning.outcomes,
            run_seed=finetuning.seed,
            max_concurrency=config.eval.general.max_concurrency,
            entries=config.llms,
            prompts=config.prompts,
            stages=list_stages(finetuning),
        )

    def note_unused_prompts(self, note: Callable[[str], None]) -> None:
        unused = [name for name in self.prompts if name not in self.texts]
        if unused and self.status.num_finished:
            asked = did_you_mean(unused[0], self.texts) or f"; it asks for {', '.join(self.texts) or 'none'}"
            note(f"warning: the agent never asked for the text {', '.join(unused)} of prompts{asked}")

    async def run(
        self,
        episodes: Sequence[tuple[EpisodeKey, EvalInputItem]],
        score: Score,
        done: Callable[[EpisodeRecord], None],
        complete: Score = score_alone,
    ) -> list[EpisodeRecord]:
        """Runs and scores episodes and returns them in the given order.

        Args:
            score: Sets the record's scores and reward; may change the outcome to `judge_error` or `reward_error`.
            done: Called once for each finished episode, in the order they finish.
            complete: Completes the scores of an episode, missing ones too, once it no longer counts as in flight: it
                may wait for other episodes of this call.
        """
        batch = EpisodeBatch(self, episodes, score, done, complete)
        async with self.limit():
            return await batch.run()

    def derive_environment_seed(self, key: EpisodeKey) -> int:
        """Returns the environment seed of an episode: equal for siblings, and for both models of a comparison."""
        # validations and the verdict compare models and epochs in pairs, so they use the same seeds every time
        epoch = key.epoch if key.phase == "collect" else 0
        phase = "collect" if key.phase == "collect" else "evaluate"
        sibling = key.generation if phase == "evaluate" or not self.workflow.share_environment_seed else 0
        return stable_seed(self.run_seed, "world", phase, epoch, key.round, key.example_id, sibling)

    def choose_sampling(self, key: EpisodeKey) -> SamplingParams:
        stage = choose_stage(self._stages, key.epoch) if key.phase == "collect" else None
        own = stage.settings.sampling if stage is not None else None
        return self._sampling if own is None else SamplingParams(**own.model_dump())

    def create_handle(self, name: str, capture: Capture, blocks: asyncio.AbstractEventLoop | None) -> AsyncLLM:
        """Returns the handle of an entry of `llms`; a blocking one if it gets the loop that its calls run in."""
        if name not in self.llms:
            raise KeyError(f'llms has no entry "{name}"; it has {", ".join(self.llms)}')
        if blocks is None:
            return AsyncLLM(name, self.llms[name], capture, capture.sampling or self._sampling)
        return BlockingLLM(name, self.llms[name], capture, capture.sampling or self._sampling, blocks)

    def open_endpoint(self, capture: Capture, loop: asyncio.AbstractEventLoop) -> EpisodeEndpoint:
        from reinforge.rollout.http.endpoint import EpisodeEndpoint  # most agents need none

        return EpisodeEndpoint(
            lambda name: self.create_handle(name, capture, None),
            self.main_llm,
            {name: llm.model_name for name, llm in self.llms.items()},
            capture,
            loop=loop,
            routes=self.build_routes(),
        )

    def build_routes(self) -> LLMRoutes:
        """Returns which entry of `llms` answers which request of an HTTP client."""
        from reinforge.rollout.http.routes import LLMRoutes

        matches = {entry: each.match for entry, each in self._entries.items() if each.match}
        embedders = [entry for entry, llm in self.llms.items() if hasattr(llm, "embed")]
        return LLMRoutes(matches=matches, embedders=embedders, answers_any=self._answers_any)


class EpisodeBatch:
    def __init__(
        self,
        runner: EpisodeRunner,
        episodes: Sequence[tuple[EpisodeKey, EvalInputItem]],
        score: Score,
        done: Callable[[EpisodeRecord], None],
        complete: Score,
    ):
        self.runner, self._episodes, self._score, self._done, self._complete = runner, episodes, score, done, complete
        self.time_limit, self.loop = TimeLimit(runner.limits.episode_timeout_s), asyncio.get_running_loop()
        self._tasks = asyncio.TaskGroup()
        self._records: dict[int, EpisodeRecord] = {}
        self._has_ended = asyncio.Event()
        self._num_running, self._is_cancelled, self._is_ending = 0, False, False

    async def run(self) -> list[EpisodeRecord]:
        try:
            await self._run_all()
            return [self._records[place] for place in range(len(self._episodes))]
        finally:
            try:
                await self.time_limit.wait_for_cancelled()
            finally:
                while self._num_running:  # of episodes that were cancelled
                    self._release()
                self._records.clear()  # a task that an agent leaves running keeps the batch
                del self._complete

    async def _run_all(self) -> None:
        async with self._tasks:
            try:
                for place, (key, item) in enumerate(self._episodes):
                    await self.runner.slots.acquire(key)  # an episode that waits for its turn is not even a task
                    self._count_running(1)
                    self.begin(Attempt(self, place, key, item))
                if self._episodes:
                    await self._has_ended.wait()
                if self._is_cancelled:
                    raise asyncio.CancelledError("an episode was cancelled while it was scored or recorded")
            finally:
                self._is_ending = True
                self.time_limit.cancel()

    def begin(self, attempt: Attempt) -> None:
        if self._is_ending:
            return  # nothing would end it
        workflow = self.runner.workflow
        if workflow.is_async and not workflow.is_isolated:
            attempt.start()
        else:
            self._create_task(self._run_elsewhere(attempt))

    def end(self, attempt: Attempt) -> None:
        work = self._finish(attempt, attempt)
        try:
            self._create_task(work)
        except RuntimeError:  # another episode has failed the whole batch
            work.close()

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work).add_done_callback(self._check_end)

    def _check_end(self, task: asyncio.Task[None]) -> None:
        """Ends the wait with the last episode, or if one was cancelled, which the group itself does not tell."""
        self._is_cancelled = self._is_cancelled or task.cancelled()
        if self._is_cancelled or len(self._records) == len(self._episodes):
            self._has_ended.set()

    def _count_running(self, change: int) -> None:
        self._num_running += change
        self.runner.status.num_running += change

    def _release(self) -> None:
        self._count_running(-1)
        self.runner.slots.release()

    async def _run_elsewhere(self, attempt: Attempt) -> None:
        """Runs an attempt in a thread or a worker: again, with the same seeds, if the worker that it shares dies."""
        ended = Settled[Any]()
        while True:
            try:
                ended.result = await attempt.run_elsewhere()
            except SharedWorkerEnded as end:  # no attempt of this episode: another one may be to blame
                attempt.begin_again(end)
                continue
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                ended.error = error
            except (Exception, SystemExit) as error:  # noqa: BLE001  a user's agent may raise anything
                ended.error = error
            return await self._finish(attempt, ended)

    def _may_retry(self, attempt: Attempt) -> bool:
        return attempt.number < self.runner.outcomes.retries

    async def _finish(self, attempt: Attempt, ended: Settled[Any]) -> None:
        """Scores an episode that has ended, or tries it again if the environment failed."""
        record = attempt.build_record(ended)
        if record.outcome.is_missing and self._may_retry(attempt):
            self.begin(attempt.build_next())
            return
        try:
            if not record.outcome.is_missing:
                await self._score(record)  # retries a failed judge itself, without running the episode again
        finally:
            self._release()
        await self._complete(record)
        self.runner.status.num_finished += 1
        self.runner.status.last_progress_s = time.monotonic()
        try:
            self._done(record)
        except RecordError as error:
            fail_unrecordable(record, str(error))
            self._done(record)
        self._records[attempt.place] = record


class Attempt(ContainedTask[Any]):
    """One attempt of an episode: the task of an async agent, or what an agent elsewhere is given.

    Args:
        num_ends: How many shared workers have died with this episode in them.
    """

    __slots__ = ("batch", "capture", "item", "key", "num_ends", "number", "place", "seed", "started_s")

    def __init__(
        self, batch: EpisodeBatch, place: int, key: EpisodeKey, item: EvalInputItem, number: int = 0, num_ends: int = 0
    ):
        super().__init__(batch.time_limit)
        self.batch, self.place, self.key, self.item = batch, place, key, item
        self.number, self.num_ends = number, num_ends
        self.seed = batch.runner.derive_environment_seed(key)
        self._reset()

    def _reset(self) -> None:
        runner = self.batch.runner
        self.capture = Capture(
            stable_seed(runner.run_seed, "draws", str(self.key), self.number),
            sampling=runner.choose_sampling(self.key),
            omits_content=runner.outcomes.unsupported_content == "omit",
            told=runner._told,
            ignored=runner.ignored,
            prompts=runner.prompts,
            texts=runner.texts,
        )
        self.started_s = time.monotonic()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attempt:
        """Returns the attempt itself: an agent may copy a state that holds its context."""
        return self

    def build_next(self) -> Attempt:
        return Attempt(self.batch, self.place, self.key, self.item, self.number + 1, self.num_ends)

    def begin_again(self, end: SharedWorkerEnded) -> None:
        """Forgets what was recorded, since the worker that the episode shared with others has died."""
        logger.warning("the episode %s runs again, since its worker died: %s", self.key, end)
        self.num_ends += 1
        self._reset()

    def create_handle(self, name: str) -> AsyncLLM:
        runner = self.batch.runner
        return runner.create_handle(name, self.capture, None if runner.workflow.is_async else self.batch.loop)

    def open_endpoint(self) -> EpisodeEndpoint:
        return self.batch.runner.open_endpoint(self.capture, self.batch.loop)

    def _build_context(self) -> EpisodeContext:
        key = self.key
        is_training = key.phase == "collect"
        return EpisodeContext(self.seed, key.example_id, self.capture, self, is_training=is_training, epoch=key.epoch)

    def call(self) -> Awaitable[Any]:
        runner = self.batch.runner
        llm, context = self.create_handle(runner.main_llm), self._build_context()
        output: Awaitable[Any] = enter_agent(runner.workflow, self.item, llm, context)
        return output

    def on_end(self) -> None:
        self.batch.end(self)

    async def run_elsewhere(self) -> Any:
        runner, context = self.batch.runner, self._build_context()
        llm, timeout_s = self.create_handle(runner.main_llm), runner.limits.episode_timeout_s
        workflow = runner.workflow
        if workflow.is_isolated:
            from reinforge.rollout.isolation.isolated_agent import Episode, IsolatedWorkflow

            names = {name: each.model_name for name, each in runner.llms.items()}
            episode = Episode(self.item, llm, names, context, self.capture, runner.build_routes())
            return await cast(IsolatedWorkflow, workflow).run_episode(episode, timeout_s, self.num_ends)
        return await call_agent(workflow, self.item, llm, context, timeout_s)

    def build_record(self, ended: Settled[Any]) -> EpisodeRecord:
        runner, capture = self.batch.runner, self.capture
        record = EpisodeRecord(self.key, self.item, seed=self.seed, attempt=self.number)

        def get_output() -> Any:
            try:
                return ended.get()
            except Abandoned:
                runner.status.num_abandoned += 1
                raise

        if runner.outcomes.refused_calls == "ignore":
            capture.refused_call = None
        within = SCOPE.set(self)  # an output that blocks where it is read can be interrupted as the agent can
        record_ending(record, capture, get_output, runner.workflow, runner.limits.episode_timeout_s)
        capture.closed = True
        record.calls, record.marks, record.overflow = capture.calls, capture.marks, capture.overflow
        record.wall_s = time.monotonic() - self.started_s
        drop_unrecordable(record, lambda name: runner.llms[name].is_policy)
        SCOPE.reset(within)
        return record
