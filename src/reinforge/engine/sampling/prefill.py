"""Prefill: computes prompts into slots, whole or only the part after a cached prefix.

Waiting prompts are computed together, padded on the right. Equal prompts are computed once and copied, so siblings of a
group share their prompt. Where a prompt continues a cached prefix, the prefix is copied into the slot and the rest is
computed there, each token attending to the slot.

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
from transformers import Cache

from reinforge.engine.model.causal_model import DEFAULT_ADAPTER, CausalModel
from reinforge.engine.model.masks import AttentionMasks
from reinforge.engine.model.prompt_cache import PrefillCacheLayer
from reinforge.engine.sampling.fast_llama import FastLlama
from reinforge.engine.sampling.kv_cache import AppendCacheLayer, KVCache, round_up
from reinforge.engine.sampling.prefix_cache import CachedPrefix, PrefixCache
from reinforge.engine.sampling.running_batch import SampleRequest

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """One prompt and the requests that share it.

    Attributes:
        prompt: Token ids.
        requests: At least one.
        adapter: The adapter that computes it.
        cached: A cached sequence with the same start; None: the prompt is computed whole.
        num_cached: Tokens of the prompt that `cached` provides.
    """

    prompt: tuple[int, ...]
    requests: list[SampleRequest]
    adapter: str = DEFAULT_ADAPTER
    cached: CachedPrefix | None = None
    num_cached: int = 0

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
            prefills[key] = PrefillRequest(request.prompt, [request], request.adapter, cached, num_cached)
    return list(prefills.values())


class Prefiller:
    """Computes prompts into the slots of one KV cache.

    Args:
        model: The model.
        cache: The slots.
        masks: Builds the masks of tokens after a cached prefix.
        to_device: Copies an array to the model's device.
        fast_llama: Computes short prompts of Llama-like models; None: the model's modules compute all prompts.
        mixes_adapters: True if rows use different adapters, whose layers need all tokens of a row.
    """

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
        self.cache.reserve(length + 1, first)
        if self.fast_llama is not None and self.fast_llama.can_prefill(length):
            return self.fast_llama.prefill(token_ids_nT, last_n, sources_B, first)
        cache = Cache(layers=[PrefillCacheLayer() for _ in range(self.model.num_layers)])
        features = self.model.features(
            token_ids_nT, indices_N=self._select_needed(last_n), past_key_values=cache, use_cache=True
        )
        keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
        self.cache.fill(keys, values, sources_B, first)
        return self._compute_logits(features.flatten(0, 1).index_select(0, last_n), sources_B)

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
        self.cache.reserve(length, first)
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
            past_key_values=Cache(
                layers=[AppendCacheLayer(layer, rows, positions_BS, length) for layer in self.cache.layers]
            ),
            use_cache=True,
        )
        if len(sources) > count:
            self.cache.move(first + sources, first + np.arange(len(sources)), length)
        return features[:, -1]


def batch_by_length(items: Iterable[T], max_tokens: int, length: Callable[[T], int]) -> list[list[T]]:
    """Returns items in batches of at most `max_tokens`, padding included; a longer item is a batch of its own.

    The longest item of a batch is at most twice as long as the shortest, so that padding stays small.

    Example: lengths 30, 10, 12, 25 and 60 tokens -> lengths [10, 12] and [25, 30].
    """
    batches: list[list[T]] = []
    for item in sorted(items, key=length):
        batch = batches[-1] if batches else []
        if not batch or length(item) > 2 * length(batch[0]) or length(item) * (len(batch) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(item)
    return batches
