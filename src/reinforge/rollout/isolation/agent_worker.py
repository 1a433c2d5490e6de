"""The agent's side of a worker process: model handles and a context whose work is done by the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from reinforge.config.imports import import_object
from reinforge.errors import CaptureError
from reinforge.rollout.capture import Capture
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.handle.arguments import CallArguments
from reinforge.rollout.handle.chat import send_messages
from reinforge.rollout.handle.completion import ChatCompletion, build_completion, to_plain_data
from reinforge.rollout.handle.interface import AsyncCompletions, BlockingCompletions, ChatNamespace, build_missing
from reinforge.rollout.http.endpoint import EpisodeEndpoint
from reinforge.rollout.http.routes import LLMRoutes
from reinforge.rollout.isolation.worker import JobLink, Perform
from reinforge.rollout.isolation.worker_protocol import Message, load_call, load_item
from reinforge.rollout.workflow import bind_workflow, call_agent, refuse_coroutine
from reinforge.types.steps import StreamEventData, TTCEventData
from reinforge.types.workflow import BoundWorkflow


def load_agent(function: str, project_root: Path) -> tuple[Perform, Message]:
    return serve_agent(bind_workflow(import_object(function, project_root, path="function")))


def serve_agent(workflow: BoundWorkflow) -> tuple[Perform, Message]:
    async def perform(job: Message, link: JobLink) -> Any:
        return await _run_episode(workflow, job, link)

    return perform, {"source": workflow.source}


class RemoteCapture(Capture):
    """Sends marks to the run, and keeps the calls that it has made as far as the agent may see them."""

    def __init__(self, link: JobLink, *, omits_content: bool, prompts: Mapping[str, str]):
        super().__init__(seed=0, omits_content=omits_content, prompts=prompts)
        self.link = link

    def mark(self, data: Any = None, *, step_reward: float | None = None, call_id: str | None = None) -> None:
        if call_id is not None and all(call.call_id != call_id for call in self.calls):
            raise CaptureError(f'mark: this episode has no call with the id "{call_id}"; pass the `id` of a completion')
        mark = {"data": data, "step_reward": step_reward, "call_id": call_id, "functions": self.functions}
        if isinstance(data, StreamEventData):
            kind = TTCEventData if isinstance(data, TTCEventData) else StreamEventData
            mark |= {"data": data.model_dump(mode="json", exclude_unset=True), "kind": kind.__name__}
        self.link.send({**mark, "type": "mark"})

    def text(self, name: str, default: str) -> str:
        if name not in self.texts:
            self.link.send({"type": "text", "name": name, "default": default})
        return super().text(name, default)

    def refuse(self, reason: str) -> None:
        self.link.send({"type": "refused", "reason": reason})

    def ignore(self, names: Sequence[str], client: str) -> None:
        self.link.send({"type": "ignored", "names": names, "client": client})

    async def ask(self, llm: str, messages: Sequence[Any] | None, arguments: CallArguments) -> ChatCompletion:
        self._check_open()
        given = {name: to_plain_data(value) for name, value in arguments.given.items() if name != "timeout"}
        if isinstance(bias := given.get("logit_bias"), dict):
            given["logit_bias"] = {str(token): each for token, each in bias.items()}  # keys of messages are text
        sent = {name: value for name, value in given.items() if name not in arguments.extra}
        if arguments.extra:
            sent["extra_body"] = {name: given[name] for name in arguments.extra if name in given}
        if messages is not None:
            sent["messages"] = send_messages(messages)
        message = {"type": "call", "llm": llm, "functions": self.functions, "arguments": sent}
        reply = await self.link.request(message)
        call = load_call(reply["call"], sent.get("messages", ()))
        self.calls.append(call)
        return build_completion(call)


class RemoteLLM:
    """The model handle of an agent in a worker, with the interface of `AsyncLLM` and `BlockingLLM`."""

    def __init__(self, name: str, model_name: str, capture: RemoteCapture, *, is_async: bool):
        self.name, self.model_name, self._capture = name, model_name, capture
        self.chat = ChatNamespace(AsyncCompletions(self) if is_async else BlockingCompletions(self, capture.link.loop))

    def __getattr__(self, name: str) -> NoReturn:
        raise build_missing(self, "the model handle", name, ("chat.completions", "model_name"))

    async def complete(self, messages: Sequence[Any] | None, arguments: CallArguments) -> ChatCompletion:
        return await self._capture.ask(self.name, messages, arguments)

    async def answer_beside(self, kind: str, given: Mapping[str, Any]) -> Any:
        message = {"type": "beside", "llm": self.name, "kind": kind, "given": given}
        return (await self._capture.link.request(message))["answer"]

    def blame_reply(self, reason: str) -> None:
        self._capture.link.send({"type": "blame", "llm": self.name, "reason": reason})


class RemoteModels:
    def __init__(self, job: Message, link: JobLink, *, is_async: bool):
        self.capture = RemoteCapture(link, omits_content=job["omits_content"], prompts=job["prompts"])
        self._names, self._default, self._routes = job["llms"], job["llm"], LLMRoutes(**job["routes"])
        self._is_async = is_async

    def create_handle(self, name: str, is_async: bool | None = None) -> RemoteLLM:
        if name not in self._names:
            raise KeyError(f'llms has no entry "{name}"; it has {", ".join(self._names)}')
        is_async = self._is_async if is_async is None else is_async
        return RemoteLLM(name, self._names[name], self.capture, is_async=is_async)

    def open_endpoint(self) -> EpisodeEndpoint:
        find, capture = partial(self.create_handle, is_async=True), self.capture
        return EpisodeEndpoint(find, self._default, self._names, capture, loop=capture.link.loop, routes=self._routes)


async def _run_episode(workflow: BoundWorkflow, job: Message, link: JobLink) -> Any:
    models = RemoteModels(job, link, is_async=workflow.is_async)
    is_training, capture = bool(job["is_training"]), models.capture
    context = EpisodeContext(
        job["seed"], job["example_id"], capture, models, is_training=is_training, epoch=job["epoch"]
    )
    try:
        llm = models.create_handle(job["llm"])
        output = await call_agent(workflow, load_item(job["item"]), llm, context, job["timeout_s"])
        return refuse_coroutine(output, workflow)
    finally:
        capture.closed = True
