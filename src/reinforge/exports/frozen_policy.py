"""What the policy servers over an exported model share: one thread computes, and the weights never change."""

from __future__ import annotations

import asyncio
import hashlib
import math
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reinforge.interfaces import PolicyServer
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray


class FrozenPolicy(PolicyServer):
    """Serves the model in a file or folder; log-probs of its replies are unknown (NaN)."""

    def __init__(self, path: Path, chat_template: str | None, seed: int):
        self._path, self._template, self._seed, self._calls = path, chat_template, seed, 0
        self._thread = ThreadPoolExecutor(1, "exported-model")

    @property
    def version(self) -> int:
        return 0

    @property
    def model_name(self) -> str:
        return str(self._path)

    @property
    def chat_template(self) -> str | None:
        return self._template

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: [self._score(row) for row in token_ids])

    @abstractmethod
    def _score(self, row: Sequence[int]) -> FloatArray:
        """Returns what `score` returns for one row."""

    def _make_reply(
        self,
        request: ModelRequest,
        prompt: Sequence[int],
        tokens: Sequence[int],
        text: str,
        *,
        is_done: bool,
        raw: str | None,
    ) -> ModelReply:
        reason = "stop" if is_done else "length"
        unknown, temperature = (math.nan,) * len(tokens), request.sampling.temperature
        record = TokenLogprobs(tuple(prompt), tuple(tokens), unknown, finish_reason=reason, temperature=temperature)
        message = {"role": "assistant", "content": text}
        return ModelReply(message, reason, record, len(prompt), len(tokens), raw_text=raw)

    async def publish(self, version: int) -> None:
        """Does nothing: the weights do not change."""

    async def fingerprint(self) -> str:
        return hashlib.sha256(self.model_name.encode()).hexdigest()[:16]

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
