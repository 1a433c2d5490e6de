"""Targets: a model loaded in this process, a model behind a URL, a function, or a workflow."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from reinforge.config.loader import build_config
from reinforge.errors import BackendError
from reinforge.evaluation.evaluators.base import to_text
from reinforge.interfaces import ChatModel
from reinforge.rollout.models.endpoint_config import resolve_endpoint
from reinforge.rollout.models.openai_client import OpenAIChat, OpenAILLMConfig
from reinforge.rollout.runner import EpisodeRunner, score_alone
from reinforge.rollout.workflow import bind_workflow
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.episode import EpisodeKey
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import Message, ModelReply, ModelRequest

Target = str | Path | ChatModel | Callable[[list[Message]], Any]
"""A folder, hub id or `bundled:NAME`; an object with `sample(request)`; or `function(messages)`, async or not."""


class FunctionTarget:
    """A function as a chat model: `function(messages)` returns the response; unless it is async it runs in threads."""

    is_policy = False

    def __init__(self, function: Callable[[list[Message]], Any]):
        self._function, self.model_name = function, getattr(function, "__name__", type(function).__name__)

    async def sample(self, request: ModelRequest) -> ModelReply:
        if inspect.iscoroutinefunction(self._function):
            answer = await self._function(list(request.messages))
        else:
            answer = await asyncio.to_thread(self._function, list(request.messages))
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": str(answer)}
        return ModelReply(message, "stop", None)


class WorkflowTarget:
    """A workflow as a chat model: each response is one episode, with its retries and timeout.

    The workflow gets the last probe as its question and the conversation as `messages` in its row.

    Example:
        async def clerk(item, llm, context):
            reply = await llm.chat.completions.create(messages=item.full_dataset_entry["messages"])
            return reply.choices[0].message.content

        ASTProblem(target=WorkflowTarget(clerk, {"model": openai_target("some-model", "http://localhost:8000/v1")}))

    Args:
        workflow: `workflow(item, llm, context)`, async or not.
        llms: The models that it may call, by name.
        llm: The name of the model that is passed as `llm`; None: the only one.
        settings: Settings of `finetuning`, such as `{"limits": {"episode_timeout_s": 30}}`.
    """

    is_policy = False

    def __init__(
        self,
        workflow: Callable[..., Any],
        llms: Mapping[str, ChatModel],
        llm: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        bound = bind_workflow(workflow, llm)
        self.model_name: str = getattr(bound.function, "__name__", type(bound.function).__name__)
        config = build_config({"finetuning": dict(settings or {})}).config
        self._runner = EpisodeRunner.from_config(config, bound, llms)

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Returns the workflow's output, which may be that of an episode in which the model itself failed."""
        name = str(request.sampling.seed or 0)
        item = EvalInputItem(
            id=name,
            input_obj=request.messages[-1]["content"],
            expected_output_obj=None,
            full_dataset_entry={"messages": list(request.messages)},
        )
        [record] = await self._runner.run([(EpisodeKey("attack", 0, name), item)], score_alone, lambda record: None)
        if record.outcome.is_missing:
            raise BackendError(f"the workflow {self.model_name} returned no answer ({record.outcome}): {record.reason}")
        return ModelReply({"role": "assistant", "content": to_text(record.item.output_obj)}, "stop", None)


def openai_target(
    model_name: str, base_url: str | None = None, api_key: str | None = None, **settings: Any
) -> OpenAIChat:
    """Returns a model behind an OpenAI-compatible URL, as a target or as a judge.

    Example: `ASTProblem(target=openai_target("some-model", "http://localhost:8000/v1"))`.

    Args:
        base_url: URL up to /v1; None: `OPENAI_BASE_URL`, or OpenAI's own endpoint.
        api_key: Sent as a bearer token. None: with a `base_url`, no key is sent; without one, `OPENAI_API_KEY` is.
        settings: Other settings of `llms.<name>._type: openai`, such as `timeout_s`.
    """
    secret = None if api_key is None else SecretStr(api_key)
    config = OpenAILLMConfig(model_name=model_name, base_url=base_url, api_key=secret, **settings)
    url, key = resolve_endpoint(config)
    return OpenAIChat(config, url, key)


async def resolve_model_folder(named: str | Path) -> str:
    async with ComponentBuilder(build_config({"finetuning": {"policy": {"model": str(named)}}})) as builder:
        return str(await builder.get_model_path())


async def sample_all(model: Any, requests: Sequence[ModelRequest]) -> list[ModelReply | BaseException]:
    """Returns a chat model's or policy server's replies, requested concurrently; a failed one gives its exception."""
    return list(await asyncio.gather(*(model.sample(request) for request in requests), return_exceptions=True))
