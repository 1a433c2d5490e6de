"""Continuous batching over the Hugging Face module, or over its weights (`fast_llama.py`), in its own thread.

A reply joins the running batch when a slot is free and leaves when it is done, at token boundaries. Its keys and values
go to the prefix cache (`prefix_cache.py`), so that the next turn of a conversation computes only its new tokens
(`prefill.py`). A decode step is one `[B, 1]` forward over the KV cache, two copies to the device and one of the sampled
tokens to the host, where all bookkeeping uses arrays over the rows.

Everything else that computes (training, scoring, loading) runs in this thread, too, by `call`: libgomp keeps a pool of
workers for each thread that ever ran a parallel region, and when the pools together have more threads than there are
cores, their workers stop spinning, which halved the speed of both.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reinforge.config.finetuning_blocks import InFlight
from reinforge.engine.devices import copy_to_device, free_cached_memory, is_out_of_memory
from reinforge.engine.model.attention import AttentionMasks
from reinforge.engine.model.causal_model import DEFAULT_ADAPTER, CausalModel
from reinforge.engine.model.text_part import iterate_expert_parameters
from reinforge.engine.sampling.admission import AdmissionQueue
from reinforge.engine.sampling.fast_llama import FastLlama, supports_fast_decode
from reinforge.engine.sampling.kv_cache import MIN_ROWS, KVCache, round_up
from reinforge.engine.sampling.prefill import Prefiller, PrefillRequest, group_by_prompt
from reinforge.engine.sampling.prefix_cache import CachedPrefix, PrefixCache
from reinforge.engine.sampling.projection import find_stable_rows
from reinforge.engine.sampling.running_batch import ABORTED, RunningBatch, SampleRequest, SamplerStats, find_long_rows
from reinforge.engine.sampling.sampler_trials import SamplerTrials
from reinforge.engine.sampling.threads import leave_core_to_agents
from reinforge.engine.sampling.token_sampling import (
    KeptTokens,
    SamplingFilters,
    draw_uniforms,
    rank_logprobs,
    sample_tokens,
)
from reinforge.errors import EngineError
from reinforge.types.supports import MAX_SUPPORT

if TYPE_CHECKING:
    from reinforge.engine.sampling.constrained_sampling import ConstrainedTokens
    from reinforge.engine.sampling.lora_batch import LoRABatch

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREFILL_TOKENS = 2048  # padded prompt tokens in one forward: bounds memory, and keeps activations near the caches
READER_TOKENS = 512
"""Prompt tokens between two decode steps while clients read replies as they grow: they wait that long for a token."""

LEAST_SAVED, MUCH_SAVED = {"cpu": 2**19}, 2**29
"""Bytes of keys and values in a layer that a step must save to attend in two parts; `MUCH_SAVED` on other devices."""

UNUSED_S = 10.0  # seconds for which no step needed half of the KV cache, before `release_memory` frees it


class ReplySampler:
    """Samples replies; call `submit` from any thread. `deliver` and `report` are called from the sampler's thread.

    Args:
        model: The model; an adapter's weights change only between its `pause` and `resume`.
        seed: Seed of the stream for requests without one.
        deliver: Receives the replies that one step finished.
        report: Receives the replies that are streamed and got a token; None: no reply is streamed.
        prefix_cache_bytes: Maximum memory of the prefix cache; 0: no prefix cache.
        deterministic: Use no prefix cache, and compute prompts one by one: how a matrix product is split into blocks
            depends on its rows, and with it the last bit. Decode steps have rounded lengths, and enough rows that
            no product depends on their number (`stable_rows.py`): all of them in models with states. The products of
            experts depend on the batch in any case.
        is_used: False: another program samples, so no fast path is prepared and nothing is tried.
    """

    def __init__(
        self,
        model: CausalModel,
        eos_ids: Sequence[int],
        *,
        max_num_seqs: int,
        seed: int,
        deliver: Callable[[list[SampleRequest]], None],
        report: Callable[[list[SampleRequest]], None] | None = None,
        adapters: Sequence[str] = (DEFAULT_ADAPTER,),
        prefix_cache_bytes: int = 0,
        deterministic: bool = False,
        is_used: bool = True,
    ):
        self.model, self.seed = model, seed
        self.versions = dict.fromkeys(adapters, 0)
        self.num_begun = 0
        self._eos = np.zeros(model.vocab_size, bool)
        self._eos[[token for token in eos_ids if token < model.vocab_size]] = True
        self._deliver, self._report = deliver, report
        self._prefill_tokens, self._is_deterministic = 0 if deterministic else PREFILL_TOKENS, deterministic
        self._min_rows = MIN_ROWS
        if deterministic and is_used:
            most = max(max_num_seqs, MIN_ROWS)
            self._min_rows = most if model.has_states else find_stable_rows(model, most)
            if any(iterate_expert_parameters(model.module)):
                logger.warning(
                    "deterministic: %s has experts, which multiply the rows that are routed to them together: the last "
                    "bits of a reply depend on what else runs in the batch (max_num_seqs: 1 avoids it)",
                    model.config.model_type,
                )
            logger.info("deterministic: decode steps have at least %d rows", self._min_rows)
        self._to_device = partial(copy_to_device, device=model.device)
        self._masks = AttentionMasks(model)
        self._cache = KVCache(model, max_num_seqs)
        least = self._min_rows if deterministic else 1
        is_fast = is_used and supports_fast_decode(model)
        fast_llama = FastLlama(model, self._cache, self._masks, least) if is_fast else None
        if model.fast_paths.serving:
            self._min_rows = 1  # nothing is trained on these log-probs, and a single stream pays for each row
        if fast_llama is None and is_used:
            logger.info("sampling %s with transformers' own modules", model.config.model_type)
        mixes_adapters = len(adapters) > 1
        self._prefiller = Prefiller(
            model, self._cache, self._masks, self._to_device, fast_llama, mixes_adapters=mixes_adapters
        )
        self._lora_batch = self._make_lora_batch(least) if mixes_adapters else None
        self._prefix_cache = PrefixCache(0 if deterministic else prefix_cache_bytes, whole_only=model.has_states)
        self._batch = RunningBatch(max_num_seqs)
        self._admitted: list[SampleRequest] = []  # they have a slot, but their prompts are not computed yet
        self._can_continue = True
        self._calls: deque[tuple[Callable[[], Any], Future]] = deque()
        self._condition = threading.Condition()
        self._admission = AdmissionQueue(self._condition, max_num_seqs)
        self._closing = False
        self._load = 0.0
        self._sampled_tokens, self._prompt_tokens, self._prefilled_tokens, self._reused_tokens = 0, 0, 0, 0
        self._steps = 0
        self._thread = threading.Thread(target=self._run, name="reinforge-engine", daemon=True)
        self._thread.start()
        try:
            if is_used:
                self.call(self._validate)
        except EngineError:
            self.close()
            raise

    def _make_lora_batch(self, min_rows: int) -> LoRABatch:
        from reinforge.engine.sampling.lora_batch import LoRABatch  # for several adapters alone

        return LoRABatch(self.model, min_rows)

    # Called by other threads.

    def submit(self, requests: Sequence[SampleRequest], load: float = 0.0) -> None:
        """Queues requests, in this order.

        Args:
            load: Share of its time that the caller's thread computes.
        """
        with self._condition:
            if self._closing:
                raise EngineError("the engine is closed")
            known = [request for request in requests if request.adapter in self.versions]
            self._load = load
            self._admission.add(known)
        if len(known) < len(requests):  # they were on their way when it was removed
            self._fail_removed([request for request in requests if request not in known])

    def pause(self, adapter: str = DEFAULT_ADAPTER, change: Callable[[], None] | None = None) -> None:
        """Stops admitting requests of an adapter, which wait, and returns when none of its replies is in flight.

        Args:
            change: Called then, in the sampler's thread, before a reply of another adapter begins.
        """
        self._admission.pause(adapter)
        self.call(lambda: self._drain(adapter, change))

    def exchange(
        self, version: int, change: Callable[[], None], adapter: str = DEFAULT_ADAPTER, in_flight: InFlight = "keep"
    ) -> None:
        """Changes an adapter's weights between two steps.

        Args:
            change: Changes them, in the sampler's thread.
            in_flight: Its replies in flight continue, with the keys and values of the older weights (`keep`) or of the
                new ones (`recompute`); `abort`: those that no client reads as they grow end as `ABORTED`.
        """
        self.call(lambda: self._exchange(version, change, adapter, in_flight))

    def resume(self, version: int, adapter: str = DEFAULT_ADAPTER) -> None:
        """Admits an adapter's requests again; replies that begin from now on carry `version`."""
        with self._condition:
            self.versions[adapter] = version
            self._admission.resume(adapter)

    def add_adapter(self, name: str) -> None:
        """Samples from one more adapter of the model; called within a `call`, between two steps."""
        self.versions[name] = 0
        self._prefiller.mixes_adapters = True
        if self._prefiller.fast_llama is not None and not supports_fast_decode(self.model):
            logger.info("%s: sampling with transformers' own modules (slower) from now on", name)
            self._prefiller.fast_llama = None
        if self._lora_batch is None:
            self._lora_batch = self._make_lora_batch(self._min_rows if self._is_deterministic else 1)
        self._lora_batch.hook_layers()

    def remove_adapter(self, name: str) -> None:
        """Forgets an adapter, which is paused; called within a `call`. Requests that wait for it fail."""
        del self.versions[name]
        self._admission.resume(name)
        if failed := self._admission.remove(name):
            self._fail_removed(failed)

    def _fail_removed(self, requests: list[SampleRequest]) -> None:
        for request in requests:
            request.error = EngineError(f"the adapter {request.adapter} was removed")
        self._deliver(requests)

    def has_waiting(self, adapter: str) -> bool:
        return self._admission.has_waiting(adapter)

    def call(self, function: Callable[[], T]) -> T:
        """Runs `function` in the sampler's thread, between two steps, and returns its result."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()
        with self._condition:
            if self._closing:
                raise EngineError("the engine is closed")
            self._calls.append((function, future))
            self._condition.notify_all()
        return future.result()

    def release_memory(self) -> None:
        """Frees what many or long replies made the KV cache grow to, between two steps; does not wait for it."""
        with self._condition:
            if not (self._closing or self._calls):  # else it is busy
                self._calls.append((self._release_slots, Future()))
                self._condition.notify_all()

    def close(self) -> None:
        """Fails requests that run or wait, and joins the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()
        if self._lora_batch is not None:
            self._lora_batch.close()

    def stats(self) -> SamplerStats:
        """Returns the counts so far, for the watchdog and the report."""
        return SamplerStats(
            sampled_tokens=self._sampled_tokens,
            prompt_tokens=self._prompt_tokens,
            prefilled_tokens=self._prefilled_tokens,
            reused_tokens=self._reused_tokens,
            prefix_cache_bytes=self._prefix_cache.num_bytes,
            kv_cache_bytes=self._cache.num_bytes,
            steps=self._steps,
            running=self._batch.count,
            waiting=len(self._admission) + len(self._admitted),
        )

    def _validate(self) -> None:
        """Compares the sampler's logits with a plain forward: of the fast path and, if it is off, of the modules."""
        trials = SamplerTrials(self.model, self._prefiller, self._forward_mixed)
        if self._prefiller.fast_llama is not None:
            try:
                return trials.check()
            except EngineError as cause:
                logger.warning("sampling with transformers' own modules (slower): %s", cause)
                self._prefiller.fast_llama = None
        trials.check()
        self._prefiller.pads = trials.can_pad()
        if not trials.can_continue():
            self._prefix_cache.max_bytes, self._can_continue = 0, False

    # Called by the sampler's thread.

    def _run(self) -> None:
        while self._wait_for_work():
            self._run_calls()
            self._advance()
        closed = EngineError("the engine is closed")
        self._fail(closed)
        for _, future in self._calls:
            future.set_exception(closed)

    def _wait_for_work(self) -> bool:
        with self._condition:
            while not (self._closing or self._calls or self._can_advance()):
                self._condition.wait()
            return not self._closing

    def _can_advance(self) -> bool:
        return bool(self._batch.count or self._admitted or self._admission.count_ready())

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except BaseException as cause:  # noqa: BLE001  the caller raises it
                future.set_exception(cause)

    def _advance(self) -> None:
        """Admits waiting requests and makes one decode step."""
        try:
            with torch.inference_mode(), leave_core_to_agents(self._load, enabled=self.model.fast_paths.threads):
                self._admit()
                self._step()
        except Exception as cause:  # noqa: BLE001  every waiting caller must receive it
            self._fail(cause)

    def _release_slots(self) -> None:
        if self._cache.release(int(self._batch.positions.max()) + 1, self._batch.count, UNUSED_S):
            free_cached_memory(self.model.device)

    def run_for(self, seconds: float) -> None:
        """Samples for this long, or until no reply is left to sample; called within a `call`.

        Args:
            seconds: The step that is running at the end of this time is completed.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._condition:
                if self._closing or not self._can_advance():
                    return
            self._advance()

    def _drain(self, adapter: str, change: Callable[[], None] | None = None) -> None:
        while any(request.adapter == adapter for request in self._list_begun()) and not self._closing:
            self._advance()
        self._drop_weights(adapter)  # they may change now, and training needs the memory
        if change is not None:
            change()

    def _drop_weights(self, adapter: str) -> None:
        """Drops what was made of an adapter's weights and computed with them."""
        self._prefix_cache.clear(adapter)
        if self._prefiller.fast_llama is not None:  # others, if any, use the model's own weights
            self._prefiller.fast_llama.drop_weights(adapter if len(self.versions) > 1 else None)

    def _exchange(self, version: int, change: Callable[[], None], adapter: str, in_flight: InFlight) -> None:
        self._drop_weights(adapter)
        change()
        if in_flight == "abort":
            self._abort(adapter)
        elif in_flight == "recompute":
            self._recompute(adapter)
        with self._condition:
            self.versions[adapter] = version
        for row, request in enumerate(self._batch.requests):
            if request.adapter == adapter:
                request.later_versions.append((int(self._batch.num_sampled[row]), version))
        for request in self._admitted:
            if request.adapter == adapter:
                request.version, request.computed = version, None

    def _abort(self, adapter: str) -> None:
        leaving = [each.adapter == adapter and each.new_tokens is None for each in self._batch.requests]
        aborted = list(compress(self._batch.requests, leaving))
        for request in aborted:
            request.finish_reason = ABORTED
        self._remove(np.array(leaving, np.bool_), aborted)

    @torch.inference_mode()
    def _recompute(self, adapter: str) -> None:
        """Computes the keys and values of an adapter's replies in flight with the weights that it has now."""
        batch = self._batch
        for row, request in enumerate(batch.requests):
            if request.adapter == adapter:
                sampled = batch.token_ids[row, : batch.num_sampled[row] - 1]  # the next step feeds the last one
                known = PrefillRequest((*request.prompt, *sampled.tolist()), [request], adapter)
                with self._route_adapters([adapter]):
                    self._prefiller.run([known], row)

    def _fail(self, cause: Exception) -> None:
        with self._condition:
            requests = list(dict.fromkeys((*self._batch.clear(), *self._admitted, *self._admission.remove())))
            self._admitted.clear()
        self._prefix_cache.clear()
        error = cause if isinstance(cause, EngineError) else EngineError(f"sampling: {type(cause).__name__}: {cause}")
        for request in requests:
            request.error = error
        if requests:
            self._deliver(requests)

    def _list_begun(self) -> list[SampleRequest]:
        return [*self._batch.requests, *self._admitted]

    def _admit(self) -> None:
        self._admitted = [request for request in self._admitted if not request.cancelled]
        begun = self._list_begun()
        if not self._admission.holds_back(self._batch.count, len(begun)):
            self._admitted += self._admission.pop(begun, self.versions)
        if not self._admitted:
            return
        had_readers = self._has_readers()
        for batch in self._choose_prompts(had_readers):
            if had_readers and self._can_split(batch[0]):
                self._compute_part(batch[0])
            else:
                self._begin(batch)
            if not had_readers and self._has_readers():
                break  # the first tokens of streams have just been sampled

    def _has_readers(self) -> bool:
        """Returns True if a client reads a reply as it grows."""
        return bool(self._batch.is_streamed[: self._batch.count].any())

    def _choose_prompts(self, has_readers: bool) -> list[list[PrefillRequest]]:
        """Returns the prompts to compute before the next decode step, in batches.

        Args:
            has_readers: Only about `READER_TOKENS` of short prompts, and of a long one: those that came first.
        """
        prefills = group_by_prompt(self._admitted, self._prefix_cache)
        if not has_readers:
            return self._prefiller.batch(prefills, self._prefill_tokens)
        turns = {request: turn for turn, request in enumerate(self._admitted)}
        batches = self._prefiller.batch(prefills, min(self._prefill_tokens, READER_TOKENS))
        batches.sort(key=lambda batch: min(turns[prefill.requests[0]] for prefill in batch))
        chosen, left = [], [READER_TOKENS, READER_TOKENS]
        for batch in batches:
            num_tokens = len(batch) * batch[-1].num_new
            is_long = num_tokens > READER_TOKENS
            left[is_long] -= min(num_tokens, READER_TOKENS)
            if left[is_long] >= 0:
                chosen.append(batch)
        return chosen

    def _can_split(self, prefill: PrefillRequest) -> bool:
        return prefill.num_new > READER_TOKENS and self._can_continue and not self._is_deterministic

    def _compute_part(self, prefill: PrefillRequest) -> None:
        """Computes the next `READER_TOKENS` of a long prompt; its reply does not begin yet."""
        end, slot = prefill.num_cached + READER_TOKENS, self._batch.count
        part = replace(prefill, prompt=prefill.prompt[:end], requests=prefill.requests[:1])

        def compute() -> CachedPrefix:
            self._cache.reserve(len(prefill.prompt) + 1, slot, slot + 1)  # it grows once, not with each part
            self._prefiller.run([part], slot)
            return CachedPrefix(part.prompt, self._cache.copy_out(slot, end), part.adapter)

        with self._route_adapters([part.adapter]):
            computed = self._retry_with_smaller_cache(compute)
        for request in prefill.requests:
            request.computed = computed
        self._prefilled_tokens += READER_TOKENS
        self._reused_tokens -= READER_TOKENS  # `_begin` counts all that is not new as reused

    def _begin(self, prefills: list[PrefillRequest]) -> None:
        """Computes prompts into the next slots and samples the first token of each reply."""
        batch, start = self._batch, self._batch.count
        with self._route_adapters([prefill.adapter for prefill in prefills]):
            logits = self._retry_with_smaller_cache(lambda: self._prefiller.run(prefills, start))
        for prefill in prefills:
            for request in prefill.requests:
                request.computed = None
                batch.add(request, self._choose_seed(request), self.model.vocab_size)
            self._prompt_tokens += len(prefill.prompt) * len(prefill.requests)
            self._prefilled_tokens += prefill.num_new
            self._reused_tokens += prefill.num_cached
        begun = {request for prefill in prefills for request in prefill.requests}
        self._admitted = [request for request in self._admitted if request not in begun]
        self._sample(logits, start)

    @contextmanager
    def _route_adapters(self, adapters: Sequence[str]) -> Iterator[None]:
        """Sets the adapter of each row of the forwards inside the block."""
        decoders = (self._prefiller.fast_llama, self._lora_batch)
        with ExitStack() as stack:
            for decoder in decoders:
                if decoder is not None:
                    stack.enter_context(decoder.route_rows(adapters))
            yield

    def _retry_with_smaller_cache(self, compute: Callable[[], T]) -> T:
        """Returns what `compute` returns; if memory runs out, shrinks the prefix cache and tries once more."""
        try:
            return compute()
        except (MemoryError, RuntimeError) as cause:
            if not is_out_of_memory(cause) or not len(self._prefix_cache):
                raise
        self._shrink_prefix_cache()
        return compute()

    def _shrink_prefix_cache(self) -> None:
        self._prefix_cache.halve()
        limit = self._prefix_cache.max_bytes // 2**20
        logger.warning("out of memory: reducing the prefix cache to at most %d MiB", limit)
        free_cached_memory(self.model.device)

    def _choose_seed(self, request: SampleRequest) -> int:
        self.num_begun += 1
        if request.params.seed is not None:
            return request.params.seed & 0xFFFFFFFFFFFFFFFF
        return (self.seed * 0xD1342543DE82EF95 + self.num_begun) & 0xFFFFFFFFFFFFFFFF

    def _step(self) -> None:
        batch = self._batch
        if not batch.count:
            return
        size, num_long = max(batch.count, self._min_rows), self._put_long_rows_first()
        if self._prefiller.fast_llama is not None:
            size = self._prefiller.fast_llama.round_rows(size, len(batch.positions))
        with self._route_adapters([request.adapter for request in batch.requests]):
            logits = self._retry_with_smaller_cache(
                lambda: self._forward(batch.last_tokens[:size], batch.positions[:size], num_long)
            )
        batch.positions[: batch.count] += 1
        self._steps += 1
        self._sample(logits[: batch.count], 0)

    def _put_long_rows_first(self) -> int | None:
        """Moves rows so that long ones attend apart from the others, and returns their number; None: all are alike.

        Otherwise one long conversation would make all others attend to as many places as it has tokens.
        """
        batch = self._batch
        if self._prefiller.fast_llama is None or self._is_deterministic:
            return None
        least = LEAST_SAVED.get(self.model.device.type, MUCH_SAVED) // max(1, self._cache.token_bytes)
        is_long = find_long_rows(batch.positions[: batch.count] + 1, least)
        misplaced = np.flatnonzero(is_long != np.sort(is_long)[::-1])
        if len(misplaced):
            sources = misplaced[np.argsort(~is_long[misplaced], kind="stable")]
            self._cache.move(sources, misplaced, round_up(int(batch.positions[misplaced].max())))
            batch.move(sources, misplaced)
        num_long = int(is_long.sum())
        return num_long if num_long < batch.count else None

    def _forward(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int64], num_long: int | None = None
    ) -> Tensor:
        """Returns the logits after one more token of each row, `[B, V]`.

        Args:
            num_long: Number of rows that attend apart from those after them, which are shorter; None: all.
        """
        length = round_up(int(positions.max()) + 1)
        self._cache.reserve(length, self._batch.count, len(token_ids))
        token_ids_B, positions_B = self._to_device(np.stack((token_ids, positions)))
        if self._prefiller.fast_llama is not None:
            lengths = [round_up(int(part.max()) + 1) for part in np.split(positions, [num_long or 0]) if len(part)]
            return self._prefiller.fast_llama.decode_step(token_ids_B, positions_B, lengths, num_long)
        self._cache.begin_step(positions_B, length)
        features = self.model.features(
            token_ids_B[:, None],
            positions_B[:, None],
            attention_mask=self._masks.build_step_mask(positions_B, length),
            past_key_values=self._cache,
            use_cache=True,
        )
        return self.model.logits(features[:, 0])

    def _forward_mixed(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Returns what `_forward` does for two rows, each of another adapter if the model was loaded with several."""
        if len(self.versions) == 1:
            return self._forward(token_ids, positions)
        with self._route_adapters(sorted(self.versions, reverse=True)[:2]):  # not in the order of their products
            return self._forward(token_ids, positions)

    def _sample(self, logits_BV: Tensor, start: int) -> None:
        """Samples a token for each row from `start` on, and removes the replies that are done."""
        batch, rows = self._batch, slice(start, self._batch.count)
        uniforms_B = draw_uniforms(batch.seeds[rows], batch.num_sampled[rows])
        temperatures, uniforms = self._to_device(np.stack((batch.temperatures[rows], uniforms_B)))
        # rows with filters or constraints apart: they take several times as long, and no other reply may wait for them
        special = np.flatnonzero(batch.is_filtered[rows] | batch.is_constrained[rows])
        sampled = None
        if len(special) < batch.count - start:
            torchscript = self.model.fast_paths.torchscript
            tokens, logprobs, _ = sample_tokens(logits_BV, temperatures, uniforms, torchscript=torchscript)
        else:
            tokens, logprobs = torch.empty_like(temperatures, dtype=torch.long), torch.empty_like(temperatures)
        if len(special):
            own = self._to_device(special)
            sampled = self._sample_special(special + start, logits_BV[own], temperatures[own], uniforms[own])
            tokens[own], logprobs[own] = sampled.tokens_B, sampled.logprobs_B
        both = torch.stack((tokens.int(), logprobs.view(torch.int32))).cpu().numpy()
        token_ids, logprobs_B = both[0].astype(np.int64), both[1].view(np.float32)
        self._record(token_ids, logprobs_B, start)
        if sampled is not None:
            if sampled.kept is not None:
                self._record_supports(sampled.kept, special + start)
            batch.record_constrained(start, sampled.processed_R.cpu().numpy())
        if batch.num_top_logprobs[rows].any():
            self._record_top_logprobs(logits_BV, temperatures, start)
        self._deliver_tokens(start)

    def _record(self, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32], start: int) -> None:
        """Appends a token to each row from `start` on."""
        if not np.isfinite(logprobs).all():
            raise EngineError("the model's logits are not finite")
        self._batch.record(start, token_ids, logprobs)
        self._sampled_tokens += len(token_ids)

    def _deliver_tokens(self, start: int) -> None:
        """Delivers the newest tokens of the rows from `start` on to those who stream, and the replies that are done."""
        batch = self._batch
        if self._report is not None and batch.is_streamed[start : batch.count].any():
            self._report(batch.list_streamed(start))
        self._remove_finished(start)

    def _record_top_logprobs(self, logits_BV: Tensor, temperatures_B: Tensor, start: int) -> None:
        """Records the most likely tokens of the rows from `start` on whose requests ask for them."""
        batch = self._batch
        asked = np.flatnonzero(batch.num_top_logprobs[start : batch.count])
        rows, count = self._to_device(asked), int(batch.num_top_logprobs[start : batch.count].max())
        tokens, logprobs = rank_logprobs(logits_BV[rows], temperatures_B[rows], count)
        batch.record_top_logprobs(asked + start, tokens.cpu().numpy(), logprobs.cpu().numpy())

    def _sample_special(
        self, rows: NDArray[np.int64], logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor
    ) -> ConstrainedTokens:
        """Samples a token for each of these rows, which have filters or constraints."""
        from reinforge.engine.sampling.constrained_sampling import ConstrainedTokens, RowConstraints, sample_constrained

        batch = self._batch
        filters = self._build_filters(rows) if batch.is_filtered[rows].any() else None
        found = [(place, batch.requests[row].constraint) for place, row in enumerate(rows.tolist())]
        constrained = {place: constraint for place, constraint in found if constraint is not None}
        if constrained:
            constraints = RowConstraints.collect(list(constrained), list(constrained.values()), self.model.device)
            return sample_constrained(logits_BV, temperatures_B, uniforms_B, filters, constraints)
        tokens_B, logprobs_B, kept = sample_tokens(logits_BV, temperatures_B, uniforms_B, filters)
        return ConstrainedTokens(tokens_B, logprobs_B, logprobs_B[:0], kept)

    def _build_filters(self, rows: NDArray[np.int64]) -> SamplingFilters:
        batch, top_k = self._batch, self._batch.top_k[rows]
        for place, row in enumerate(rows.tolist()):
            constraint = batch.requests[row].constraint
            if constraint is not None and batch.is_filtered[row]:
                top_k[place] = min(top_k[place], constraint.count_allowed())
        settings = (batch.top_p[rows], top_k, batch.min_p[rows])
        return SamplingFilters(*(self._to_device(array) for array in settings))

    def _record_supports(self, kept: KeptTokens, rows: NDArray[np.int64]) -> None:
        batch, counts = self._batch, kept.counts_B.cpu().numpy()
        width = min(int(counts[batch.is_filtered[rows]].max()), MAX_SUPPORT)
        tokens = kept.tokens_BK[:, :width].int().cpu().numpy()
        batch.record_supports(rows, counts, tokens, kept.log_mass_B.cpu().numpy())

    def _remove_finished(self, start: int) -> None:
        batch = self._batch
        ended = self._eos[batch.last_tokens[: batch.count]] & ~batch.ignores_eos[: batch.count]
        leaving = ended | (batch.num_sampled[: batch.count] >= batch.limits[: batch.count])
        for row in range(start, batch.count):
            request = batch.requests[row]
            if request.cancelled:
                leaving[row] = True
            elif request.has_stop_text is not None and not leaving[row]:
                first = max(0, int(batch.num_sampled[row]) - request.num_stop_tokens)
                if request.has_stop_text(batch.token_ids[row, first : batch.num_sampled[row]].tolist()):
                    ended[row] = leaving[row] = True
        if batch.is_constrained[start : batch.count].any():
            batch.advance_constraints(start, ended, leaving)
        if not leaving.any():
            return
        finished = []
        for row in np.flatnonzero(leaving).tolist():
            request, count = batch.requests[row], batch.num_sampled[row]
            request.token_ids = tuple(batch.token_ids[row, :count].tolist())
            request.logprobs = tuple(batch.logprobs[row, :count].tolist())
            request.finish_reason = "stop" if ended[row] else "length"
            finished.append(request)
            self._add_to_prefix_cache(row)
        self._remove(leaving, finished)

    def _remove(self, leaving: NDArray[np.bool_], requests: list[SampleRequest]) -> None:
        """Frees the slots of these rows, whose requests get what they have."""
        length = int(self._batch.positions[: self._batch.count].max(initial=0))
        sources, targets = self._batch.remove(leaving)
        if len(sources):
            self._cache.move(sources, targets, round_up(length))
        self._deliver(requests)

    def _add_to_prefix_cache(self, row: int) -> None:
        """Caches the slot of a finished reply: all its tokens but the last, which was never fed to the model."""
        request, length = self._batch.requests[row], int(self._batch.positions[row])
        token_ids = (request.prompt + request.token_ids)[:length]
        if request.cancelled or request.later_versions:  # of mixed weights
            return
        if not self._prefix_cache.accepts(token_ids, request.adapter):
            return
        try:
            self._prefix_cache.add(CachedPrefix(token_ids, self._cache.copy_out(row, length), request.adapter))
        except (MemoryError, RuntimeError) as cause:
            if not is_out_of_memory(cause):
                raise
            self._shrink_prefix_cache()
