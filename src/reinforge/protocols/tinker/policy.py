"""The policy that Tinker's service samples: our chat template and tokenizer here, tokens and log-probs from there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reinforge.errors import ContextOverflow
from reinforge.interfaces import PolicyServer
from reinforge.protocols.tinker.service import TrainingService
from reinforge.types.request import Message, ModelReply, ModelRequest, SamplingParams, TokenLogprobs
from reinforge.types.sample import FloatArray

if TYPE_CHECKING:
    from reinforge.engine.model.chat_template import PromptRenderer

TOLERANCE = 0.5
"""The service samples and trains with other kernels, in bfloat16."""
FIXED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": ()}
"""Settings that must have these values: the service's losses are over the whole vocabulary."""


class TinkerPolicy(PolicyServer):
    """Samples from the weights that were published last."""

    tolerance = TOLERANCE

    def __init__(
        self,
        service: TrainingService,
        renderer: PromptRenderer,
        name: str,
        max_model_len: int,
        ends: Sequence[int],
    ):
        self._service, self.renderer, self._name = service, renderer, name
        self.max_model_len, self._ends, self._version = max_model_len, tuple(ends), 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def chat_template(self) -> str | None:
        return self.renderer.chat_template

    async def sample(self, request: ModelRequest) -> ModelReply:
        from reinforge.engine.policy import cut_at_stop

        params = request.sampling
        _check_params(request)
        prompt = self.renderer.render(request)
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ContextOverflow(f"the prompt has {len(prompt)} tokens, but the limit is {self.max_model_len}")
        limit = room if params.max_tokens is None else max(1, min(room, params.max_tokens))
        asked = SamplingParams(params.temperature, max_tokens=limit, stop=params.stop, seed=params.seed)
        version = self._version
        reply = await self._service.sample(prompt, asked)
        token_ids = tuple(reply.token_ids)
        is_greedy = params.temperature == 0
        tokens = TokenLogprobs(
            prompt,
            token_ids,
            tuple(reply.logprobs),
            policy_version=version,
            finish_reason=reply.stop_reason,
            temperature=params.temperature,
            restricted=is_greedy,
            texts=self.renderer.decode_each(token_ids),
            processed_logprobs=(0.0,) * len(token_ids) if is_greedy else (),
        )
        raw = self.renderer.decode_raw(token_ids)
        return ModelReply(
            {"role": "assistant", "content": cut_at_stop(self.renderer.decode(token_ids), params.stop)},
            reply.stop_reason,
            tokens,
            len(prompt),
            len(token_ids),
            raw_text=None if raw is None else cut_at_stop(raw, params.stop),
        )

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        return [await self._service.score(row) for row in token_ids]

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        prompt, token_ids = self.renderer.encode(request, reply, self._ends)
        return TokenLogprobs(prompt, token_ids, (float("nan"),) * len(token_ids), policy_version=-1)

    async def publish(self, version: int) -> None:
        await asyncio.to_thread(self._service.publish)
        self._version = version

    async def fingerprint(self) -> str:
        return f"tinker-{self._version}"


def _check_params(request: ModelRequest) -> None:
    for name, value in FIXED.items():
        if getattr(request.sampling, name) != value:
            raise ValueError(f"{name} is {getattr(request.sampling, name)}; with Tinker's service it must be {value}")
    if request.sampling.temperature not in (0, 1):
        raise ValueError(
            f"temperature is {request.sampling.temperature}; with Tinker's service it must be 1 (or 0 in validation): "
            "its losses compute log-probs at temperature 1"
        )
    if request.grammar is not None or request.tool_choice not in ("auto", "none"):
        raise ValueError("Tinker's service enforces no grammar: leave response_format and tool_choice out")
    if request.num_top_logprobs:
        raise ValueError("top_logprobs is not available with Tinker's service")
