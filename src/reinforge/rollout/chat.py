"""OpenAI's chat shape: what an agent asks becomes a request, and the replies become a chat completion."""

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
    """One of a completion's `choices`; `logprobs` is the exact `TokenLogprobs`, `.content[i].logprob` works too."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class ChatUsage:
    """Tokens of one call."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and reply."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class ChatCompletion:
    """What `create` returns: the fields of OpenAI's object that agents read."""

    id: str
    model: str
    created: int
    choices: list[ChatChoice]
    usage: ChatUsage
    object: str = "chat.completion"


def completion_of(call: ModelCall) -> ChatCompletion:
    """Returns a call's replies in the shape that agents read; the prompt counts once, as it does in OpenAI's usage."""
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


_ACCEPTED_AND_UNUSED = frozenset({"model", "logprobs", "top_logprobs", "user", "metadata", "store", "timeout"})
_NEVER = frozenset({"extra_headers", "extra_query"})  # where it goes and with which key is the configuration's to say
_NOT_PASSED_ON = frozenset({"model", "logprobs", "top_logprobs", "timeout", "tools", "stream"})
MAX_CHOICES = 128
"""Choices of one request, as many as OpenAI takes."""


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
    passes_through: bool = False,
    **other: Any,
) -> ModelRequest:
    """Returns the request for one call in OpenAI's arguments.

    Args:
        messages: The history.
        sampling: The run's temperature, top_p, top_k and min_p for a trained policy; None: the agent's own count.
        seed: The call's own seed.
        temperature: Used where `sampling` is None.
        top_p: Used where `sampling` is None.
        top_k: Used where `sampling` is None; OpenAI has none, agents of other servers give it in `extra_body`.
        min_p: The same.
        max_tokens: Longest reply in tokens; the agent's own.
        max_completion_tokens: OpenAI's newer name of `max_tokens`.
        stop: Texts that end the reply; the agent's own.
        tools: Function definitions.
        stream: Must be False.
        passes_through: The model behind takes any argument of OpenAI's.
        other: Arguments of OpenAI's that do not change the reply are accepted; any other is refused.

    Raises:
        TypeError: An argument that would change the reply cannot be honoured.
    """
    refused = sorted(set(other) & _NEVER if passes_through else set(other) - _ACCEPTED_AND_UNUSED)
    if refused or stream:
        what = ", ".join(refused + (["stream"] if stream else []))
        raise TypeError(f"chat.completions.create cannot honour: {what}")
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
    return ModelRequest([as_message(message) for message in messages], params, tools)


def as_message(message: Any) -> Message:
    """Returns a message as a mapping; agents may append `choices[0].message` itself, ours or another library's."""
    if isinstance(message, ChatMessage):
        message = {"role": message.role, "content": message.content, "tool_calls": message.tool_calls}
    elif hasattr(message, "model_dump"):
        message = message.model_dump()
    return {key: value for key, value in dict(message).items() if value is not None or key == "content"}


def passed_on(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an agent asked of a model that is no policy, as its endpoint is asked."""
    given = {key: value for key, value in arguments.items() if value is not None and key not in _NOT_PASSED_ON}
    further = given.pop("extra_body", {})
    return {**given, **further}
