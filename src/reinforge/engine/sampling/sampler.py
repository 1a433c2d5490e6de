"""Continuous batching over the Hugging Face module, or its weights (`direct.py`), in a thread of its own.

A reply joins the running batch when there is a slot and leaves when it is done, at token boundaries. Its keys and
values are kept for the next turn of its conversation (`conversations.py`), so that prompts are read from where they are
new (`prefill.py`). A step is one `[B, 1]` forward over the slot cache and one transfer of the drawn tokens to the host,
where all bookkeeping is arrays over the slots.

Everything else that computes (the learner, scoring, loading) runs in this thread too, by `call`: libgomp keeps a pool
of workers for each thread that ever ran a parallel region, and once pools together have more threads than there are
cores, it stops their spinning, which halved the speed of both.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reinforge.engine.memory import is_out_of_memory
from reinforge.engine.model.causal_model import DEFAULT, CausalModel
from reinforge.engine.model.lora_batch import MixedAdapters
from reinforge.engine.model.masks import AttentionMasks
from reinforge.engine.sampling.fast_llama import DirectLlama, is_llama
from reinforge.engine.sampling.kv_cache import MIN_ROWS, SlotCache, round_up
from reinforge.engine.sampling.prefill import Opening, Prefill, batches_by_length, openings_of
from reinforge.engine.sampling.prefix_cache import Conversations, KeptSequence
from reinforge.engine.sampling.running_batch import Rows, SampleRequest
from reinforge.engine.sampling.stats import SamplerStats
from reinforge.engine.sampling.threads import sampling_threads
from reinforge.engine.sampling.token_drawing import Cuts, Kept, draw, uniforms
from reinforge.errors import EngineError
from reinforge.types.supports import MAX_SUPPORT

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREFILL_TOKENS = 2048
"""Padded tokens of prompts in one forward: memory is bounded, and activations stay near the caches."""


class Sampler:
    """Draws replies; `submit` from any thread, `deliver` is called from the sampler's thread.

    Args:
        model: The model; an adapter's weights change only between its `pause` and `resume`.
        eos_ids: Tokens that end a reply.
        max_batch: Slots.
        seed: Of the stream for requests that bring no seed.
        deliver: Takes the replies that one step finished.
        adapters: Names of the model's adapters, of which each request takes one.
        kept_bytes: Most memory of keys and values between the turns of conversations; 0: none are kept.
        deterministic: Nothing is kept, and prompts are read one by one: how a matrix product is cut into blocks
            depends on its rows, and with it the last bit. Decode steps have at least `MIN_ROWS` rows and lengths of
            whole chunks, which is enough for them on one thread (measured: 0 of 600 replies differ over random
            batches, against 101).
    """

    def __init__(
        self,
        model: CausalModel,
        eos_ids: Sequence[int],
        *,
        max_batch: int,
        seed: int,
        deliver: Callable[[list[SampleRequest]], None],
        adapters: Sequence[str] = (DEFAULT,),
        kept_bytes: int = 0,
        deterministic: bool = False,
    ):
        self.model, self.max_batch, self.seed = model, max_batch, seed
        self.versions = dict.fromkeys(adapters, 0)
        self.num_begun = 0
        self._eos = np.zeros(model.vocab_size, bool)
        self._eos[[token for token in eos_ids if token < model.vocab_size]] = True
        self._deliver = deliver
        self._prefill_tokens = 0 if deterministic else PREFILL_TOKENS
        self._masks = AttentionMasks(model)
        self._cache = SlotCache(model, max_batch)
        direct = DirectLlama(model, self._cache, self._masks) if is_llama(model) else None
        if direct is None:
            logger.info("this %s model is sampled by transformers' modules", model.config.model_type)
        self._prefill = Prefill(model, self._cache, self._masks, self._put, direct, is_mixed=len(adapters) > 1)
        self._mixed = MixedAdapters(model, MIN_ROWS if deterministic else 1) if len(adapters) > 1 else None
        self._conversations = Conversations(0 if deterministic else kept_bytes)
        self._rows = Rows(max_batch)
        self._taken: list[SampleRequest] = []
        self._waiting: deque[SampleRequest] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future]] = deque()
        self._changed = threading.Condition()
        self._closed: set[str] = set()
        self._closing = False
        self._load = 0.0
        self._sampled, self._prompt, self._prefilled, self._reused, self._steps = 0, 0, 0, 0, 0
        self._thread = threading.Thread(target=self._run, name="reinforge-engine", daemon=True)
        self._thread.start()
        try:
            self.call(self._check)
        except EngineError:
            self.close()
            raise

    # What other threads call.

    def submit(self, requests: Sequence[SampleRequest], load: float = 0.0) -> None:
        """Queues requests, in this order.

        Args:
            requests: Replies to draw.
            load: Share of its time that the caller's thread computes.

        Raises:
            EngineError: The sampler is closed.
        """
        with self._changed:
            if self._closing:
                raise EngineError("the engine is closed")
            self._waiting.extend(requests)
            self._load = load
            self._changed.notify_all()

    def pause(self, adapter: str = DEFAULT) -> None:
        """Admits no more by an adapter and returns when none of its replies is in flight; its requests wait."""
        with self._changed:
            self._closed.add(adapter)
        self.call(lambda: self._drain(adapter))

    def resume(self, version: int, adapter: str = DEFAULT) -> None:
        """Admits again; the adapter's replies begun from now on carry `version`."""
        with self._changed:
            self.versions[adapter] = version
            self._closed.discard(adapter)
            self._changed.notify_all()

    def is_asked(self, adapter: str) -> bool:
        """Returns True if requests wait for an adapter."""
        with self._changed:
            return any(request.adapter == adapter for request in self._waiting)

    def call(self, function: Callable[[], T]) -> T:
        """Returns what `function` returns, called in the sampler's thread between two steps.

        Raises:
            EngineError: The sampler is closed.
        """
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise EngineError("the engine is closed")
            self._calls.append((function, future))
            self._changed.notify_all()
        return future.result()

    def close(self) -> None:
        """Fails what is in flight or waits, and joins the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def stats(self) -> SamplerStats:
        """Returns the counts so far, for the watchdog and the report."""
        return SamplerStats(
            sampled_tokens=self._sampled,
            prompt_tokens=self._prompt,
            prefilled_tokens=self._prefilled,
            reused_tokens=self._reused,
            kept_bytes=self._conversations.num_bytes,
            steps=self._steps,
            running=self._rows.count,
            waiting=len(self._waiting),
        )

    def _check(self) -> None:
        """Compares what the sampler computes with a plain forward: directly and, where that is off, by the modules.

        Raises:
            EngineError: This family's cache is not one of keys and values by position.
        """
        if self._prefill.direct is not None:
            try:
                return self._compare()
            except EngineError as cause:
                logger.warning("transformers' modules sample, which is slower: %s", cause)
                self._prefill.direct = None
        return self._compare()

    @torch.no_grad()
    def _compare(self) -> None:
        """Compares with a plain forward: a prompt of five tokens, three steps, and the three read behind the five.

        Raises:
            EngineError: This family's cache is not one of keys and values by position.
        """
        model, n = self.model, 5
        token_ids = torch.arange(n + 3, device=model.device)[None] % model.vocab_size
        whole = model.logits(model.features(token_ids)[0])
        prompt = tuple(token_ids[0].tolist())
        begun, gone_on = (Opening(ids, [SampleRequest(ids, 1)]) for ids in (prompt[:n], prompt))
        try:
            logits = [self._prefill.read([begun], 0)]
            logits += [self._forward(np.array([t % model.vocab_size]), np.array([t])) for t in (n, n + 1, n + 2)]
            gone_on.kept, gone_on.start = KeptSequence(prompt[:n], self._cache.take(0, n)), n
            logits.append(self._prefill.read([gone_on], 0))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as cause:
            raise EngineError(f"cannot sample from {model.config.model_type!r} models: {cause}") from cause
        error = (torch.cat(logits) - torch.cat((whole[n - 1 :], whole[-1:]))).abs().max().item()
        size = whole.abs().max().item()
        if not error <= (1e-3 if model.dtype == torch.float32 else 0.1) * max(1.0, size):
            raise EngineError(f"cannot sample from {model.config.model_type!r} models: cached logits are {error:g} off")

    # The thread.

    def _run(self) -> None:
        while self._wait_for_work():
            self._answer_calls()
            self._advance()
        closed = EngineError("the engine is closed")
        self._fail(closed)
        for _, future in self._calls:
            future.set_exception(closed)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._closing or self._calls or self._rows.count or self._may_begin()):
                self._changed.wait()
            return not self._closing

    def _may_begin(self) -> bool:
        return any(request.adapter not in self._closed for request in self._waiting)

    def _answer_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except BaseException as cause:  # noqa: BLE001  the caller raises it
                future.set_exception(cause)

    def _advance(self) -> None:
        try:
            with torch.inference_mode(), sampling_threads(self._load):
                self._admit()
                self._step()
        except Exception as cause:  # noqa: BLE001  every waiting caller must learn of it
            self._fail(cause)

    def _drain(self, adapter: str) -> None:
        while any(request.adapter == adapter for request in self._rows.requests) and not self._closing:
            self._advance()
        self._conversations.clear(adapter)  # the weights may change now, and training wants the memory
        if self._prefill.direct is not None:
            self._prefill.direct.forget()

    def _fail(self, cause: Exception) -> None:
        with self._changed:
            begun = [request for request in self._taken if not request.token_ids]
            requests = list(dict.fromkeys((*self._rows.clear(), *begun, *self._waiting)))
            self._waiting.clear()
        self._conversations.clear()
        error = cause if isinstance(cause, EngineError) else EngineError(f"sampling: {type(cause).__name__}: {cause}")
        for request in requests:
            request.error = error
        if requests:
            self._deliver(requests)

    def _take(self) -> list[SampleRequest]:
        """Returns the requests to begin now: as many as there are slots."""
        taken: list[SampleRequest] = []
        held: list[SampleRequest] = []
        with self._changed:
            while self._waiting and self._rows.count + len(taken) < self.max_batch:
                request = self._waiting.popleft()
                if request.adapter in self._closed:
                    held.append(request)
                elif not request.cancelled:
                    request.version = self.versions[request.adapter]
                    taken.append(request)
            self._waiting.extendleft(reversed(held))
        return taken

    def _admit(self) -> None:
        self._taken = self._take()
        if not self._taken:
            return
        openings = openings_of(self._taken, self._conversations)
        for goes_on in (False, True):
            some = [opening for opening in openings if (opening.kept is not None) == goes_on]
            for batch in batches_by_length(some, self._prefill_tokens, lambda opening: opening.num_new):
                self._begin(batch)

    def _begin(self, openings: list[Opening]) -> None:
        rows, start = self._rows, self._rows.count
        with self._adapted([opening.adapter for opening in openings]):
            logits = self._with_room(lambda: self._prefill.read(openings, start))
        for opening in openings:
            for request in opening.requests:
                rows.add(request, self._seed(request), self.model.vocab_size)
            self._prompt += len(opening.prompt) * len(opening.requests)
            self._prefilled += opening.num_new
            self._reused += opening.start
        self._draw(logits, start)

    def _adapted(self, adapters: Sequence[str]) -> AbstractContextManager[None]:
        """Says by which adapter each row of the next forwards goes."""
        return nullcontext() if self._mixed is None else self._mixed.rows(adapters)

    def _with_room(self, compute: Callable[[], T]) -> T:
        """Returns what `compute` returns; where memory runs out, what is kept goes first."""
        try:
            return compute()
        except (MemoryError, RuntimeError) as cause:
            if not is_out_of_memory(cause) or not len(self._conversations):
                raise
        self._keep_less()
        return compute()

    def _keep_less(self) -> None:
        self._conversations.halve()
        logger.warning("memory ran out: at most %d MiB kept of conversations", self._conversations.max_bytes // 2**20)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _seed(self, request: SampleRequest) -> int:
        self.num_begun += 1
        if request.params.seed is not None:
            return request.params.seed & 0xFFFFFFFFFFFFFFFF
        return (self.seed * 0xD1342543DE82EF95 + self.num_begun) & 0xFFFFFFFFFFFFFFFF

    def _step(self) -> None:
        rows = self._rows
        if not rows.count:
            return
        size = max(rows.count, MIN_ROWS)
        with self._adapted([request.adapter for request in rows.requests]):
            logits = self._with_room(lambda: self._forward(rows.last_tokens[:size], rows.positions[:size]))
        rows.positions[: rows.count] += 1
        self._steps += 1
        self._draw(logits[: rows.count], 0)

    def _forward(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Returns the logits after one more token of each row, `[B, V]`."""
        length = round_up(int(positions.max()) + 1)
        self._cache.reserve(length, self._rows.count)
        token_ids_B, positions_B = self._put(token_ids), self._put(positions)
        if self._prefill.direct is not None:
            return self._prefill.direct.step(token_ids_B, positions_B, length)
        self._cache.begin_step(positions_B, length)
        features = self.model.features(
            token_ids_B[:, None],
            positions_B[:, None],
            attention_mask=self._masks.step(positions_B, length),
            past_key_values=self._cache,
            use_cache=True,
        )
        return self.model.logits(features[:, 0])

    def _draw(self, logits_BV: Tensor, start: int) -> None:
        """Draws a token for each row from `start` on, and takes out the replies that are done."""
        rows, here = self._rows, slice(start, self._rows.count)
        tokens, logprobs, kept = draw(
            logits_BV,
            self._put(rows.temperatures[here]),
            self._put(uniforms(rows.seeds[here], rows.drawn[here])),
            self._cuts(here) if rows.cuts[here].any() else None,
        )
        both = torch.stack((tokens.int(), logprobs.view(torch.int32))).cpu().numpy()
        token_ids, logprobs_B = both[0].astype(np.int64), both[1].view(np.float32)
        if not np.isfinite(logprobs_B).all():
            raise EngineError("the model's logits are not finite")
        rows.record(start, token_ids, logprobs_B)
        if kept is not None:
            self._record(kept, start)
        self._sampled += len(token_ids)
        self._finish(start)

    def _cuts(self, here: slice) -> Cuts:
        rows = self._rows
        return Cuts(self._put(rows.top_p[here]), self._put(rows.top_k[here]), self._put(rows.min_p[here]))

    def _record(self, kept: Kept, start: int) -> None:
        rows, counts = self._rows, kept.counts_B.cpu().numpy()
        width = min(int(counts[rows.cuts[start : rows.count]].max()), MAX_SUPPORT)
        words = kept.words_BK[:, :width].int().cpu().numpy()
        rows.record_supports(start, counts, words, kept.log_mass_B.cpu().numpy())

    def _finish(self, start: int) -> None:
        rows = self._rows
        ended = self._eos[rows.last_tokens[: rows.count]]
        leaving = ended | (rows.drawn[: rows.count] >= rows.limits[: rows.count])
        for row in range(start, rows.count):
            request = rows.requests[row]
            if request.cancelled:
                leaving[row] = True
            elif request.stops is not None and not leaving[row]:
                first = max(0, int(rows.drawn[row]) - request.num_stop_tokens)
                if request.stops(rows.token_ids[row, first : rows.drawn[row]].tolist()):
                    ended[row] = leaving[row] = True
        if not leaving.any():
            return
        finished = []
        for row in np.flatnonzero(leaving).tolist():
            request, count = rows.requests[row], rows.drawn[row]
            request.token_ids = tuple(rows.token_ids[row, :count].tolist())
            request.logprobs = tuple(rows.logprobs[row, :count].tolist())
            request.finish_reason = "stop" if ended[row] else "length"
            finished.append(request)
            self._keep(row)
        length = int(rows.positions[: rows.count].max())
        sources, targets = rows.remove(leaving)
        if len(sources):
            self._cache.move(sources, targets, round_up(length))
        self._deliver(finished)

    def _keep(self, row: int) -> None:
        """Keeps what a leaving reply has in its slot: all but its last token, which was never fed."""
        request, length = self._rows.requests[row], int(self._rows.positions[row])
        token_ids = (request.prompt + request.token_ids)[:length]
        if request.cancelled or not self._conversations.wants(token_ids, request.adapter):
            return
        try:
            self._conversations.keep(KeptSequence(token_ids, self._cache.take(row, length), request.adapter))
        except (MemoryError, RuntimeError) as cause:
            if not is_out_of_memory(cause):
                raise
            self._keep_less()

    def _put(self, array: NDArray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.model.device.type == "cpu" else tensor.to(self.model.device, non_blocking=True)
