"""The policy of a session at another server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reinforge.adapters.described_policy import DescribedPolicy
from reinforge.errors import BackendError
from reinforge.protocols.sessions.client import HttpSession
from reinforge.protocols.sessions.wire import (
    EncodeAnswer,
    EncodeCall,
    PublishCall,
    SampleAnswer,
    SampleCall,
    ScoreAnswer,
    ScoreCall,
    SessionDescription,
    WeightsAnswer,
)
from reinforge.types.request import Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray


class HttpPolicy(DescribedPolicy):
    """Samples at the server.

    Args:
        session: The session.
        description: What the server says about its policy.
    """

    def __init__(self, session: HttpSession, description: SessionDescription):
        super().__init__(description, description.version)
        self._session = session

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply; if the response is lost, another one is sampled.

        Raises:
            ContextOverflow: The prompt does not fit the context.
            BackendUnavailable: The server does not answer.
        """
        answer = await self._session.ask(SampleAnswer, "POST", "sample", SampleCall(request=request))
        if answer.reply is None:
            raise BackendError("the server answered without a reply")
        return self.note_version(answer.reply)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns log p of each token given the tokens before it, at temperature 1."""
        call = ScoreCall(token_ids=[list(map(int, row)) for row in token_ids])
        answer = await self._session.ask(ScoreAnswer, "POST", "score", call)
        return [np.asarray(row, np.float32) for row in answer.logprobs]

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        """Returns the tokens of a given reply."""
        answer = await self._session.ask(EncodeAnswer, "POST", "encode", EncodeCall(request=request, reply=reply))
        if answer.tokens is None:
            raise BackendError("the server answered without tokens")
        return answer.tokens

    async def publish(self, version: int) -> None:
        """Serves the newest weights as `version`."""
        answer = await self._session.ask(WeightsAnswer, "POST", "publish", PublishCall(version=version))
        self._version = answer.version

    async def fingerprint(self) -> str:
        """Returns a short hash of the weights at the server."""
        return (await self._session.ask(WeightsAnswer, "GET", "fingerprint")).fingerprint

    def follow(self, version: int) -> None:
        """Notes which version the server has restored."""
        self._version = version
