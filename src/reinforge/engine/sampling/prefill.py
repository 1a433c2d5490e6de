"""How prompts get into slots: read whole, or only what is new behind keys and values that were kept.

Waiting prompts are read together, right-padded. Equal ones are read once and copied, so siblings of a group share
their prompt. Where a prompt goes on from a kept sequence, that is copied into its slot and the rest is read there, each
token looking at the slot. Shapes: n openings, B rows, S tokens to read, L tokens that a row looks at, V words.
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

from reinforge.engine.model.causal_model import DEFAULT, CausalModel
from reinforge.engine.model.masks import AttentionMasks
from reinforge.engine.model.prompt_cache import PrefillLayer
from reinforge.engine.sampling.fast_llama import DirectLlama
from reinforge.engine.sampling.kv_cache import ContinuedLayer, SlotCache, round_up
from reinforge.engine.sampling.prefix_cache import Conversations, KeptSequence
from reinforge.engine.sampling.running_batch import SampleRequest

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Opening:
    """One prompt and the requests that bring it.

    Attributes:
        prompt: Token ids.
        requests: At least one.
        adapter: Whose they are.
        kept: A sequence that begins as the prompt does; None: the prompt is read whole.
        start: How many of the prompt's tokens `kept` gives.
    """

    prompt: tuple[int, ...]
    requests: list[SampleRequest]
    adapter: str = DEFAULT
    kept: KeptSequence | None = None
    start: int = 0

    @property
    def num_new(self) -> int:
        """Tokens to read, at least 1."""
        return len(self.prompt) - self.start


def openings_of(requests: Iterable[SampleRequest], conversations: Conversations) -> list[Opening]:
    """Returns the different prompts of each adapter, each with its requests and with what was kept of it."""
    openings: dict[tuple[str, tuple[int, ...]], Opening] = {}
    for request in requests:
        key = (request.adapter, request.prompt)
        if key in openings:
            openings[key].requests.append(request)
        else:
            kept, start = conversations.find(request.prompt, request.adapter) or (None, 0)
            openings[key] = Opening(request.prompt, [request], request.adapter, kept, start)
    return list(openings.values())


class Prefill:
    """Reads openings into the slots of one cache.

    Args:
        model: The model.
        cache: The slots.
        masks: Makes the masks of tokens behind a kept sequence.
        put: Puts an array on the model's device.
        direct: Reads short prompts of models that it knows; None: the model's modules read all.
        is_mixed: Rows go by different adapters, whose layers have to see all of a row.
    """

    def __init__(
        self,
        model: CausalModel,
        cache: SlotCache,
        masks: AttentionMasks,
        put: Callable[[NDArray], Tensor],
        direct: DirectLlama | None,
        *,
        is_mixed: bool = False,
    ):
        self.model, self.cache, self.masks, self.put = model, cache, masks, put
        self.direct, self.is_mixed = direct, is_mixed

    def read(self, openings: Sequence[Opening], first: int) -> Tensor:
        """Fills slots from `first` on, one a request, and returns the logits of each reply's first token, `[B, V]`.

        Args:
            openings: All whole, or all behind kept sequences.
            first: The first slot; those before it are taken and stay as they are.
        """
        sources = np.repeat(np.arange(len(openings)), [len(opening.requests) for opening in openings])
        if openings[0].kept is None:
            return self._read_whole(openings, self.put(sources), first)
        return self._logits(self._read_on(openings, sources, first), self.put(sources))

    def _logits(self, features_nH: Tensor, sources_B: Tensor) -> Tensor:
        return self.model.logits(features_nH).index_select(0, sources_B)

    def _only(self, places_n: Tensor) -> Tensor | None:
        return None if self.is_mixed else places_n

    def _read_whole(self, openings: Sequence[Opening], sources_B: Tensor, first: int) -> Tensor:
        lengths = np.array([len(opening.prompt) for opening in openings])
        token_ids = np.zeros((len(openings), lengths.max()), np.int64)
        for row, opening in zip(token_ids, openings, strict=True):
            row[: len(opening.prompt)] = opening.prompt
        token_ids_nT, length = self.put(token_ids), token_ids.shape[1]
        last_n = self.put(np.arange(len(openings)) * length + lengths - 1)
        self.cache.reserve(length + 1, first)
        if self.direct is not None and self.direct.can_read(length):
            return self.direct.read(token_ids_nT, last_n, sources_B, first)
        prefill = Cache(layers=[PrefillLayer() for _ in range(self.model.num_layers)])
        features = self.model.features(
            token_ids_nT, places_N=self._only(last_n), past_key_values=prefill, use_cache=True
        )
        keys, values = [layer.keys for layer in prefill.layers], [layer.values for layer in prefill.layers]
        self.cache.fill(keys, values, sources_B, first)
        return self._logits(features.flatten(0, 1).index_select(0, last_n), sources_B)

    def _read_on(self, openings: Sequence[Opening], sources: NDArray[np.int64], first: int) -> Tensor:
        """Reads what is new; a shorter row reads its last token again, in the same place, until the longest ends."""
        count, width = len(openings), max(opening.num_new for opening in openings)
        starts, ends = (np.array(column) for column in zip(*((o.start, len(o.prompt)) for o in openings), strict=True))
        positions = np.minimum(starts[:, None] + np.arange(width), ends[:, None] - 1)
        token_ids = np.array(
            [[*o.prompt[o.start :], *(o.prompt[-1:] * (width - o.num_new))] for o in openings], np.int64
        )
        length = round_up(int(ends.max()) + 1)
        self.cache.reserve(length, first)
        for slot, opening in enumerate(openings, first):
            assert opening.kept is not None
            self.cache.put(opening.kept.states, opening.start, slot)
        positions_BS = self.put(positions)
        rows = slice(first, first + count)
        features = self.model.features(
            self.put(token_ids),
            positions_BS,
            places_N=self._only(self.put(np.arange(1, count + 1) * width - 1)),
            attention_mask=self.masks.between(positions_BS, torch.arange(length, device=self.model.device)[None]),
            past_key_values=Cache(
                layers=[ContinuedLayer(layer, rows, positions_BS, length) for layer in self.cache.layers]
            ),
            use_cache=True,
        )
        if len(sources) > count:
            self.cache.move(first + sources, first + np.arange(len(sources)), length)
        return features[:, -1]


def batches_by_length(items: Iterable[T], max_tokens: int, length: Callable[[T], int]) -> list[list[T]]:
    """Returns what is to be read in batches of at most `max_tokens`, padding included; a longer one goes alone.

    The longest of a batch is at most twice the shortest, so that little is padding.

    Example: lengths 30, 10, 12, 25 and 60 tokens -> lengths [10, 12] and [25, 30].
    """
    batches: list[list[T]] = []
    for item in sorted(items, key=length):
        batch = batches[-1] if batches else []
        if not batch or length(item) > 2 * length(batch[0]) or length(item) * (len(batch) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(item)
    return batches
