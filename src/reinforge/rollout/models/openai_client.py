"""`llms.<name>._type: openai`: a model behind any OpenAI-compatible chat completions endpoint.

It can be the agent's model, a judge, or a second model of a workflow. The embedded engine never trains it. A trainer
adapter of a user's that serves no policy itself may train it: the log-probs and token ids that the endpoint returns are
kept with each reply.

response                                     result
200 and a chat completion                    ModelReply, with the log-probs that the endpoint returned
200 and anything else                        UnexpectedAnswer, which names the field
anything else                                see `openai_http`
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import Field, SecretStr

from reinforge.bounded import load_json
from reinforge.config.schema import LLMConfig
from reinforge.errors import BackendError, InvalidCall
from reinforge.interfaces import Builder
from reinforge.registry import register_llm
from reinforge.rollout.models.endpoint_config import (
    EndpointConfig,
    find_entry_name,
    resolve_endpoint,
    warn_about_api_key,
)
from reinforge.rollout.models.openai_answers import ChatAnswer, describe_json, parse_answer, read_logprobs
from reinforge.rollout.models.openai_http import OpenAIEndpoint, UnexpectedAnswer, extract_error_message
from reinforge.rollout.models.policy_llm import PolicyLLM, find_served_entries
from reinforge.rollout.models.prompt_scoring import (
    PROBE,
    ScoredPrompt,
    fill_in_logprobs,
    refuse_other_texts,
    score_prompt,
)
from reinforge.types.request import Message, ModelReply, ModelRequest
from reinforge.types.sample import FloatArray, TrainingSample

PATH = "/chat/completions"

logger = logging.getLogger(__name__)


class OpenAILLMConfig(EndpointConfig, LLMConfig, name="openai"):
    """A model behind any OpenAI-compatible URL; the agent's own arguments take precedence over these defaults."""

    key_aliases: ClassVar[dict[str, str]] = {"model": "model_name", "request_timeout": "timeout_s"}

    model_name: str = Field(min_length=1, description="The model's name at the endpoint. `model` is also accepted.")
    temperature: float | None = Field(default=None, ge=0, description="Default temperature.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Default top_p.")
    max_tokens: int | None = Field(default=None, ge=1, description="Default max_tokens.")
    seed: int | None = Field(default=None, description="Default seed.")
    logprobs: bool | None = Field(
        default=None,
        description="Request the log-prob of each token. What the endpoint returns, token ids too, is kept with the "
        "reply for your trajectory builder and trainer adapter.",
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, description="Request this many of the most likely tokens at each position, with logprobs."
    )
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Additional fields of the request body.")


@dataclass
class ModelUsage:
    """What a model has been asked for, by agents and judges alike."""

    num_calls: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class OpenAIChat:
    """A model behind an endpoint; not a policy.

    Args:
        endpoint: Connections to share with other models; None: its own.
        verify_model_name: Reject replies from a model with another name; a dated version (`gpt-x-2025-01-01` for
            `gpt-x`) is accepted.
    """

    is_policy = False
    forwards_arguments = True

    def __init__(
        self,
        config: OpenAILLMConfig,
        url: str,
        key: SecretStr | None = None,
        *,
        endpoint: OpenAIEndpoint | None = None,
        verify_model_name: bool = False,
    ):
        self.config, self.url, self.verify_model_name = config, url, verify_model_name
        self._endpoint = endpoint or OpenAIEndpoint(config, url, key)
        self._warned = False
        self.usage = ModelUsage()

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def endpoint(self) -> str:
        return self.url

    def for_model(self, model_name: str) -> Self:
        config = self.config.model_copy(update={"model_name": model_name})
        return type(self)(config, self.url, endpoint=self._endpoint, verify_model_name=self.verify_model_name)

    async def sample(self, request: ModelRequest) -> ModelReply:
        return (await self.sample_choices(request, 1))[0]

    async def sample_choices(self, request: ModelRequest, n: int) -> list[ModelReply]:
        """Requests n choices at once; the first reply has the completion tokens of all, which the endpoint sums."""
        body = build_body(self.config, request) | ({"n": n} if n > 1 else {})
        needs_logprobs = bool(body.get("logprobs"))
        text = await self._endpoint.call("POST", PATH, body=body)
        replies = self._parse_replies(text, n, needs_logprobs=needs_logprobs)
        self.usage.num_calls += 1
        self.usage.num_prompt_tokens += replies[0].num_prompt_tokens
        self.usage.num_completion_tokens += replies[0].num_completion_tokens
        if needs_logprobs and replies[0].logprobs is None:
            self._warn_of_no_logprobs()
        return replies

    async def embed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the endpoint's answer to a request for embeddings, by the model of this entry."""
        text = await self._endpoint.call("POST", "/embeddings", body={**body, "model": self.model_name})
        answer = load_json(text)
        if not isinstance(answer, dict):
            raise UnexpectedAnswer(f"{self.url}/embeddings: the response is {describe_json(answer)}")
        return answer

    async def prepare(self, tokenizer: Any) -> None:
        """Checks, as a teacher, that the endpoint scores given tokens and names them as the policy's tokenizer does."""
        token_ids = tokenizer.encode(PROBE, add_special_tokens=False)
        refuse_other_texts(self.model_name, tokenizer, token_ids, await self._score(token_ids))

    async def score_samples(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens, `[T]` each, 0 elsewhere; see `prompt_scoring`."""
        scored = await asyncio.gather(*(self._score(sample.token_ids.tolist()) for sample in samples))
        return [fill_in_logprobs(*pair, self.model_name) for pair in zip(samples, scored, strict=True)]

    async def _score(self, token_ids: Sequence[int]) -> ScoredPrompt:
        return await score_prompt(self._endpoint, {"model": self.model_name, **self.config.extra_body}, token_ids)

    def _warn_of_no_logprobs(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s%s returns no log-probs, although they were requested", self.url, PATH)

    async def close(self) -> None:
        await self._endpoint.close()

    def _parse_replies(self, text: str, n: int, *, needs_logprobs: bool) -> list[ModelReply]:
        where, what = f"{self.url}{PATH}", "a chat completion"
        try:
            raw = load_json(text)
        except ValueError:
            message = self._endpoint.redact(extract_error_message(text))
            raise UnexpectedAnswer(f"{where}: the response is not {what}: {message}") from None
        if isinstance(raw, dict) and raw.get("error") and not raw.get("choices"):
            message = self._endpoint.redact(extract_error_message(text))
            raise UnexpectedAnswer(f"{where}: the response is not {what} but an error: {message}")
        try:
            answer = parse_answer(ChatAnswer, raw, where, what, needs_logprobs=needs_logprobs)
        except UnexpectedAnswer as error:
            raise UnexpectedAnswer(self._endpoint.redact(str(error))) from None
        if len(answer.choices) < n:
            raise BackendError(f"{where}: requested n = {n} choices, received {len(answer.choices)}")
        if self.verify_model_name and not _is_same_model(self.model_name, answer.model):
            other = repr(answer.model) if isinstance(answer.model, str) else describe_json(answer.model)
            other = self._endpoint.redact(other)
            raise BackendError(f"{where}: requested the model {self.model_name!r}, but {other} replied")
        prompt, completion = answer.usage.prompt_tokens or 0, answer.usage.completion_tokens or 0
        return [
            ModelReply(
                _build_message(raw["choices"][index]["message"]),
                answer.choices[index].finish_reason or "stop",
                None,
                prompt,
                0 if index else completion,
                logprobs=read_logprobs(answer, index),
            )
            for index in range(n)
        ]


def build_body(config: OpenAILLMConfig, request: ModelRequest) -> dict[str, Any]:
    """Returns the JSON body of a call: the configuration's defaults, overridden by the request's arguments."""
    defaults = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
        "seed": config.seed,
        "logprobs": True if config.logprobs is None and config.top_logprobs is not None else config.logprobs,
        "top_logprobs": config.top_logprobs,
    }
    arguments = request.arguments
    if arguments is None:
        sampling = request.sampling
        arguments = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p < 1 else None,
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
            **_build_settings(request),
        }
    if arguments.get("max_completion_tokens") is not None:
        del defaults["max_tokens"]
    given = _drop_none({**defaults, **_drop_none(arguments)})
    tools = {"tools": request.tools} if request.tools else {}
    return {"model": config.model_name, "messages": request.messages, **config.extra_body, **given, **tools}


def _build_settings(request: ModelRequest) -> dict[str, Any]:
    """Returns what a request for a hosted policy asks for besides temperature and length."""
    if request.prompt is not None:
        raise InvalidCall("chat.completions.create: prompt needs a model in this process; use messages", "prompt")
    sampling, grammar, choice = request.sampling, request.grammar, request.tool_choice
    if grammar is not None and grammar.kind != "json_schema":
        message = f"the API of hosted models has no {grammar.kind} format: use a JSON schema"
        raise InvalidCall(f"chat.completions.create: {message}", "structured_outputs")
    named = {"type": "function", "function": {"name": choice}}
    template = dict(request.template_kwargs)
    settings = {
        "frequency_penalty": sampling.frequency_penalty or None,
        "presence_penalty": sampling.presence_penalty or None,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "tool_choice": None if choice == "auto" else choice if choice in ("none", "required") else named,
        "parallel_tool_calls": None if request.parallel_tool_calls else False,
        "response_format": None if grammar is None else _build_response_format(json.loads(grammar.text)),
        **{name: template.pop(name, None) for name in ("reasoning_effort", "verbosity")},
    }
    return settings | {"chat_template_kwargs": template or None}


def _build_response_format(schema: Any) -> dict[str, Any]:
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}


def _is_same_model(requested: str, replied: Any) -> bool:
    """Returns True if the two names are equal, or the second is a dated version of the first.

    Example: `gpt-x` matches `gpt-x-2025-04-14` and `gpt-x-0613`, but not `gpt-x-mini`. `ft:` names must be equal.
    """
    is_dated = not requested.startswith("ft:") and re.fullmatch(rf"{re.escape(requested)}-\d[\d-]*", str(replied))
    return replied == requested or bool(is_dated)


def _build_message(message: Mapping[str, Any]) -> Message:
    """Returns a validated message with its tool calls as they came."""
    extra = {key: message[key] for key in ("tool_calls", "refusal") if message.get(key)}
    return {"role": "assistant", "content": message.get("content"), **extra}


def _drop_none(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}


@register_llm(config_type=OpenAILLMConfig)
async def openai_llm(config: OpenAILLMConfig, builder: Builder) -> AsyncIterator[OpenAIChat | PolicyLLM]:
    if find_entry_name(builder.config.llms, config) in find_served_entries(builder.config):
        yield PolicyLLM(builder.policy)
        return
    url, key = resolve_endpoint(config)
    warn_about_api_key(config, url, ("llms", find_entry_name(builder.config.llms, config)), builder)
    model = OpenAIChat(config, url, key)
    try:
        yield model
    finally:
        await model.close()
