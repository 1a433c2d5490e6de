"""One call of a served model: OpenAI's arguments in, a chat completion out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reinforge.rollout.capture import sample_choices
from reinforge.rollout.handle.arguments import CallArguments
from reinforge.rollout.handle.chat import build_request, read_num_choices
from reinforge.rollout.handle.completion import ChatCompletion, build_completion
from reinforge.serving.limits import ServerLimits
from reinforge.serving.models import ServedModel, ServedModels
from reinforge.types.episode import ModelCall
from reinforge.types.request import ModelReply, ModelRequest


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that has been checked and can be sampled.

    Attributes:
        call_id: The `id` of its completion.
        request: The request.
        num_choices: `n`.
        started_s: When it came, in seconds since the epoch.
    """

    call_id: str
    request: ModelRequest
    num_choices: int
    started_s: float


class ModelCaller:
    """Makes the calls of one request.

    Args:
        models: Those who watch calls.
        model: The model that answers.
        limits: The server's limits.
        prefix: Of the completion's id, such as `chatcmpl-`.
    """

    def __init__(self, models: ServedModels, model: ServedModel, limits: ServerLimits, prefix: str = ""):
        self._models, self._model, self._limits, self._prefix = models, model, limits, prefix

    def prepare(self, messages: Sequence[Any] | None, arguments: CallArguments) -> PreparedCall:
        """Returns the call that the arguments ask for.

        Raises:
            InvalidCall: An argument would change the reply and cannot be honoured, or is above a limit.
        """
        n, limits = read_num_choices(arguments), self._limits
        if n > limits.max_choices:
            raise arguments.bad("n", f"must be at most {limits.max_choices} on this server, found {n}")
        seed = arguments.get("seed")
        request = build_request(messages, arguments, sampling=None, seed=secrets.randbits(63) if seed is None else seed)
        asked = request.sampling.max_tokens
        if limits.max_tokens is not None and asked is None:
            request = replace(request, sampling=replace(request.sampling, max_tokens=limits.max_tokens))
        elif limits.max_tokens is not None and asked is not None and asked > limits.max_tokens:
            name = "max_completion_tokens" if "max_completion_tokens" in arguments.given else "max_tokens"
            raise arguments.bad(name, f"must be at most {limits.max_tokens} on this server, found {asked}")
        return PreparedCall(f"{self._prefix}{secrets.token_hex(12)}", request, n, time.time())

    async def complete(self, call: PreparedCall) -> ChatCompletion:
        """Makes one call, and returns its completion once all of its replies are sampled.

        Args:
            call: The call.
        """
        with self._model.use():
            return self.finish(call, await sample_choices(self._model.llm, call.request, call.num_choices))

    def finish(self, call: PreparedCall, replies: Sequence[ModelReply]) -> ChatCompletion:
        """Returns the completion of a call, and tells those who watch."""
        reply, *others = replies
        name = self._model.name
        made = ModelCall(
            call.call_id, name, name, call.request, reply, (), call.started_s, time.time(), others=tuple(others)
        )
        self._models.report(made, self._model)
        completion, versions = build_completion(made), [each.version for each in replies]
        for choice, version in zip(completion.choices, versions, strict=True):
            choice["model_version"] = version
        completion["model_version"] = versions[0] if len(set(versions)) == 1 else None
        return completion
