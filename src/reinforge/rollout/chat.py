"""OpenAI's chat completions format: turns an agent's arguments into a request, and replies into a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.types.episode import ModelCall
from reinforge.types.request import Message, ModelRequest, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class ChatMessage:
    """`choices[i].message` of a completion."""

    role: str
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class ChatChoice:
    """One of a completion's `choices`; `logprobs` is a `TokenLogprobs`, which also has `.content[i].logprob`."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class ChatUsage:
    """Token counts of one call."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and the replies."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class ChatCompletion:
    """The result of `create`, with the fields of OpenAI's object that agents read."""

    id: str
    model: str
    created: int
    choices: list[ChatChoice]
    usage: ChatUsage
    object: str = "chat.completion"


def build_completion(call: ModelCall) -> ChatCompletion:
    """Returns a call as a chat completion; its usage counts the prompt once, as OpenAI does."""
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessage(reply.message["role"], reply.message.get("content"), reply.message.get("tool_calls")),
            finish_reason=reply.finish_reason,
            logprobs=reply.tokens,
        )
        for index, reply in enumerate(call.choices)
    ]
    usage = ChatUsage(call.reply.num_prompt_tokens, call.num_completion_tokens)
    return ChatCompletion(call.call_id, call.model, int(call.started_s), choices, usage)


_IGNORED_ARGUMENTS = frozenset({"model", "logprobs", "top_logprobs", "user", "metadata", "store", "timeout"})
_FORBIDDEN_ARGUMENTS = frozenset({"extra_headers", "extra_query"})  # only the configuration sets endpoint and key
_UNFORWARDED_ARGUMENTS = frozenset({"model", "logprobs", "top_logprobs", "timeout", "tools", "stream"})
MAX_CHOICES = 128
"""Maximum choices of one request, the same as OpenAI's."""


def build_request(
    messages: Sequence[Any],
    *,
    sampling: SamplingParams | None,
    seed: int,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    max_tokens: int | None = None,
    max_completion_tokens: int | None = None,
    stop: str | list[str] | None = None,
    tools: list[dict[str, Any]] | None = None,
    stream: bool = False,
    forwards_arguments: bool = False,
    **other: Any,
) -> ModelRequest:
    """Returns the request for one call with OpenAI's arguments.

    Args:
        messages: The history.
        sampling: The run's temperature, top_p, top_k and min_p for a trained policy; None: use the agent's.
        seed: The call's seed.
        temperature: Used if `sampling` is None.
        top_p: Used if `sampling` is None.
        top_k: Used if `sampling` is None; not an argument of OpenAI's, other servers' clients put it in `extra_body`.
        min_p: Like `top_k`.
        max_tokens: The agent's limit of the reply, in tokens.
        max_completion_tokens: OpenAI's newer name for `max_tokens`.
        stop: The agent's stop strings.
        tools: Function definitions.
        stream: Must be False.
        forwards_arguments: True if the model's endpoint accepts every argument of OpenAI's.
        other: Other arguments; those that do not change the reply are ignored.

    Raises:
        TypeError: An argument that would change the reply is not supported.
    """
    rejected = sorted(set(other) & _FORBIDDEN_ARGUMENTS if forwards_arguments else set(other) - _IGNORED_ARGUMENTS)
    if rejected or stream:
        names = ", ".join(rejected + (["stream"] if stream else []))
        raise TypeError(f"chat.completions.create does not support: {names}")
    if not messages:
        raise TypeError("chat.completions.create needs at least one message")
    if sampling is not None:
        temperature, top_p, top_k, min_p = sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    limit = max_completion_tokens if max_completion_tokens is not None else max_tokens
    params = SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=top_k or 0,
        min_p=min_p or 0.0,
        max_tokens=limit,
        stop=stops,
        seed=seed,
    )
    return ModelRequest([normalize_message(message) for message in messages], params, tools)


def normalize_message(message: Any) -> Message:
    """Returns a message as a dict; agents may also pass message objects such as `choices[0].message`."""
    if isinstance(message, ChatMessage):
        message = {"role": message.role, "content": message.content, "tool_calls": message.tool_calls}
    elif hasattr(message, "model_dump"):
        message = message.model_dump()
    return {key: value for key, value in dict(message).items() if value is not None or key == "content"}


def build_forwarded_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the agent's arguments that are forwarded to an endpoint."""
    given = {key: value for key, value in arguments.items() if value is not None and key not in _UNFORWARDED_ARGUMENTS}
    extra_body = given.pop("extra_body", {})
    return {**given, **extra_body}
