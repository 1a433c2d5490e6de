"""Runs episodes: one concurrency limit for all, typed outcomes, retries of the world's failures, no contagion."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from reinforge.config.schema import Config, LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.errors import BackendError, ConfigError, EngineError, describe_error
from reinforge.interfaces import ContextOverflow
from reinforge.rollout.capture import AsyncLLM, BlockingLLM, Capture, ChatModel, EpisodeContext
from reinforge.rollout.threads import in_daemon_thread
from reinforge.rollout.workflow import BoundWorkflow, PolicyFailure
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import SamplingParams
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import Outcome

Score = Callable[[EpisodeRecord], Awaitable[None]]


@dataclass(slots=True)
class RunnerStatus:
    """What the runner is doing, for the watchdog and the closing lines.

    Attributes:
        num_running: Episodes in flight.
        num_finished: Episodes that have ended.
        num_abandoned: Threads of plain workflows that hung past their timeout and were left behind.
        last_progress_s: `time.monotonic()` of the last episode that ended.
    """

    num_running: int = 0
    num_finished: int = 0
    num_abandoned: int = 0
    last_progress_s: float = 0.0


class EpisodeRunner:
    """Runs a workflow on examples.

    Args:
        workflow: The agent.
        llms: Models by entry of `llms`.
        sampling: How replies of trained policies are drawn.
        limits: The episode's timeout.
        outcomes: How often the world's failures are tried again.
        run_seed: Everything random derives from it.
        max_concurrency: Episodes in flight, over all calls of `run`.
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
        self.status = RunnerStatus(last_progress_s=time.monotonic())
        self._sampling = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        self._slots = asyncio.Semaphore(max_concurrency)
        self._main_llm = self._choose_llm()

    @classmethod
    def configured(cls, config: Config, workflow: BoundWorkflow, llms: Mapping[str, ChatModel]) -> Self:
        """Returns the runner that a configuration asks for."""
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

    def _choose_llm(self) -> str:
        name = self.workflow.llm
        if name is None:
            if len(self.llms) != 1:
                raise ConfigError(
                    f"workflow.llm: {len(self.llms)} entries under llms ({', '.join(self.llms) or 'none'}); "
                    "say which one the workflow is given"
                )
            return next(iter(self.llms))
        if name not in self.llms:
            raise ConfigError(f'workflow.llm: "{name}" is not under llms; there: {", ".join(self.llms) or "none"}')
        return name

    async def run(
        self, episodes: Sequence[tuple[EpisodeKey, EvalInputItem]], score: Score, done: Callable[[EpisodeRecord], None]
    ) -> list[EpisodeRecord]:
        """Runs episodes to their end, scored, in the order given.

        Args:
            episodes: Which episode on which example.
            score: Fills the record's scores and reward; may change the outcome to `judge_error`.
            done: Called once for each finished episode, in the order they finish.
        """

        async def one(key: EpisodeKey, item: EvalInputItem) -> EpisodeRecord:
            async with self._slots:
                self.status.num_running += 1
                try:
                    record = await self._with_retries(key, item, score)
                finally:
                    self.status.num_running -= 1
            self.status.num_finished += 1
            self.status.last_progress_s = time.monotonic()
            done(record)
            return record

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(key, item)) for key, item in episodes]
        return [task.result() for task in tasks]

    async def _with_retries(self, key: EpisodeKey, item: EvalInputItem, score: Score) -> EpisodeRecord:
        for attempt in range(self.outcomes.retries + 1):
            record = await self._attempt(key, item, attempt)
            if not record.outcome.is_missing:
                await score(record)  # which tries a failed judge again by itself: the episode is not to blame
                break
        return record

    def world_seed(self, key: EpisodeKey) -> int:
        """Returns the seed of an episode's world: equal for siblings and for both arms of a comparison."""
        # what is compared pairwise (validation and confirmation) meets the same luck in every arm and epoch
        epoch = key.epoch if key.phase == "collect" else 0
        phase = "collect" if key.phase == "collect" else "evaluate"
        sibling = key.generation if phase == "evaluate" or not self.workflow.shares_world else 0
        return stable_seed(self.run_seed, "world", phase, epoch, key.round, key.example_id, sibling)

    async def _attempt(self, key: EpisodeKey, item: EvalInputItem, attempt: int) -> EpisodeRecord:
        capture = Capture(seed=stable_seed(self.run_seed, "draws", str(key), attempt))
        record = EpisodeRecord(key, item, seed=self.world_seed(key), attempt=attempt)
        started = time.monotonic()
        try:
            output = await self._call(record, capture)
            capture.returned(output)
            record.item = item.copy_with_updates(output_obj=output)
        except TimeoutError:
            record.outcome, record.reason = self._timed_out(capture)
        except PolicyFailure as failure:
            capture.returned(failure.output)
            cut = bool(capture.calls) and capture.calls[-1].reply.finish_reason == "length"
            record.outcome = Outcome.OVERLONG if cut else Outcome.POLICY_ERROR
            record.reason = str(failure)
            record.item = item.copy_with_updates(output_obj=failure.output)
        except ContextOverflow as overflow:
            record.outcome, record.reason = Outcome.CONTEXT_OVERFLOW, str(overflow)
        except (BackendError, EngineError, ConnectionError) as error:
            record.outcome, record.reason = Outcome.BACKEND_ERROR, f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            record.outcome, record.reason = Outcome.CANCELLED, "the agent cancelled itself"
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the user's agent raises is one episode's data, never the run's end
            if capture.overflow:
                record.outcome = Outcome.CONTEXT_OVERFLOW
            else:
                record.outcome = Outcome.TOOL_ERROR
            record.reason = describe_error(error)
        capture.closed = True
        record.calls, record.marks = capture.calls, capture.marks
        record.wall_s = time.monotonic() - started
        return record

    def _timed_out(self, capture: Capture) -> tuple[Outcome, str]:
        """Blames the policy only if replies that it did finish took most of the time."""
        limit = self.limits.episode_timeout_s
        talked = sum(call.ended_s - call.started_s for call in capture.calls)
        if talked > limit / 2:
            return Outcome.POLICY_TIMEOUT, f"talked for {talked:.1f} s of {limit:g} s in {len(capture.calls)} replies"
        waiting = f", {capture.pending} model call(s) unanswered" if capture.pending else ""
        return Outcome.TIMEOUT, f"not finished after {limit:g} s ({len(capture.calls)} replies{waiting})"

    async def _call(self, record: EpisodeRecord, capture: Capture) -> object:
        loop = asyncio.get_running_loop()
        sampling = self._sampling

        def handle(name: str) -> AsyncLLM:
            if name not in self.llms:
                raise KeyError(f'no entry "{name}" under llms; there: {", ".join(self.llms)}')
            if self.workflow.is_async:
                return AsyncLLM(name, self.llms[name], capture, sampling)
            return BlockingLLM(name, self.llms[name], capture, sampling, loop)

        context = EpisodeContext(
            record.seed, record.key.example_id, capture, handle, is_training=record.key.phase == "collect"
        )
        arguments = (record.item, handle(self._main_llm), context)
        if self.workflow.is_async:
            async with asyncio.timeout(self.limits.episode_timeout_s):
                return await self.workflow.function(*arguments)
        finished = False

        def work() -> object:
            nonlocal finished
            try:
                return self.workflow.function(*arguments)
            finally:
                finished = True

        try:
            async with asyncio.timeout(self.limits.episode_timeout_s):
                return await in_daemon_thread(work, f"episode-{record.key}")
        except TimeoutError:
            self.status.num_abandoned += not finished
            raise
