"""The agent's side of a worker process: model handles and a context whose work is done by the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from reinforge.config.imports import import_object
from reinforge.errors import CaptureError
from reinforge.rollout.capture import Capture, EpisodeContext
from reinforge.rollout.chat import normalize_message
from reinforge.rollout.completion import ChatCompletion, build_completion
from reinforge.rollout.containment import run_contained
from reinforge.rollout.threads import run_in_daemon_thread
from reinforge.rollout.worker import Link, Perform
from reinforge.rollout.worker_protocol import Message, load_call, load_item
from reinforge.rollout.workflow import bind_workflow, refuse_coroutine
from reinforge.types.steps import StreamEventData, TTCEventData
from reinforge.types.workflow import BoundWorkflow


def load_agent(function: str, project_root: Path) -> tuple[Perform, Message]:
    """Returns how to run an episode with the agent `module:name`, and what it is.

    Raises:
        ConfigError: It cannot be imported, or takes other parameters.
    """
    workflow = bind_workflow(import_object(function, project_root, path="function"))

    async def perform(job: Message, link: Link) -> Any:
        return await _run_episode(workflow, job, link)

    return perform, {"source": workflow.source}


class RemoteCapture(Capture):
    """Sends marks to the run, and remembers which calls they may refer to."""

    def __init__(self, link: Link):
        super().__init__(seed=0)
        self.link = link
        self.call_ids: set[str] = set()

    def mark(self, data: Any = None, *, step_reward: float | None = None, call_id: str | None = None) -> None:
        """Marks the latest turn, or the turn of the call with this id.

        Raises:
            CaptureError: No call of this episode has that id.
        """
        if call_id is not None and call_id not in self.call_ids:
            raise CaptureError(f'mark: this episode has no call with the id "{call_id}"; pass the `id` of a completion')
        mark = {"data": data, "step_reward": step_reward, "call_id": call_id, "functions": self.functions}
        if isinstance(data, StreamEventData):
            kind = TTCEventData if isinstance(data, TTCEventData) else StreamEventData
            mark |= {"data": data.model_dump(mode="json", exclude_unset=True), "kind": kind.__name__}
        self.link.send({**mark, "type": "mark"})

    async def ask(self, llm: str, messages: Sequence[Any], arguments: dict[str, Any]) -> ChatCompletion:
        """Makes a model call in the run.

        Raises:
            CaptureError: The episode has ended.
        """
        self._check_open()
        arguments = {**arguments, "messages": [normalize_message(message) for message in messages]}
        message = {"type": "call", "llm": llm, "functions": self.functions, "arguments": arguments}
        reply = await self.link.request(message)
        completion = build_completion(load_call(reply["call"]))
        self.call_ids.add(completion.id)
        return completion


class RemoteLLM:
    """The model handle of an agent in a worker, with the interface of `AsyncLLM` and `BlockingLLM`."""

    def __init__(self, name: str, model_name: str, capture: RemoteCapture, *, is_async: bool):
        self.name, self.model_name, self._capture = name, model_name, capture
        create = self._create if is_async else self._create_blocking
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=create))

    async def _create(self, *, messages: Sequence[Any], **arguments: Any) -> ChatCompletion:
        return await self._capture.ask(self.name, messages, arguments)

    def _create_blocking(self, *, messages: Sequence[Any], **arguments: Any) -> ChatCompletion:
        work = self._create(messages=messages, **arguments)
        return asyncio.run_coroutine_threadsafe(work, self._capture.link.loop).result()


async def _run_episode(workflow: BoundWorkflow, job: Message, link: Link) -> Any:
    capture, names = RemoteCapture(link), job["llms"]

    def create_handle(name: str) -> Any:
        if name not in names:
            raise KeyError(f'llms has no entry "{name}"; it has {", ".join(names)}')
        return RemoteLLM(name, names[name], capture, is_async=workflow.is_async)

    context = EpisodeContext(
        job["seed"], job["example_id"], capture, create_handle, is_training=bool(job["is_training"])
    )
    arguments = (load_item(job["item"]), create_handle(job["llm"]), context)
    try:
        if workflow.is_async:
            output = await run_contained(lambda: workflow.function(*arguments))
        else:
            output = await run_in_daemon_thread(lambda: workflow.function(*arguments), "episode")
        return refuse_coroutine(output, workflow)
    finally:
        capture.closed = True
