"""The run's side of an agent in a worker: its model calls and marks are recorded like any other agent's.

An `IsolatedWorkflow` gives every episode its own process, which is killed when the episode takes too long. A
`PlacedWorkflow` runs many episodes in each of a few workers; if one dies, the episodes in it run again, with the same
seeds, and one that has been in two workers that died runs in its own worker from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from reinforge.errors import Problem
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.http.routes import LLMRoutes
from reinforge.rollout.isolation.containment import GRACE_S, SharedWorkerEnded, WorkerEnded
from reinforge.rollout.isolation.worker_pool import (
    WorkerJob,
    WorkerPool,
    refuse_other_functions,
)
from reinforge.rollout.isolation.worker_protocol import Message, dump_call, dump_error, dump_item, load_error
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.steps import StreamEventData, TTCEventData
from reinforge.types.workflow import BoundWorkflow

LOADER = "reinforge.rollout.isolation.agent_worker:load_agent"
REPLY_S = 2.0
"""Seconds after the end of an episode's time in which its worker must say so; one that is blocked does not."""
MAX_SHARED_ENDS = 2  # in how many shared workers that die an episode may be before it gets its own

MARKS = {each.__name__: each for each in (StreamEventData, TTCEventData)}


@dataclass(frozen=True)
class Episode:
    item: EvalInputItem
    llm: AsyncLLM
    names: dict[str, str]
    context: EpisodeContext
    capture: Capture
    routes: LLMRoutes


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedWorkflow(BoundWorkflow):
    is_isolated: ClassVar[bool] = True
    pool: WorkerPool

    @property
    def source(self) -> str:
        """The agent's function with its file and line, as its process reports it."""
        return str(self.pool.description.get("source", self.pool.name))

    async def run_episode(self, episode: Episode, timeout_s: float, num_ends: int = 0) -> Any:
        # a new process imports the agent first, which is not the episode's time
        async with self.pool.lease() as job, asyncio.timeout(timeout_s):
            return await run_in_worker(job, episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWorkflow(IsolatedWorkflow):
    """A workflow whose episodes share a few workers."""

    workflow: BoundWorkflow

    @classmethod
    def share(cls, workflow: BoundWorkflow, pool: WorkerPool) -> Self:
        # its calls come to this process as messages, so the handles here are async whatever the agent is
        seeds = workflow.share_environment_seed
        return cls(workflow.function, workflow.llm, True, seeds, pool=pool, workflow=workflow)

    @property
    def source(self) -> str:
        return self.workflow.source

    def example_problems(self, items: Sequence[EvalInputItem]) -> list[Problem]:
        return self.workflow.example_problems(items)

    async def run_episode(self, episode: Episode, timeout_s: float, num_ends: int = 0) -> Any:
        """Runs one episode in a shared worker, or in one of its own if too many have died with it in them."""
        if num_ends >= MAX_SHARED_ENDS:
            async with self.pool.lease(keep=False) as job, asyncio.timeout(timeout_s):
                return await run_in_worker(job, episode)
        async with self.pool.share() as job:
            try:
                async with asyncio.timeout(timeout_s + GRACE_S + REPLY_S) as limit:
                    return await run_in_worker(job, episode, timeout_s)
            except WorkerEnded as end:
                raise SharedWorkerEnded(str(end)) from None
            except TimeoutError:
                if not limit.expired():  # the worker itself has ended the episode
                    raise
                reason = f"the process did not respond for {timeout_s + GRACE_S + REPLY_S:g} s, so it was killed"
                self.pool.end_worker(job.worker, reason)
                raise SharedWorkerEnded(reason) from None


@asynccontextmanager
async def open_isolated(
    function: object, project_root: Path, llm: str | None, *, share_environment_seed: bool
) -> AsyncIterator[IsolatedWorkflow]:
    pool = WorkerPool(refuse_other_functions(function), project_root, LOADER)
    try:
        await pool.start()
        yield IsolatedWorkflow(_refuse_direct_call, llm, True, share_environment_seed, pool=pool)
    finally:
        await pool.close()


async def _refuse_direct_call(item: Any, llm: Any, context: Any) -> None:
    raise NotImplementedError("an agent with `isolation: process` is called by the run's episodes only")


async def run_in_worker(job: WorkerJob, episode: Episode, timeout_s: float | None = None) -> Any:
    context, calls = episode.context, set[asyncio.Task[None]]()
    await job.send(
        {
            "type": "job",
            "item": dump_item(episode.item),
            "seed": context.seed,
            "example_id": context.example_id,
            "is_training": context.is_training,
            "epoch": context.epoch,
            "llm": episode.llm.name,
            "llms": episode.names,
            "timeout_s": timeout_s,
            "omits_content": episode.capture.omits_content,
            "prompts": dict(episode.capture.prompts),
            "routes": episode.routes.model_dump(exclude_none=True),
        }
    )
    try:
        while True:
            message = await job.receive()
            if message["type"] in ("call", "beside"):
                call = asyncio.create_task(_answer(job, episode, message))
                calls.add(call)
                call.add_done_callback(calls.discard)
            elif message["type"] == "mark":
                _mark(episode, message)
            elif message["type"] == "text":
                episode.capture.text(str(message["name"]), str(message["default"]))
            elif message["type"] == "refused":
                episode.capture.refuse(str(message["reason"]))
            elif message["type"] == "ignored":
                episode.capture.ignore(list(map(str, message["names"])), str(message["client"]))
            elif message["type"] == "blame":
                episode.context.llm(message["llm"]).blame_reply(str(message["reason"]))
            elif message["type"] in ("done", "failed"):
                break
            else:
                raise WorkerEnded(f"the process sent a message of the unknown type {message['type']!r}")
    except (KeyError, TypeError) as error:
        raise WorkerEnded(f"the process sent a message that is incomplete: {error!r}") from None
    finally:
        for call in calls:
            call.cancel()
    job.is_done = True
    if message["type"] == "failed":
        raise load_error(message["error"])
    return message["result"]


async def _answer(job: WorkerJob, episode: Episode, message: Message) -> None:
    """Makes a model call of the agent and sends back the reply, or the error that the agent then sees."""
    try:
        llm, reply = episode.context.llm(message["llm"]), Message()
        if message["type"] == "beside":
            reply["answer"] = await llm.answer_beside(message["kind"], message["given"])
        else:
            episode.capture.functions = tuple(message["functions"])  # read before the first await
            completion = await llm.chat.completions.create(**message["arguments"])
            reply["call"] = dump_call(next(each for each in episode.capture.calls if each.call_id == completion.id))
    except Exception as error:  # noqa: BLE001  the agent decides
        reply = {"error": dump_error(error)}
    await job.send({**reply, "type": "reply", "id": message["id"]})


def _mark(episode: Episode, message: Message) -> None:
    data, capture = message["data"], episode.capture
    if "kind" in message:
        data = MARKS[message["kind"]].model_validate(data)
    capture.functions = tuple(message["functions"])
    capture.mark(data, step_reward=message["step_reward"], call_id=message["call_id"])
