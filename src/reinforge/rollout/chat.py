"""Turns the arguments of OpenAI's `chat.completions.create` into a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.rollout.completion import to_plain_data
from reinforge.types.request import Message, ModelRequest, SamplingParams

_IGNORED_ARGUMENTS = frozenset({"model", "logprobs", "top_logprobs", "user", "metadata", "store", "timeout"})
_FORBIDDEN_ARGUMENTS = frozenset({"extra_headers", "extra_query"})  # only the configuration sets endpoint and key
_UNFORWARDED_ARGUMENTS = frozenset({"model", "timeout", "tools", "stream"})
_EXTRA_BODY = frozenset({"chat_template_kwargs", "max_tokens", "min_p", "stop", "temperature", "top_k", "top_p"})
"""Fields of `extra_body` for a model in this process; those of other servers for the same model."""
_TEMPLATE_VALUES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
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
    chat_template_kwargs: Mapping[str, Any] | None = None,
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
        chat_template_kwargs: What the chat template gets besides the messages and tools, such as `enable_thinking`; not
            an argument of OpenAI's either.
        forwards_arguments: True if the model's endpoint accepts every argument of OpenAI's.
        other: Other arguments; those that do not change the reply are ignored.

    Raises:
        TypeError: An argument that would change the reply is not supported.
    """
    given = {name for name, value in other.items() if value is not None}
    rejected = sorted(given & _FORBIDDEN_ARGUMENTS if forwards_arguments else given - _IGNORED_ARGUMENTS)
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
    return ModelRequest(
        [normalize_message(message) for message in messages], params, tools, dict(chat_template_kwargs or {})
    )


def merge_extra_body(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call to a model in this process, with those in `extra_body` in their place.

    Example: `{"temperature": 1, "extra_body": {"top_k": 5}}` -> `{"temperature": 1, "top_k": 5}`.

    Raises:
        TypeError: `extra_body` has a field that is not supported.
    """
    merged = dict(arguments)
    extra = merged.pop("extra_body", None) or {}
    if unknown := sorted(set(extra) - _EXTRA_BODY):
        names = ", ".join(f"extra_body.{name}" for name in unknown)
        supported = ", ".join(sorted(_EXTRA_BODY))
        raise TypeError(f"chat.completions.create does not support: {names}; extra_body may have {supported}")
    merged |= extra
    if reserved := sorted(set(merged.get("chat_template_kwargs") or {}) & _TEMPLATE_VALUES):
        raise TypeError(f"chat.completions.create: chat_template_kwargs must not have {', '.join(reserved)}")
    return merged


def find_overridden(arguments: Mapping[str, Any], sampling: SamplingParams) -> dict[str, tuple[Any, Any]]:
    """Returns what the agent asks for and the run's own value, by name, where a trained policy's sampling differs.

    Example: `{"temperature": 0, "max_tokens": 9}` and a run with temperature 1 -> `{"temperature": (0, 1.0)}`.
    """
    names = ("temperature", "top_p", "top_k", "min_p")
    found = {name: (arguments.get(name), getattr(sampling, name)) for name in names}
    return {name: (asked, own) for name, (asked, own) in found.items() if asked is not None and asked != own}


def normalize_message(message: Any) -> Message:
    """Returns a message as plain data; agents may also pass message objects such as `choices[0].message`."""
    if hasattr(message, "model_dump"):
        message = message.model_dump()
    plain = {key: value for key, value in dict(message).items() if value is not None or key == "content"}
    return plain if all(isinstance(value, str | None) for value in plain.values()) else to_plain_data(plain)


def build_forwarded_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the agent's arguments that are forwarded to an endpoint."""
    given = {key: value for key, value in arguments.items() if value is not None and key not in _UNFORWARDED_ARGUMENTS}
    extra_body = given.pop("extra_body", {})
    return {**given, **extra_body}
