"""A hosted model as the policy: replies come from `/chat/completions`, without token ids.

    version 0        the model that the run started from
    a job succeeds   its `fine_tuned_model` is staged: `save` writes its name, `publish` serves it
    version 1        the fine-tuned model; every reply must name that model

A model's name stands for its weights here, so the fingerprint is a hash of the name.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

from reinforge.errors import BackendError, BackendUnavailable, ContextOverflow
from reinforge.interfaces import PolicyServer
from reinforge.protocols.service import NOT_FOUND
from reinforge.rollout.models.openai_client import OpenAIChat
from reinforge.rollout.models.openai_http import RequestRejected
from reinforge.types.request import ChatPrompt, Message, ModelReply, ModelRequest, SamplingParams
from reinforge.types.sample import FloatArray

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
READINESS_REQUEST = ModelRequest([{"role": "user", "content": "1 2 3"}], SamplingParams(max_tokens=1))
MAX_PAUSE_S = 10.0


class HostedPolicy(PolicyServer):
    """Samples from the served model.

    Args:
        chat: The model that the run starts from; it rejects replies of other models.
        ready_s: Seconds to wait until a new model is available.
    """

    def __init__(self, chat: OpenAIChat, base_model: str, *, ready_s: float = 600.0):
        self._chat, self.base_model, self.ready_s = chat, base_model, ready_s
        self._version = 0
        self._staged: str | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def model_name(self) -> str:
        return self.base_model

    @property
    def served_model(self) -> str:
        return self._chat.model_name

    @property
    def newest_model(self) -> str:
        return self._staged or self.served_model

    def stage(self, model: str) -> None:
        self._staged = model

    async def sample(self, request: ModelRequest) -> ModelReply:
        version = self._version
        try:
            reply = await self._chat.sample(request)
        except RequestRejected as error:
            if CONTEXT_LENGTH_EXCEEDED in str(error):
                raise ContextOverflow(str(error)) from error
            raise
        return replace(reply, policy_version=version)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        raise BackendError(
            f"{self.served_model}: a model behind a chat API cannot score token ids; use a model of `_type: local`"
        )

    async def encode(self, request: ModelRequest, reply: Message) -> ChatPrompt:
        """Returns the prompt of a given reply as messages; the service tokenizes them."""
        messages = tuple({key: value for key, value in each.items() if key != "weight"} for each in request.messages)
        return ChatPrompt(messages, tuple(request.tools) if request.tools else None, -1)

    async def publish(self, version: int) -> None:
        if self._staged is not None and self._staged != self.served_model:
            chat = self._chat.for_model(self._staged)
            await self._wait_until_ready(chat)
            self._chat = chat
        self._staged, self._version = None, version

    async def _wait_until_ready(self, chat: OpenAIChat) -> None:
        deadline, pause_s = time.monotonic() + self.ready_s, 0.1
        while True:
            try:
                await chat.sample(READINESS_REQUEST)
                return
            except BackendError as error:
                is_deploying = isinstance(error, BackendUnavailable) or getattr(error, "status", None) == NOT_FOUND
                if not is_deploying:
                    raise
                if time.monotonic() >= deadline:
                    message = (
                        f"{chat.model_name} is still not available {self.ready_s:g} s after its job ended (ready_s): "
                        f"{error}; raise ready_s, or resume later"
                    )
                    raise BackendUnavailable(message) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def close(self) -> None:
        await self._chat.close()

    async def fingerprint(self) -> str:
        return hashlib.sha256(self.served_model.encode()).hexdigest()[:16]
