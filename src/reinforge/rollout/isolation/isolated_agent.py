"""The run's side of an agent in a worker process: its model calls and marks are recorded like any other agent's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.isolation.worker_pool import Worker, WorkerEnded, WorkerPool, refuse_other_functions
from reinforge.rollout.isolation.worker_protocol import Message, dump_call, dump_error, dump_item, load_error
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.steps import StreamEventData, TTCEventData
from reinforge.types.workflow import BoundWorkflow

LOADER = "reinforge.rollout.isolation.agent_worker:load_agent"
MARKS = {each.__name__: each for each in (StreamEventData, TTCEventData)}


@dataclass(frozen=True)
class Episode:
    """What an agent is given.

    Attributes:
        item: The example.
        llm: The handle of the model that the agent gets.
        names: The model's name of each entry of `llms`.
        context: The agent's view of the episode.
        capture: Records its calls and marks.
    """

    item: EvalInputItem
    llm: AsyncLLM
    names: dict[str, str]
    context: EpisodeContext
    capture: Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedWorkflow(BoundWorkflow):
    """A workflow whose episodes run in worker processes.

    Attributes:
        pool: The processes.
    """

    pool: WorkerPool

    @property
    def source(self) -> str:
        """The agent's function with its file and line, as its process reports it."""
        return str(self.pool.description.get("source", self.pool.function))


@asynccontextmanager
async def open_isolated(
    function: object, project_root: Path, llm: str | None, *, share_environment_seed: bool
) -> AsyncIterator[IsolatedWorkflow]:
    """Yields a workflow in worker processes, and kills them at the end.

    Raises:
        ConfigError: The function is not `module:name`, cannot be imported, or takes other parameters.
    """
    pool = WorkerPool(refuse_other_functions(function), project_root, LOADER)
    try:
        await pool.start()
        yield IsolatedWorkflow(_refuse_direct_call, llm, True, share_environment_seed, pool=pool)
    finally:
        await pool.close()


async def _refuse_direct_call(item: Any, llm: Any, context: Any) -> None:
    raise NotImplementedError("an agent with `isolation: process` is called by the run's episodes only")


async def run_in_worker(worker: Worker, episode: Episode) -> Any:
    """Runs one episode and returns the agent's output.

    Raises:
        WorkerEnded: The process ended before the agent did.
        Exception: Whatever the agent raised.
    """
    context, calls = episode.context, set[asyncio.Task[None]]()
    await worker.send(
        {
            "type": "job",
            "item": dump_item(episode.item),
            "seed": context.seed,
            "example_id": context.example_id,
            "is_training": context.is_training,
            "llm": episode.llm.name,
            "llms": episode.names,
        }
    )
    try:
        while True:
            message = await worker.receive()
            if message["type"] == "call":
                calls.add(asyncio.create_task(_answer(worker, episode, message)))
            elif message["type"] == "mark":
                _mark(episode, message)
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
    worker.is_idle = True
    if message["type"] == "failed":
        raise load_error(message["error"])
    return message["result"]


async def _answer(worker: Worker, episode: Episode, message: Message) -> None:
    """Makes a model call of the agent and sends back the reply, or the error that the agent then sees."""
    try:
        llm = episode.context.llm(message["llm"])
        episode.capture.functions = tuple(message["functions"])  # read before the first await
        completion = await llm.chat.completions.create(**message["arguments"])
        call = next(each for each in episode.capture.calls if each.call_id == completion.id)
        reply: Message = {"call": dump_call(call)}
    except Exception as error:  # noqa: BLE001  the agent decides
        reply = {"error": dump_error(error)}
    await worker.send({**reply, "type": "reply", "id": message["id"]})


def _mark(episode: Episode, message: Message) -> None:
    data, capture = message["data"], episode.capture
    if "kind" in message:
        data = MARKS[message["kind"]].model_validate(data)
    capture.functions = tuple(message["functions"])
    capture.mark(data, step_reward=message["step_reward"], call_id=message["call_id"])
