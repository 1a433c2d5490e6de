"""A hosted model as the policy: replies come through `/chat/completions`, without tokens.

    version 0            the model that the run began with
    a job has succeeded  its `fine_tuned_model` is staged: `save` writes its name, `publish` serves it
    version 1            the fine-tuned model; each reply must say that it is that model's

A name stands for weights here, so the fingerprint is a hash of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

from reinforge.errors import BackendError, BackendUnavailable
from reinforge.interfaces import ContextOverflow, PolicyServer
from reinforge.rollout.openai_client import OpenAIChat
from reinforge.rollout.openai_http import Refused
from reinforge.types.request import ChatPrompt, Message, ModelReply, ModelRequest, SamplingParams
from reinforge.types.sample import FloatArray

TOO_LONG = "context_length_exceeded"
NOT_THERE = 404
PROBE = ModelRequest([{"role": "user", "content": "1 2 3"}], SamplingParams(max_tokens=1))
MAX_PAUSE_S = 10.0


class HostedPolicy(PolicyServer):
    """Samples from the model that is served now.

    Args:
        chat: The model that the run begins with; refuses replies of any other.
        base_model: Its base.
        ready_s: Seconds that a new model may take until it answers.
    """

    def __init__(self, chat: OpenAIChat, base_model: str, *, ready_s: float = 600.0):
        self._chat, self.base_model, self.ready_s = chat, base_model, ready_s
        self._version = 0
        self._staged: str | None = None

    @property
    def version(self) -> int:
        """How many jobs made the model that is served."""
        return self._version

    @property
    def model_name(self) -> str:
        """The base model's name, which stays while fine-tuned ones follow each other, for `target_model`."""
        return self.base_model

    @property
    def served_model(self) -> str:
        """The name of the model that replies are asked of now."""
        return self._chat.model_name

    @property
    def newest_model(self) -> str:
        """The model of the newest job that succeeded, served or only staged."""
        return self._staged or self.served_model

    def stage(self, model: str) -> None:
        """Sets the model that the next `publish` serves."""
        self._staged = model

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Draws one reply.

        Raises:
            ContextOverflow: The prompt does not fit the context.
            BackendError: The service does not answer, or another model does.
        """
        version = self._version
        try:
            reply = await self._chat.sample(request)
        except Refused as error:
            if TOO_LONG in str(error):
                raise ContextOverflow(str(error)) from error
            raise
        return replace(reply, policy_version=version)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Scores nothing: a hosted model is not asked by tokens.

        Raises:
            BackendError: Always.
        """
        raise BackendError(f"{self.served_model} is hosted: it neither takes token ids nor tells log-probs of them")

    async def encode(self, request: ModelRequest, reply: Message) -> ChatPrompt:
        """Returns the prompt of a reply that nobody sampled; how it becomes tokens is the service's to say."""
        messages = tuple({key: value for key, value in each.items() if key != "weight"} for each in request.messages)
        return ChatPrompt(messages, tuple(request.tools) if request.tools else None, -1)

    async def publish(self, version: int) -> None:
        """Serves the staged model as `version`, once it answers.

        Raises:
            BackendUnavailable: It does not within `ready_s`.
            BackendError: Another model answers in its name.
        """
        if self._staged is not None and self._staged != self.served_model:
            chat = self._chat.named(self._staged)
            await self._wait_until_it_answers(chat)
            self._chat = chat
        self._staged, self._version = None, version

    async def _wait_until_it_answers(self, chat: OpenAIChat) -> None:
        """Returns once a model that was made a moment ago is deployed."""
        deadline, pause_s = time.monotonic() + self.ready_s, 0.1
        while True:
            try:
                await chat.sample(PROBE)
                return
            except BackendError as error:
                may_pass = isinstance(error, BackendUnavailable) or getattr(error, "status", None) == NOT_THERE
                if not may_pass:
                    raise
                if time.monotonic() >= deadline:
                    message = f"the model {chat.model_name} does not answer {self.ready_s:g} s after its job: {error}"
                    raise BackendUnavailable(message) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def fingerprint(self) -> str:
        """Returns a hash of the served model's name."""
        return hashlib.sha256(self.served_model.encode()).hexdigest()[:16]
