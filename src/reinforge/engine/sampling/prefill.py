"""Prefill: computes prompts into slots, whole or only the part after a cached prefix.

Waiting prompts are computed together, padded on the right. Equal prompts are computed once and copied, so siblings of a
group share their prompt. Where a prompt continues a cached prefix, the prefix is copied into the slot and the rest is
computed there, each token attending to the slot.

Rows of models with states (`model_cache.py`) must end together, since a state exists only after the last token: whole
prompts are padded on the left where a trial shows that this changes nothing, and otherwise only prompts of one length
are computed together; so are the parts after a cached prefix.

Shapes: n prompts, B rows, S tokens to compute, L tokens that a row attends to, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DummyLayer

from reinforge.engine.model.attention import AttentionMasks
from reinforge.engine.model.causal_model import DEFAULT_ADAPTER, CausalModel
from reinforge.engine.model.model_cache import LeftPadding, ModelCache, make_prefill_cache
from reinforge.engine.sampling.fast_llama import FastLlama
from reinforge.engine.sampling.kv_cache import AppendCacheLayer, KVCache, KVCacheLayer, round_up
from reinforge.engine.sampling.prefix_cache import CachedPrefix, PrefixCache
from reinforge.engine.sampling.running_batch import SampleRequest

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """One prompt and the requests that share it."""

    prompt: tuple[int, ...]  # token ids
    requests: list[SampleRequest]  # at least one
    adapter: str = DEFAULT_ADAPTER  # the adapter that computes it
    cached: CachedPrefix | None = None  # a cached sequence with the same start; None: the prompt is computed whole
    num_cached: int = 0  # tokens of the prompt that `cached` provides

    @property
    def num_new(self) -> int:
        """Tokens to compute, at least 1."""
        return len(self.prompt) - self.num_cached


def group_by_prompt(requests: Iterable[SampleRequest], prefix_cache: PrefixCache) -> list[PrefillRequest]:
    """Returns the distinct prompts of each adapter, each with its requests and its cached prefix."""
    prefills: dict[tuple[str, tuple[int, ...]], PrefillRequest] = {}
    for request in requests:
        key = (request.adapter, request.prompt)
        if key in prefills:
            prefills[key].requests.append(request)
        else:
            cached, num_cached = prefix_cache.find(request.prompt, request.adapter) or (None, 0)
            if request.computed is not None and len(request.computed.token_ids) > num_cached:
                cached, num_cached = request.computed, len(request.computed.token_ids)
            prefills[key] = PrefillRequest(request.prompt, [request], request.adapter, cached, num_cached)
    return list(prefills.values())


class Prefiller:
    """Computes prompts into the slots of one KV cache.

    Args:
        masks: Builds the masks of tokens after a cached prefix.
        to_device: Copies an array to the model's device.
        fast_llama: Computes short prompts of Llama-like models; None: the model's modules compute all prompts.
        mixes_adapters: True if rows use different adapters, whose layers need all tokens of a row.

    Attributes:
        pads: True if whole prompts of different lengths may be computed together; set after a trial run of this model.
    """

    pads = True

    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        masks: AttentionMasks,
        to_device: Callable[[NDArray], Tensor],
        fast_llama: FastLlama | None,
        *,
        mixes_adapters: bool = False,
    ):
        self.model, self.cache, self.masks, self.to_device = model, cache, masks, to_device
        self.fast_llama, self.mixes_adapters = fast_llama, mixes_adapters

    def run(self, prefills: Sequence[PrefillRequest], first: int) -> Tensor:
        """Fills slots from `first` on, one per request, and returns the logits of each reply's first token, `[B, V]`.

        Args:
            prefills: All without a cached prefix, or all with one.
            first: The first slot; those before it are in use and stay unchanged.
        """
        sources = np.repeat(np.arange(len(prefills)), [len(prefill.requests) for prefill in prefills])
        if prefills[0].cached is None:
            return self._run_whole(prefills, self.to_device(sources), first)
        return self._compute_logits(self._run_after_prefix(prefills, sources, first), self.to_device(sources))

    def batch(self, prefills: Sequence[PrefillRequest], max_tokens: int) -> list[list[PrefillRequest]]:
        """Returns prompts in batches for `run`, of at most about `max_tokens` tokens each."""
        batches = []
        for is_cached in (False, True):
            chosen = [prefill for prefill in prefills if (prefill.cached is not None) == is_cached]
            equal = self.model.has_states and (is_cached or not self.pads)
            batches += batch_by_length(chosen, max_tokens, lambda prefill: prefill.num_new, max_ratio=1 if equal else 2)
        return batches

    def _compute_logits(self, features_nH: Tensor, sources_B: Tensor) -> Tensor:
        return self.model.logits(features_nH).index_select(0, sources_B)

    def _select_needed(self, indices_n: Tensor) -> Tensor | None:
        return None if self.mixes_adapters else indices_n

    def _run_whole(self, prefills: Sequence[PrefillRequest], sources_B: Tensor, first: int) -> Tensor:
        lengths = np.array([len(prefill.prompt) for prefill in prefills])
        token_ids = np.zeros((len(prefills), lengths.max()), np.int64)
        for row, prefill in zip(token_ids, prefills, strict=True):
            row[: len(prefill.prompt)] = prefill.prompt
        token_ids_nT, length = self.to_device(token_ids), token_ids.shape[1]
        last_n = self.to_device(np.arange(len(prefills)) * length + lengths - 1)
        self.cache.reserve(length + 1, first, first + len(sources_B))
        if self.fast_llama is not None and self.fast_llama.can_prefill(length):
            return self.fast_llama.prefill(token_ids_nT, last_n, sources_B, first)
        if self.model.has_states and lengths.min() < length:
            return self._run_left_padded(token_ids_nT, self.to_device(lengths), sources_B, first)
        cache = make_prefill_cache(self.model.layer_kinds)
        features = self.model.features(
            token_ids_nT, indices_N=self._select_needed(last_n), past_key_values=cache, use_cache=True
        )
        self.cache.fill(cache, sources_B, first)
        return self._compute_logits(features.flatten(0, 1).index_select(0, last_n), sources_B)

    def _run_left_padded(self, token_ids_nT: Tensor, lengths_n: Tensor, sources_B: Tensor, first: int) -> Tensor:
        count, width = token_ids_nT.shape
        padding = LeftPadding.from_lengths(lengths_n, width, self.model.dtype)
        last_n = self.to_device(np.arange(1, count + 1) * width - 1)
        cache = make_prefill_cache(self.model.layer_kinds)
        features = self.model.features(
            token_ids_nT.gather(1, padding.positions),
            padding.positions,
            indices_N=self._select_needed(last_n),
            attention_mask=self.masks.build_mask(padding.positions, padding.key_positions, padding.is_token),
            past_key_values=cache,
            use_cache=True,
        )
        self.cache.fill(cache, sources_B, first, padding)
        return self._compute_logits(features[:, -1], sources_B)

    def _run_after_prefix(self, prefills: Sequence[PrefillRequest], sources: NDArray[np.int64], first: int) -> Tensor:
        """Returns the features of each prompt's last token, computed after the cached prefixes, `[n, H]`.

        A shorter row repeats its last token, at the same position, up to the length of the longest.
        """
        count, width = len(prefills), max(prefill.num_new for prefill in prefills)
        starts, ends = np.array([p.num_cached for p in prefills]), np.array([len(p.prompt) for p in prefills])
        positions = np.minimum(starts[:, None] + np.arange(width), ends[:, None] - 1)
        token_ids = np.array(
            [[*p.prompt[p.num_cached :], *(p.prompt[-1:] * (width - p.num_new))] for p in prefills], np.int64
        )
        length = round_up(int(ends.max()) + 1)
        self.cache.reserve(length, first, first + len(sources))
        for slot, prefill in enumerate(prefills, first):
            assert prefill.cached is not None
            self.cache.copy_in(prefill.cached.states, prefill.num_cached, slot)
        positions_BS = self.to_device(positions)
        rows = slice(first, first + count)
        features = self.model.features(
            self.to_device(token_ids),
            positions_BS,
            indices_N=self._select_needed(self.to_device(np.arange(1, count + 1) * width - 1)),
            attention_mask=self.masks.build_mask(positions_BS, torch.arange(length, device=self.model.device)[None]),
            past_key_values=self._append_to(rows, positions_BS, length),
            use_cache=True,
        )
        if len(sources) > count:
            self.cache.move(first + sources, first + np.arange(len(sources)), length)
        return features[:, -1]

    def _append_to(self, rows: slice, positions_BS: Tensor, length: int) -> ModelCache:
        layers = [
            AppendCacheLayer(layer, rows, positions_BS, length) if isinstance(layer, KVCacheLayer) else DummyLayer()
            for layer in self.cache.layers
        ]
        return ModelCache(layers, self.cache.view_states(rows))


def batch_by_length(
    items: Iterable[T], max_tokens: int, length: Callable[[T], int], max_ratio: int = 2
) -> list[list[T]]:
    """Returns items in batches of at most `max_tokens`, padding included; a longer item is a batch of its own.

    The longest item of a batch is at most `max_ratio` times as long as the shortest, so that padding stays small.

    Example: lengths 30, 10, 12, 25 and 60 tokens -> lengths [10, 12] and [25, 30].
    """
    batches: list[list[T]] = []
    for item in sorted(items, key=length):
        batch = batches[-1] if batches else []
        if not batch or length(item) > max_ratio * length(batch[0]) or length(item) * (len(batch) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(item)
    return batches
