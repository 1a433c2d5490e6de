"""The policy that vLLM servers sample: our tokens go in, their tokens and log-probs come out."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from reinforge.errors import BackendError
from reinforge.interfaces import PolicyServer
from reinforge.scale.engine_group import find_conversation
from reinforge.scale.vllm.client import GenerateAnswer, GeneratedChoice
from reinforge.types.request import Grammar, Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray

if TYPE_CHECKING:
    from reinforge.engine.request_codec import RequestCodec
    from reinforge.engine.sampling.running_batch import SampleRequest

MAX_SEED = 2**63 - 1
FLOAT32_TOLERANCE = 1e-3
"""Nats: its kernels sum in other orders than the learner's; 5e-5 were seen with 30 layers on a CPU."""
FINISH_REASONS = ("stop", "length")
NUM_LONGEST, MAX_LONGEST = 3, 2048
"""How many of the longest prompts are remembered for the check of the next weights, and how long they may be."""
STRUCTURED_OUTPUTS = {"json_schema": "json", "regex": "regex", "lark": "grammar"}


class Admission:
    """Counts the requests in flight; weights change while it is closed, and none is unless they are kept."""

    def __init__(self) -> None:
        self._is_open, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_idle.set()
        self._count = 0
        self._failure: BaseException | None = None

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Waits until requests are admitted; the block is one of them."""
        await self.wait()
        self._count += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._is_idle.set()

    async def wait(self) -> None:
        await self._is_open.wait()
        if self._failure is not None:
            raise BackendError(f"the vLLM server does not have the newest weights: {self._failure}")

    async def close(self, *, waits: bool = True) -> None:
        self._is_open.clear()
        if waits:
            await self._is_idle.wait()

    def open(self, failure: BaseException | None = None) -> None:
        """Admits requests again.

        Args:
            failure: Why the weights are unknown, so that every request fails; None: they are known.
        """
        self._failure = failure
        self._is_open.set()


class WeightPublisher(Protocol):
    """What a policy asks of the servers that sample it."""

    admission: Admission
    keeps_adapters: bool  # replies in flight continue with the adapter of their version

    @property
    def version(self) -> int:
        """The version that they have."""

    def name_version(self, version: int) -> str:
        """Returns the label that every token of a version carries."""

    async def generate(self, key: str, body: dict[str, Any], adapter: str | None) -> tuple[GenerateAnswer, int]:
        """Samples one reply of a conversation; returns the version that was served when it began, too."""

    async def publish(self, version: int) -> None:
        """Sends the weights of all adapters, and opens admission when they are served."""


class VLLMPolicy(PolicyServer):
    """Samples one adapter, or all weights.

    Args:
        own: Scores tokens, in every process that trains.
        adapter: Its name on the servers; None: all weights are trained.
    """

    def __init__(self, own: PolicyServer, codec: RequestCodec, adapter: str | None, server: WeightPublisher):
        self.own, self.codec, self.adapter, self._server = own, codec, adapter, server
        self.tolerance, self.max_model_len = max(own.tolerance, FLOAT32_TOLERANCE), codec.max_model_len
        self.longest_prompts: list[tuple[int, tuple[int, ...]]] = []

    @property
    def version(self) -> int:
        return self._server.version

    @property
    def model_name(self) -> str:
        return self.own.model_name

    @property
    def chat_template(self) -> str | None:
        return self.own.chat_template

    @property
    def history(self) -> str:
        return self.own.history

    async def sample(self, request: ModelRequest) -> ModelReply:
        sampled = self.codec.build_request(request, None, await self.codec.compile_grammar(request))
        body, key = self.build_body(sampled, request.grammar), find_conversation(request)
        async with self._server.admission.enter():
            self.fill_in(sampled, *await self._server.generate(key, body, self.adapter))
            self._remember(sampled.prompt)
        return self.codec.build_reply(request, sampled)

    def fill_in(self, sampled: SampleRequest, answer: GenerateAnswer, oldest: int) -> None:
        """Sets the tokens of a reply.

        Args:
            oldest: The version that was served when it began.
        """
        if tuple(answer.prompt_token_ids) != sampled.prompt:
            raise BackendError(
                f"the vLLM server sampled from a prompt of {len(answer.prompt_token_ids)} tokens, which is not the one "
                f"of {len(sampled.prompt)} that it was given"
            )
        choice = answer.choices[0]
        starts = self._find_versions(choice, oldest)
        fill_in_tokens(sampled, choice)
        sampled.version = starts[0][1]
        sampled.later_versions = [each for each in starts[1:] if each[0] < len(sampled.token_ids)]

    def build_body(
        self, sampled: SampleRequest, grammar: Grammar | None = None, *, reads_prefix_cache: bool = True
    ) -> dict[str, Any]:
        """Returns the request of one reply, but for the model.

        Args:
            reads_prefix_cache: False: the server computes the whole prompt.
        """
        params = sampled.params
        settings: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "max_tokens": sampled.limit,
            "stop_token_ids": sorted({*(() if params.ignore_eos else self.codec.ends), *params.stop_token_ids}),
            "logprobs": sampled.num_top_logprobs,
            "detokenize": bool(params.stop),
        }
        if not reads_prefix_cache:
            settings["skip_reading_prefix_cache"] = True
        if params.seed is not None:
            settings["seed"] = params.seed & MAX_SEED
        if params.ignore_eos:
            settings["ignore_eos"] = True
        if params.stop:
            settings["stop"] = list(params.stop)
        if params.logit_bias:
            settings["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
        if grammar is not None:
            settings["structured_outputs"] = {STRUCTURED_OUTPUTS[grammar.kind]: grammar.text}
        return {
            "token_ids": list(sampled.prompt),
            "return_token_ids": True,
            "sampling_params": settings,
        }

    def _find_versions(self, choice: GeneratedChoice, oldest: int) -> list[tuple[int, int]]:
        """Returns from which token on which version sampled a reply; the first is 0."""
        if self._server.keeps_adapters:  # the label is that of the newest adapter
            return [(0, oldest)]
        known = {self._server.name_version(version): version for version in range(oldest, self.version + 1)}
        spans = choice.weight_versions or []
        starts = [(span.start, known.get(span.version, -1)) for span in spans]
        is_rising = all(one[0] < next_[0] and one[1] < next_[1] for one, next_ in pairwise(starts))
        if not starts or starts[0][0] or starts[0][1] < 0 or not is_rising:
            found = ", ".join(span.version for span in spans) or "no label"
            expected = " or ".join(known)
            raise BackendError(
                f"the vLLM server sampled a reply from other weights than it was sent ({found} instead of "
                f"{expected}); let no other program change its weights"
            )
        return starts

    def _remember(self, prompt: tuple[int, ...]) -> None:
        entry = (len(prompt), prompt)
        if len(prompt) > MAX_LONGEST or entry in self.longest_prompts:
            return
        heapq.heappush(self.longest_prompts, entry)
        if len(self.longest_prompts) > NUM_LONGEST:
            heapq.heappop(self.longest_prompts)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        return await self.own.score(token_ids)

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        return await self.codec.encode(request, reply)

    async def publish(self, version: int) -> None:
        await self._server.publish(version)

    async def fingerprint(self) -> str:
        return await self.own.fingerprint()


def _find_stop(sampled: SampleRequest, token_ids: list[int]) -> int | None:
    """Returns how many tokens a reply has up to a stop string, where the embedded sampler would end it; None: all.

    The server looks for the text in its own decoding, which may find it later, or not at all within broken characters.
    """
    if sampled.has_stop_text is None:
        return None
    for end in range(1, len(token_ids) + 1):
        if sampled.has_stop_text(token_ids[max(0, end - sampled.num_stop_tokens) : end]):
            return end
    return None


def fill_in_tokens(sampled: SampleRequest, choice: GeneratedChoice) -> None:
    if choice.finish_reason not in FINISH_REASONS:
        raise BackendError(f"the vLLM server ended a reply with finish_reason {choice.finish_reason!r}")
    positions = choice.logprobs.content
    if not choice.token_ids or [each["token_id"] for each in positions] != choice.token_ids:
        raise BackendError(
            f"the vLLM server answered with {len(choice.token_ids)} tokens and the log-probs of {len(positions)}, "
            "which are not the same tokens"
        )
    end = _find_stop(sampled, choice.token_ids)
    positions = positions[:end]
    sampled.token_ids = tuple(choice.token_ids[:end])
    sampled.logprobs = tuple(each["logprob"] for each in positions)
    sampled.finish_reason = choice.finish_reason if end is None else "stop"
    if sampled.num_top_logprobs:
        tops = [
            sorted(each.get("top_logprobs", ()), key=lambda token: -token["logprob"])[: sampled.num_top_logprobs]
            for each in positions
        ]
        sampled.top_logprobs = [
            ([token["token_id"] for token in top], [token["logprob"] for token in top]) for top in tops
        ]
    params, constraint = sampled.params, sampled.constraint
    has_filters = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    if constraint is not None or has_filters:
        sampled.processed_logprobs = list(sampled.logprobs)
    if constraint is not None and not constraint.changes_logits and not has_filters:
        sampled.supports = constraint.replay(sampled.token_ids)
