"""The policy behind the port: chat requests in, replies with their exact tokens out."""

from __future__ import annotations

import asyncio
import enum
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforge.engine.model.causal_model import DEFAULT, CausalModel
from reinforge.engine.model.chat_template import PromptRenderer
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.engine.sampling.sampler import Sampler
from reinforge.engine.sampling.stats import SamplerStats
from reinforge.engine.sampling.threads import Load
from reinforge.errors import EngineError
from reinforge.interfaces import ContextOverflow, PolicyServer
from reinforge.types.request import Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray
from reinforge.types.supports import Supports

MAX_TURNS = 8
"""Turns of an event loop that requests are gathered for while more keep coming."""


class Gate(enum.Enum):
    """Whether replies may begin.

    OPEN -> JOB (a job changes the weights) -> ENDED (nobody has published yet) -> OPEN
    """

    OPEN = "open"
    JOB = "job"
    ENDED = "ended"


@dataclass(eq=False)
class Outbox:
    """Requests of one event loop on their way to the sampler, and how busy that loop is."""

    requests: list[SampleRequest] = field(default_factory=list)
    load: Load = field(default_factory=Load)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who waits for a reply."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


BFLOAT16_TOLERANCE = 0.5
"""Sampler and learner sum in other orders, and each sum is rounded to 8 bits: 0.17 nats were seen with 6 layers."""


class EmbeddedPolicy(PolicyServer):
    """Samples in this process, from the module that the learner trains.

    Many loops and threads may ask at once. Requests that are ready in the same turn of a loop reach the sampler
    together, and the replies that a step finishes come back with one wake-up a loop.

    Args:
        sampler: Draws the replies, those of other adapters too.
        renderer: The model's tokenizer and template.
        name: The model's name.
        adapter: Which of the model's adapters draws.
        score: Log-probs by the learner's path.
        fingerprint: Hash of the weights.
        published: Called when admission opens.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: PromptRenderer,
        name: str,
        *,
        adapter: str = DEFAULT,
        score: Callable[[Sequence[Sequence[int]]], list[FloatArray]],
        fingerprint: Callable[[], str],
        published: Callable[[], None],
    ):
        self.sampler, self.renderer, self.adapter = sampler, renderer, adapter
        self.max_context = sampler.model.max_context
        self._name, self._score, self._fingerprint, self._published = name, score, fingerprint, published
        self._gate, self._next_version = Gate.OPEN, 0
        if sampler.model.dtype.itemsize < 4:
            self.tolerance = BFLOAT16_TOLERANCE
        self._lock = threading.Lock()
        self._outboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Outbox] = weakref.WeakKeyDictionary()
        self._ends = end_tokens(sampler.model, renderer.tokenizer)

    @property
    def version(self) -> int:
        """The version of the weights that replies are drawn from now."""
        return self.sampler.versions[self.adapter]

    @property
    def model_name(self) -> str:
        """The model's name, for `target_model` and the record."""
        return self._name

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's template."""
        return self.renderer.chat_template

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Draws one reply.

        Raises:
            ContextOverflow: The prompt leaves no room for a reply.
            EngineError: The engine is closed, or failed while it drew.
        """
        loop = asyncio.get_running_loop()
        drawing = self._prepare(request, Caller(loop, loop.create_future()))
        self._post(loop, drawing)
        try:
            await drawing.owner.future  # type: ignore[attr-defined]
        except asyncio.CancelledError:
            drawing.cancelled = True
            raise
        if drawing.error is not None:
            raise drawing.error
        return self._reply(request, drawing)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns log p of each token given those before it, at temperature 1: a plain forward without a cache."""
        return await asyncio.to_thread(self._score, token_ids)

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        """Returns the tokens of a given reply, by the chat template and with the token that ends it.

        Raises:
            ContextOverflow: Prompt and reply do not fit the context.
            EngineError: The template refuses the messages.
        """
        prompt, token_ids = await asyncio.to_thread(self.renderer.encode, request, reply, self._ends)
        if len(prompt) + len(token_ids) > self.max_context:
            count = len(prompt) + len(token_ids)
            raise ContextOverflow(f"prompt and reply have {count} tokens, the context {self.max_context}")
        return TokenLogprobs(prompt, token_ids, (math.nan,) * len(token_ids), policy_version=-1)

    async def publish(self, version: int) -> None:
        """Opens admission on the weights of `version`.

        Raises:
            EngineError: A job is changing the weights.
        """
        self.open(version)

    async def fingerprint(self) -> str:
        """Returns a short hash of the weights as they are now."""
        return await asyncio.to_thread(self._fingerprint)

    # What the engine calls.

    def close_gate(self) -> None:
        """Begins a job: returns when no reply is in flight.

        Raises:
            EngineError: A job is open already.
        """
        with self._lock:
            if self._gate is Gate.JOB:
                raise EngineError("a job is open already; end_job() or rollback() it first")
            self._gate = Gate.JOB
        self.sampler.pause(self.adapter)

    def end_job(self, next_version: int | None = None) -> None:
        """Ends a job; `publish` opens admission, and so does the first request, on `next_version`.

        Args:
            next_version: Version of the weights for a request that finds nothing published; None: one more.
        """
        with self._lock:
            self._gate = Gate.ENDED
            self._next_version = self.version + 1 if next_version is None else next_version
        if self.sampler.is_asked(self.adapter):
            self._publish_if_ended()

    def open(self, version: int) -> None:
        """Opens admission; replies begun from now on carry `version`."""
        with self._lock:
            if self._gate is Gate.JOB:
                raise EngineError("publish: the job is still open; end_job() first")
            self._open(version)

    def _publish_if_ended(self) -> None:
        with self._lock:
            if self._gate is Gate.ENDED:
                self._open(self._next_version)

    def _open(self, version: int) -> None:
        self._gate = Gate.OPEN
        self._published()
        self.sampler.resume(version, self.adapter)

    def stats(self) -> SamplerStats:
        """Returns what the sampler has done and holds."""
        return self.sampler.stats()

    def _prepare(self, request: ModelRequest, caller: Caller) -> SampleRequest:
        prompt, params = self.renderer.render(request), request.sampling
        room = self.max_context - len(prompt)
        if room < 1:
            raise ContextOverflow(f"the prompt has {len(prompt)} tokens, the context {self.max_context}")
        limit = room if params.max_tokens is None else max(1, min(room, params.max_tokens))
        drawing = SampleRequest(prompt, limit, params, adapter=self.adapter, owner=caller)
        if params.stop:
            drawing.num_stop_tokens = 4 + max(len(text.encode()) for text in params.stop)
            drawing.stops = lambda token_ids: any(text in self.renderer.read(token_ids) for text in params.stop)
        return drawing

    def _post(self, loop: asyncio.AbstractEventLoop, drawing: SampleRequest) -> None:
        """Puts a request into its loop's outbox; the outbox is sent when it has stopped growing."""
        with self._lock:
            outbox = self._outboxes.get(loop) or self._outboxes.setdefault(loop, Outbox())
        outbox.requests.append(drawing)
        if len(outbox.requests) == 1:
            loop.call_soon(self._send, loop, outbox, 1, MAX_TURNS)

    def _send(self, loop: asyncio.AbstractEventLoop, outbox: Outbox, seen: int, turns: int) -> None:
        if len(outbox.requests) > seen and turns:
            loop.call_soon(self._send, loop, outbox, len(outbox.requests), turns - 1)
            return
        requests, outbox.requests = outbox.requests, []
        try:
            self.sampler.submit(requests, outbox.load.look())
        except EngineError as error:
            for request in requests:
                request.error = error
            wake(requests)
        self._publish_if_ended()

    def _reply(self, request: ModelRequest, drawn: SampleRequest) -> ModelReply:
        text, is_greedy = self.renderer.read(drawn.token_ids), request.sampling.temperature == 0
        cuts = [text.find(stop) for stop in request.sampling.stop if stop in text]
        tokens = TokenLogprobs(
            prompt_token_ids=drawn.prompt,
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            policy_version=drawn.version,
            finish_reason=drawn.finish_reason,
            temperature=request.sampling.temperature,
            restricted=is_greedy or bool(drawn.supports),
            texts=self.renderer.texts(drawn.token_ids),
            processed_logprobs=(0.0,) * len(drawn.token_ids) if is_greedy else tuple(drawn.processed_logprobs),
            supports=Supports.of(drawn.supports) if drawn.supports else None,
        )
        message = {"role": "assistant", "content": text[: min(cuts)] if cuts else text}
        return ModelReply(message, drawn.finish_reason, tokens, len(drawn.prompt), len(drawn.token_ids))


def end_tokens(model: CausalModel, tokenizer: Any) -> list[int]:
    """Returns the tokens that end a reply: the tokenizer's and those of the generation config."""
    config = getattr(model.module, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return sorted({token for token in (*ends, tokenizer.eos_token_id) if token is not None})


def deliver(requests: list[SampleRequest]) -> None:
    """Wakes everyone whose reply is done: one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[SampleRequest]] = {}
    for request in requests:
        by_loop.setdefault(request.owner.loop, []).append(request)  # type: ignore[attr-defined]
    for loop, done in by_loop.items():
        try:
            loop.call_soon_threadsafe(wake, done)
        except RuntimeError:  # the loop is closed: nobody waits any more
            continue


def wake(requests: list[SampleRequest]) -> None:
    """Ends the waiting of these requests; runs in their loop."""
    for request in requests:
        future = request.owner.future  # type: ignore[attr-defined]
        if not future.done():
            future.set_result(None)
