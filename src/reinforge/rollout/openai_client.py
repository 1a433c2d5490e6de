"""The client behind `_type: openai`: chat completions of an endpoint, as replies.

200 and a chat completion                    ModelReply(tokens=None)
200 and anything else                        BackendError
no usable answer                             as `openai_http` says
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import SecretStr

from reinforge.errors import BackendError
from reinforge.rollout.openai_config import OpenAILLMConfig
from reinforge.rollout.openai_http import OpenAIEndpoint, what_is_said
from reinforge.types.request import Message, ModelReply, ModelRequest

PATH = "/chat/completions"


class OpenAIChat:
    """A model behind an endpoint; not a policy.

    Args:
        config: Name, limits and defaults.
        url: The endpoint, up to /v1.
        key: Sent as a bearer token.
        endpoint: Connections that others use too; None: its own.
        checks_name: Refuse replies that do not say that they are this model's. A name that stands for a dated one
            (`gpt-x` for `gpt-x-2025-01-01`) is the same model.
    """

    is_policy = False
    passes_through = True

    def __init__(
        self,
        config: OpenAILLMConfig,
        url: str,
        key: SecretStr | None = None,
        *,
        endpoint: OpenAIEndpoint | None = None,
        checks_name: bool = False,
    ):
        self.config, self.url, self.checks_name = config, url, checks_name
        self._endpoint = endpoint or OpenAIEndpoint(config, url, key)

    @property
    def model_name(self) -> str:
        """The model's name at the endpoint."""
        return self.config.model_name

    @property
    def endpoint(self) -> str:
        """Where prompts are sent, for a person."""
        return self.url

    def named(self, model_name: str) -> Self:
        """Returns another model of the same endpoint, over the same connections."""
        config = self.config.model_copy(update={"model_name": model_name})
        return type(self)(config, self.url, endpoint=self._endpoint, checks_name=self.checks_name)

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Asks for one reply; its tokens are not known, so it is never trained.

        Raises:
            BackendUnavailable: No usable answer after every attempt.
            BackendError: An answer that trying again would not change.
        """
        return (await self.sample_choices(request, 1))[0]

    async def sample_choices(self, request: ModelRequest, n: int) -> list[ModelReply]:
        """Asks for n choices at once; the first one carries the tokens of all, which the endpoint counts together.

        Raises:
            BackendUnavailable: No usable answer after every attempt.
            BackendError: An answer that trying again would not change, or one of fewer choices.
        """
        body = body_of(self.config, request) | ({"n": n} if n > 1 else {})
        return self._replies(await self._endpoint.call("POST", PATH, body=body), n)

    async def close(self) -> None:
        """Closes the connections."""
        await self._endpoint.close()

    def _replies(self, text: str, n: int) -> list[ModelReply]:
        """Returns the n replies that an answer holds."""
        where = f"{self.url}{PATH}"
        try:
            answer = json.loads(text)
            choices = answer["choices"][:n]
            messages: list[Message] = [_message(choice["message"]) for choice in (choices[0], *choices[1:])]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            told = self._endpoint.clean(what_is_said(text))
            raise BackendError(f"{where}: the answer is no chat completion: {told}") from None
        if len(choices) < n:
            raise BackendError(f"{where}: {len(choices)} of n = {n} choices came back")
        if self.checks_name and not _is_same_model(self.model_name, answer.get("model")):
            said = self._endpoint.clean(repr(answer.get("model")))
            raise BackendError(f"{where}: asked for {self.model_name!r}, answered by {said}")
        usage = answer.get("usage") or {}
        prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        return [
            ModelReply(message, str(choice.get("finish_reason") or "stop"), None, prompt, 0 if index else completion)
            for index, (message, choice) in enumerate(zip(messages, choices, strict=True))
        ]


def body_of(config: OpenAILLMConfig, request: ModelRequest) -> dict[str, Any]:
    """Returns the JSON of one call: the configuration's defaults, then what the caller asked for."""
    defaults = {"temperature": config.temperature, "top_p": config.top_p, "max_tokens": config.max_tokens}
    asked = request.arguments
    if asked is None:
        sampling = request.sampling
        asked = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p < 1 else None,
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
        }
    if asked.get("max_completion_tokens") is not None:
        del defaults["max_tokens"]
    given = {key: value for key, value in {**defaults, **_given(asked)}.items() if value is not None}
    tools = {"tools": request.tools} if request.tools else {}
    return {"model": config.model_name, "messages": request.messages, **config.extra_body, **given, **tools}


def _is_same_model(asked: str, answered: Any) -> bool:
    """True if the name that answered is the one asked for, or the dated one that a base model's name stands for.

    Example: `gpt-x` is `gpt-x-2025-04-14` and `gpt-x-0613`; it is not `gpt-x-mini`. `ft:` names are only themselves.
    """
    is_dated = not asked.startswith("ft:") and re.fullmatch(rf"{re.escape(asked)}-\d[\d-]*", str(answered))
    return answered == asked or bool(is_dated)


def _message(said: Mapping[str, Any]) -> Message:
    further = {key: said[key] for key in ("tool_calls", "refusal") if said.get(key)}
    return {"role": "assistant", "content": said.get("content"), **further}


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, Mapping) else None
    return value if isinstance(value, int) and value > 0 else 0
