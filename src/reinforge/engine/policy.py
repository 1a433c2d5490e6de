"""The policy that samples in this process: chat requests in, replies with their exact tokens out."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import threading
from collections.abc import AsyncGenerator, Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from reinforge.engine.callers import Caller, Outboxes
from reinforge.engine.model.causal_model import DEFAULT_ADAPTER
from reinforge.engine.model.chat_template import PromptRenderer
from reinforge.engine.model.text_stream import TextStream
from reinforge.engine.sampling.params import check_params
from reinforge.engine.sampling.running_batch import SampleRequest, SamplerStats
from reinforge.engine.sampling.sampler import ReplySampler
from reinforge.errors import ContextOverflow, EngineError
from reinforge.interfaces import PolicyServer
from reinforge.types.request import (
    CLIENT,
    Message,
    ModelReply,
    ModelRequest,
    ReplyPiece,
    TokenLogprob,
    TokenLogprobs,
)
from reinforge.types.sample import FloatArray
from reinforge.types.supports import Supports

if TYPE_CHECKING:
    from reinforge.engine.sampling.constraints import TokenConstraint
    from reinforge.engine.sampling.grammar import CompiledGrammar, GrammarCompiler
    from reinforge.types.request import SamplingParams

logger = logging.getLogger(__name__)

SHORT_PROMPT = 1 << 16
"""Characters, with 100 for each message and tool, that are rendered in less than a few milliseconds."""
_RENDERER = ThreadPoolExecutor(1, "render-prompt")


class AdmissionState(enum.Enum):
    """Whether new replies may begin.

    OPEN -> JOB (a job changes the weights) -> ENDED (its weights are not published yet) -> OPEN
    With a served copy of the weights, replies of the published version begin in all three.
    """

    OPEN = "open"
    JOB = "job"
    ENDED = "ended"


BFLOAT16_TOLERANCE = 0.5
"""Sampler and learner sum in different orders, and each sum is rounded to 8 bits: 0.17 nats were seen with 6 layers."""


class EmbeddedPolicy(PolicyServer):
    """Samples in this process, from the module that the learner trains or from a copy that serves meanwhile.

    Any number of event loops and threads may call it at once.

    Args:
        sampler: Samples the replies, also those of other adapters.
        published: Called when admission opens.
        copy_weights: Copies the learner's weights to the sampler's; None: they are the same.
    """

    def __init__(
        self,
        sampler: ReplySampler,
        renderer: PromptRenderer,
        name: str,
        *,
        adapter: str = DEFAULT_ADAPTER,
        grammars: Callable[[], GrammarCompiler],
        score: Callable[[Sequence[Sequence[int]]], list[FloatArray]],
        fingerprint: Callable[[], str],
        published: Callable[[], None],
        copy_weights: Callable[[], None] | None = None,
    ):
        self.sampler, self.renderer, self.adapter = sampler, renderer, adapter
        self.max_model_len = sampler.model.max_model_len
        self._name, self._score, self._fingerprint, self._published = name, score, fingerprint, published
        self._copy_weights = copy_weights
        self._admission, self._next_version = AdmissionState.OPEN, 0
        if sampler.model.dtype.itemsize < 4:
            self.tolerance = BFLOAT16_TOLERANCE
        self._grammars, self._has_warned = grammars, False
        self._lock = threading.Lock()
        self._outboxes = Outboxes(sampler)
        self.ends = find_end_tokens(sampler.model.module, renderer.tokenizer)  # tokens that end a reply

    @property
    def version(self) -> int:
        return self.sampler.versions[self.adapter]

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def chat_template(self) -> str | None:
        return self.renderer.chat_template

    @property
    def history(self) -> str:
        return self.renderer.history

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply.

        Raises:
            ValueError: The sampler cannot follow the request's settings or its grammar, or the prompt cannot be
                tokenized.
            ContextOverflow: The prompt leaves no room for a reply.
            EngineError: The engine is closed, or failed while it sampled.
        """
        loop = asyncio.get_running_loop()
        caller = Caller(loop, loop.create_future())
        sampled = await self._prepare(request, caller)
        self._outboxes.post(loop, sampled, self._publish_if_ended)
        try:
            await caller.future
        except asyncio.CancelledError:
            sampled.cancelled = True
            raise
        if sampled.error is not None:
            raise sampled.error
        return self.build_reply(request, sampled)

    async def stream(
        self, request: ModelRequest, markers: Sequence[str] = ()
    ) -> AsyncGenerator[ReplyPiece | ModelReply, None]:
        """Yields the tokens of one reply as they are sampled, and then the reply; fails as `sample` does.

        Sampling stops when the generator is closed.
        """
        loop = asyncio.get_running_loop()
        caller = Caller(loop, loop.create_future())
        sampled = await self._prepare(request, caller)
        sampled.new_tokens = tokens = list[tuple[int, float]]()
        text, num_taken = self.renderer.open_text(markers, request.sampling.stop), 0
        self._outboxes.post(loop, sampled, self._publish_if_ended)
        try:
            while num_taken < len(tokens) or not caller.future.done():
                if num_taken == len(tokens):
                    caller.waiter = loop.create_future()
                    await caller.waiter
                    continue
                first, num_taken = num_taken, len(tokens)
                yield self._build_piece(sampled, slice(first, num_taken), text)
        finally:
            sampled.cancelled = not caller.future.done()
        if sampled.error is not None:
            raise sampled.error
        yield self.build_reply(request, sampled)

    async def _prepare(self, request: ModelRequest, caller: Caller) -> SampleRequest:
        """Returns what the sampler gets; long prompts are rendered in a thread, one after the other."""
        grammar = await self.compile_grammar(request)
        texts = (request.prompt or "", *(message.get("content") or "" for message in request.messages))
        if sum(map(len, texts)) + 100 * (len(texts) + len(request.tools or ())) <= SHORT_PROMPT:
            built = self.build_request(request, caller, grammar)
        else:
            built = await caller.loop.run_in_executor(_RENDERER, self.build_request, request, caller, grammar)
        built.client = CLIENT.get()
        return built

    async def compile_grammar(self, request: ModelRequest) -> CompiledGrammar | None:
        """Returns the grammar that a reply must match, ready for the sampler; None: it is free."""
        if request.grammar is None:
            return None
        return await self._grammars().compile(self.renderer.bind_grammar(request.grammar))

    async def count_prompt(self, request: ModelRequest) -> int:
        return len(await asyncio.get_running_loop().run_in_executor(_RENDERER, self.renderer.render, request))

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns log p of each token given the tokens before it, at temperature 1, by a forward without cache."""
        return await asyncio.to_thread(self._score, token_ids)

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        """Returns the tokens of a given reply, by the chat template, with the token that ends it.

        Raises:
            ContextOverflow: Prompt and reply do not fit the context.
            EngineError: The template rejects the messages.
        """
        prompt, token_ids = await asyncio.to_thread(self.renderer.encode, request, reply, self.ends)
        if len(prompt) + len(token_ids) > self.max_model_len:
            count = len(prompt) + len(token_ids)
            raise ContextOverflow(
                f"prompt and reply have {count} tokens, but the limit is {self.max_model_len} (max_model_len)"
            )
        return TokenLogprobs(prompt, token_ids, (math.nan,) * len(token_ids), policy_version=-1)

    async def publish(self, version: int) -> None:
        """Opens admission on the weights of `version`; with a served copy, once no reply is in flight."""
        if self._copy_weights is None:
            self.open(version)
        else:
            await asyncio.to_thread(self.open, version)

    async def fingerprint(self) -> str:
        return await asyncio.to_thread(self._fingerprint)

    # Called by the engine.

    def close_admission(self) -> None:
        """Begins a job; returns when no reply is in flight, or at once if a copy of the weights serves meanwhile."""
        with self._lock:
            if self._admission is AdmissionState.JOB:
                raise EngineError("a job is already open; call end_job() or rollback() first")
            self._admission = AdmissionState.JOB
        if self._copy_weights is None:
            self.sampler.pause(self.adapter)

    def end_job(self, next_version: int | None = None) -> None:
        """Ends a job; `publish` opens admission, or else the first request does, on `next_version`.

        With a served copy only `publish` does: requests come at any time.

        Args:
            next_version: Version of the weights if a request comes before `publish`; None: the current one plus 1.
        """
        with self._lock:
            self._admission = AdmissionState.ENDED
            self._next_version = self.version + 1 if next_version is None else next_version
        if self.sampler.has_waiting(self.adapter):
            self._publish_if_ended()

    def open(self, version: int) -> None:
        """Opens admission; replies that begin from now on carry `version`."""
        with self._lock:
            self._refuse_open_job()
        if self._copy_weights is not None:
            self.sampler.pause(self.adapter, self._copy_weights)  # without the lock, which new requests take
        with self._lock:
            self._refuse_open_job()
            self._open(version)

    def _refuse_open_job(self) -> None:
        if self._admission is AdmissionState.JOB:
            raise EngineError("publish: the job is still open; call end_job() first")

    def _publish_if_ended(self) -> None:
        with self._lock:
            if self._admission is AdmissionState.ENDED and self._copy_weights is None:
                self._open(self._next_version)

    def _open(self, version: int) -> None:
        self._admission = AdmissionState.OPEN
        self._published()
        self.sampler.resume(version, self.adapter)

    def release_memory(self) -> None:
        self.sampler.release_memory()

    def count_waiting(self) -> int:
        return self.sampler.stats().waiting

    def stats(self) -> SamplerStats:
        return self.sampler.stats()

    def build_request(
        self, request: ModelRequest, caller: Caller | None, grammar: CompiledGrammar | None = None
    ) -> SampleRequest:
        """Returns what a sampler gets: the prompt's tokens, limits and constraints.

        Args:
            caller: Waits for the reply; None: another program samples it.
            grammar: What the reply must match.

        Raises:
            ValueError: The sampler cannot follow the request's settings, or the prompt cannot be tokenized.
            ContextOverflow: The prompt leaves no room for a reply.
        """
        check_params(request.sampling, self.sampler.model.vocab_size, request.num_top_logprobs)
        prompt, params = self.renderer.render(request, self.max_model_len), request.sampling
        if request.prompt is not None:
            self._check_prompt(prompt)
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens, but the limit is {self.max_model_len} (max_model_len)"
            )
        limit = room if params.max_tokens is None else max(1, min(room, params.max_tokens))
        constraint = self._build_constraint(params, grammar)
        if constraint is not None and constraint.changes_logits:
            self._warn_of_untrained_replies()
        built = SampleRequest(prompt, limit, params, constraint, adapter=self.adapter, owner=caller)
        built.num_top_logprobs = request.num_top_logprobs
        if params.stop or params.stop_token_ids:
            built.num_stop_tokens = 4 + max((len(text.encode()) for text in params.stop), default=0)
            built.has_stop_text = partial(self._has_stop, params.stop, frozenset(params.stop_token_ids))
        return built

    def _build_constraint(self, params: SamplingParams, grammar: CompiledGrammar | None) -> TokenConstraint | None:
        if grammar is None and not (params.logit_bias or params.frequency_penalty or params.presence_penalty):
            return None
        from reinforge.engine.sampling.constraints import build_constraint

        return build_constraint(params, self.sampler.model.vocab_size, grammar)

    def _has_stop(self, texts: Sequence[str], ends: Container[int], token_ids: list[int]) -> bool:
        if token_ids[-1] in ends:
            return True
        end = self.renderer.decode(token_ids) if texts else ""
        return any(text in end for text in texts)

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        """Refuses token ids that a client made up."""
        size = self.sampler.model.vocab_size
        wrong = next((token for token in prompt if isinstance(token, bool) or not 0 <= token < size), None)
        if wrong is not None:
            raise ValueError(f"the prompt has the token {ascii(wrong)[:40]}; expected token ids from 0 to {size - 1}")

    def _warn_of_untrained_replies(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "replies sampled with frequency_penalty, presence_penalty or logit_bias (other than -100) are recorded "
                "but not trained: the model's own distribution is not the one that they were sampled from"
            )

    def _build_piece(self, sampled: SampleRequest, part: slice, text: TextStream) -> ReplyPiece:
        token_ids, logprobs = zip(*(sampled.new_tokens or ())[part], strict=True)
        tokens = TokenLogprobs(
            prompt_token_ids=sampled.prompt,
            token_ids=token_ids,
            logprobs=logprobs,
            policy_version=sampled.version,
            texts=self.renderer.decode_each(token_ids),
            top_logprobs=self._name_top_logprobs(sampled.top_logprobs[part]),
        )
        return ReplyPiece(text.add(token_ids), tokens)

    def _name_top_logprobs(
        self, ranked: Sequence[tuple[list[int], list[float]]]
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        return tuple(
            tuple(
                TokenLogprob(text, logprob, token_id=token)
                for text, logprob, token in zip(self.renderer.decode_each(token_ids), logprobs, token_ids, strict=True)
            )
            for token_ids, logprobs in ranked
        )

    def build_reply(self, request: ModelRequest, sampled: SampleRequest) -> ModelReply:
        text, is_greedy = self.renderer.decode(sampled.token_ids), request.sampling.temperature == 0
        raw = self.renderer.decode_raw(sampled.token_ids)
        tokens = TokenLogprobs(
            prompt_token_ids=sampled.prompt,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            policy_version=sampled.version,
            finish_reason=sampled.finish_reason,
            temperature=request.sampling.temperature,
            restricted=is_greedy or bool(sampled.processed_logprobs),
            texts=self.renderer.decode_each(sampled.token_ids),
            processed_logprobs=(0.0,) * len(sampled.token_ids) if is_greedy else tuple(sampled.processed_logprobs),
            supports=Supports.from_sets(sampled.supports) if sampled.supports else None,
            top_logprobs=self._name_top_logprobs(sampled.top_logprobs),
        )
        stop = request.sampling.stop
        return ModelReply(
            {"role": "assistant", "content": cut_at_stop(text, stop)},
            sampled.finish_reason,
            tokens,
            len(sampled.prompt),
            len(sampled.token_ids),
            raw_text=None if raw is None else cut_at_stop(raw, stop),
        )


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


def find_end_tokens(module: Any, tokenizer: Any) -> list[int]:
    """Returns the tokens that end a reply: the tokenizer's and those of the generation config."""
    config = getattr(module, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return sorted({token for token in (*ends, tokenizer.eos_token_id) if token is not None})
