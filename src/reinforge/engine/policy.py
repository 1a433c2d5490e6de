"""The policy that samples in this process: chat requests in, replies with their exact tokens out."""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from reinforge.config.finetuning_blocks import InFlight
from reinforge.engine.callers import Caller, Outboxes
from reinforge.engine.model.causal_model import DEFAULT_ADAPTER
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.engine.request_codec import RequestCodec, find_end_tokens
from reinforge.engine.sampling.running_batch import ABORTED, SampleRequest, SamplerStats
from reinforge.engine.sampling.sampler import ReplySampler
from reinforge.errors import EngineError
from reinforge.interfaces import PolicyServer
from reinforge.types.request import CLIENT, Message, ModelReply, ModelRequest, ReplyPiece, TokenLogprobs
from reinforge.types.sample import FloatArray

if TYPE_CHECKING:
    from reinforge.engine.prompts.reply_text import TextStream
    from reinforge.engine.sampling.grammar import GrammarCompiler

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
        in_flight: What happens to the replies in flight when weights are copied; see `LimitsConfig`.
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
        in_flight: InFlight = "wait",
    ):
        self.sampler, self.renderer, self.adapter = sampler, renderer, adapter
        self.max_model_len = sampler.model.max_model_len
        self.ends = find_end_tokens(sampler.model.module, renderer.tokenizer)
        sizes = self.max_model_len, sampler.model.vocab_size
        self.codec = RequestCodec(renderer, adapter, *sizes, self.ends, grammars)
        self._name, self._score, self._fingerprint, self._published = name, score, fingerprint, published
        self._copy_weights, self._in_flight = copy_weights, in_flight
        self._admission, self._next_version = AdmissionState.OPEN, 0
        if sampler.model.dtype.itemsize < 4:
            self.tolerance = BFLOAT16_TOLERANCE
        self._lock = threading.Lock()
        self._outboxes = Outboxes(sampler)

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
        while True:
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
            if sampled.finish_reason != ABORTED:
                return self.codec.build_reply(request, sampled)

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
        yield self.codec.build_reply(request, sampled)

    async def _prepare(self, request: ModelRequest, caller: Caller) -> SampleRequest:
        """Returns what the sampler gets; long prompts are rendered in a thread, one after the other."""
        grammar = await self.codec.compile_grammar(request)
        texts = (request.prompt or "", *(message.get("content") or "" for message in request.messages))
        if sum(map(len, texts)) + 100 * (len(texts) + len(request.tools or ())) <= SHORT_PROMPT:
            built = self.codec.build_request(request, caller, grammar)
        else:
            built = await caller.loop.run_in_executor(_RENDERER, self.codec.build_request, request, caller, grammar)
        built.client = CLIENT.get()
        return built

    async def count_prompt(self, request: ModelRequest) -> int:
        return len(await asyncio.get_running_loop().run_in_executor(_RENDERER, self.renderer.render, request))

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns log p of each token given the tokens before it, at temperature 1, by a forward without cache."""
        return await asyncio.to_thread(self._score, token_ids)

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        return await self.codec.encode(request, reply)

    async def publish(self, version: int) -> None:
        """Opens admission on the weights of `version`; a served copy waits for replies, or does as `in_flight` says."""
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
        if self._copy_weights is not None:  # without the lock, which new requests take
            if self._in_flight == "wait":
                self.sampler.pause(self.adapter, self._copy_weights)
            else:
                self.sampler.exchange(version, self._copy_weights, self.adapter, self._in_flight)
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

    def _build_piece(self, sampled: SampleRequest, part: slice, text: TextStream) -> ReplyPiece:
        token_ids, logprobs = zip(*(sampled.new_tokens or ())[part], strict=True)
        tokens = TokenLogprobs(
            prompt_token_ids=sampled.prompt,
            token_ids=token_ids,
            logprobs=logprobs,
            policy_version=sampled.version,
            texts=self.renderer.decode_each(token_ids),
            top_logprobs=self.codec.name_top_logprobs(sampled.top_logprobs[part]),
        )
        return ReplyPiece(text.add(token_ids), tokens)
