"""What can be attacked: a model in this process, one behind a URL, a function, a workflow of the harness."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import SecretStr

from reinforge.config.loader import build_config
from reinforge.errors import BackendError
from reinforge.evaluation.evaluators.base import text_of
from reinforge.rollout.capture import ChatModel
from reinforge.rollout.openai_client import OpenAIChat
from reinforge.rollout.openai_config import OpenAILLMConfig, endpoint_of
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.trainer.setup.components import Builder
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import Message, ModelReply, ModelRequest

Target = str | Path | ChatModel | Callable[[list[Message]], Any]
"""A folder, hub id or `bundled:NAME`; anything with `sample(request)`; or `function(messages)`, async or plain."""


class FunctionTarget:
    """A function as a model: `function(messages)` returns the text of the answer.

    This is how a whole agent is attacked: the function runs it on the conversation and returns what it says.

    Args:
        function: Async, or plain; a plain one runs in threads, many at a time.
    """

    is_policy = False

    def __init__(self, function: Callable[[list[Message]], Any]):
        self._function = function

    @property
    def model_name(self) -> str:
        """The function's name."""
        return getattr(self._function, "__name__", type(self._function).__name__)

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Returns what the function answers."""
        if inspect.iscoroutinefunction(self._function):
            answer = await self._function(list(request.messages))
        else:
            answer = await asyncio.to_thread(self._function, list(request.messages))
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": str(answer)}
        return ModelReply(message, "stop", None)


class WorkflowTarget:
    """A whole agent of the harness as a model: each answer is one episode, with its retries and its timeout.

    The workflow is asked the last probe as its question and finds the conversation in its row's `messages`.

    Example:
        async def clerk(item, llm, context):
            reply = await llm.chat.completions.create(messages=item.full_dataset_entry["messages"])
            return reply.choices[0].message.content

        ASTProblem(target=WorkflowTarget(clerk, {"model": openai_target("some-model", "http://localhost:8000/v1")}))

    Args:
        workflow: `workflow(item, llm, context)`, async or plain.
        llms: The models that it may call, by name.
        llm: The one that it is given; None: the only one.
        settings: Further settings: those of `finetuning`, such as `{"limits": {"episode_timeout_s": 30}}`.
    """

    is_policy = False

    def __init__(
        self,
        workflow: Callable[..., Any],
        llms: Mapping[str, ChatModel],
        llm: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        self._bound = bind_workflow(workflow, llm)
        self._runner = EpisodeRunner.configured(
            build_config({"finetuning": dict(settings or {})}).config, self._bound, llms
        )

    @property
    def model_name(self) -> str:
        """The workflow's name."""
        return getattr(self._bound.function, "__name__", type(self._bound.function).__name__)

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Returns what the workflow returns; where it fails by its own fault, what it had said by then.

        Raises:
            BackendError: The world failed it, and trying again did not help.
        """
        name = str(request.sampling.seed or 0)
        item = EvalInputItem(
            id=name,
            input_obj=request.messages[-1]["content"],
            expected_output_obj=None,
            full_dataset_entry={"messages": list(request.messages)},
        )
        [record] = await self._runner.run([(EpisodeKey("attack", 0, name), item)], _unscored, _untold)
        if record.outcome.is_missing:
            raise BackendError(f"the workflow {self.model_name} gave no answer ({record.outcome}): {record.reason}")
        return ModelReply({"role": "assistant", "content": text_of(record.item.output_obj)}, "stop", None)


async def _unscored(record: EpisodeRecord) -> None:
    """The reward is the attack's, not the episode's."""


def _untold(record: EpisodeRecord) -> None:
    """Nobody waits for single episodes."""


def openai_target(
    model_name: str, base_url: str | None = None, api_key: str | None = None, **settings: Any
) -> OpenAIChat:
    """Returns a model behind an OpenAI-compatible URL, as a target or as a judge.

    Example: `ASTProblem(target=openai_target("some-model", "http://localhost:8000/v1"))`.

    Args:
        model_name: The model's name at the endpoint.
        base_url: Up to /v1; None: `OPENAI_BASE_URL`, or OpenAI's own.
        api_key: Sent as a bearer token; None: none, or `OPENAI_API_KEY` at OpenAI's own.
        settings: Further settings of `llms.<name>._type: openai`, such as `timeout_s`.
    """
    secret = None if api_key is None else SecretStr(api_key)
    config = OpenAILLMConfig(model_name=model_name, base_url=base_url, api_key=secret, **settings)
    url, key = endpoint_of(config)
    return OpenAIChat(config, url, key)


async def model_folder(named: str | Path) -> str:
    """Returns the folder or hub id of a model; `bundled:NAME` is made on first use.

    Raises:
        ConfigError: There is no bundled model of that name.
    """
    async with Builder(build_config({"finetuning": {"policy": {"model": str(named)}}})) as builder:
        return str(await builder.get_model_path())


def is_local(target: Target) -> bool:
    """Returns True for a model that is loaded into this process."""
    return isinstance(target, str | Path)


def as_chat_model(target: Any) -> ChatModel:
    """Returns a target that is not loaded here as a chat model."""
    return target if hasattr(target, "sample") else FunctionTarget(target)


class Answers(Protocol):
    """Whatever answers a request: a chat model, or the tester's own policy."""

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Draws one reply."""


async def ask_all(model: Answers, requests: Sequence[ModelRequest]) -> list[ModelReply | BaseException]:
    """Returns every reply, all asked for at the same time; what went wrong stands in its place."""
    return list(await asyncio.gather(*(model.sample(request) for request in requests), return_exceptions=True))
