"""A sampler for models that are only served: it guesses the next tokens of a reply, and computes them in one step.

Agents repeat their context: code that they edit, results of tools, keys of JSON. Where the last tokens occurred before,
those that followed them there are likely to follow again (prompt lookup, as in arXiv:2304.04487). A step for several
tokens of one reply takes little longer than a step for one, because it reads the weights once. Every position is
sampled as always, and guesses after the first wrong one are dropped, so the reply is the one without guesses, rounding
apart. Whether a reply is alone depends on timing, and with it that rounding, so no run samples with guesses.

Shapes: T tokens of one row, L tokens that they attend to, K key and value heads, V vocabulary.
"""

# No `from __future__ import annotations`: TorchScript reads the annotations of `_decode_row`.

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from reinforge.engine.model.attention import build_additive_mask, few_keys_attention
from reinforge.engine.sampling.fast_llama import LlamaSizes, compute_logits, finish_layer, project_qkv
from reinforge.engine.sampling.kv_cache import round_up
from reinforge.engine.sampling.llama_weights import LayerWeights, OuterWeights
from reinforge.engine.sampling.projection import AdapterRows
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.engine.sampling.sampler import ReplySampler
from reinforge.engine.sampling.sampler_trials import NUM_PROMPT, NUM_STEPS, SamplerTrials
from reinforge.engine.sampling.token_sampling import compile_torchscript, draw_uniforms, sample_tokens

NUM_KEY = 3  # tokens that must have occurred before
FEW, MANY = 3, 7  # guesses of a step: many after one whose guesses were all right
MAX_PAUSE = 32


def count_right(sampled: Sequence[int], guesses: Sequence[int]) -> int:
    """Returns how many guesses were sampled before the first that was not.

    Example: sampled 4 5 7 2, guesses 4 5 6 -> 2
    """
    return next((n for n, guess in enumerate(guesses) if sampled[n] != guess), len(guesses))


class RepeatedText:
    """The prompt and reply of one conversation so far.

    Example: 1 2 3 4 5 1 2 3 -> guesses 4 5 1
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}  # the place after the tokens that occurred
        self._most, self._pause, self._left = FEW, 0, 0

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            place = len(self._token_ids)
            if place >= NUM_KEY:
                self._following[tuple(self._token_ids[-NUM_KEY:])] = place
            self._token_ids.append(token)

    def guess(self) -> list[int]:
        """Returns the tokens that may come next; empty without a guess, and for a while after wrong ones."""
        if self._left:
            self._left -= 1
            return []
        place = self._following.get(tuple(self._token_ids[-NUM_KEY:]))
        return [] if place is None else self._token_ids[place : place + self._most]

    def learn(self, num_guesses: int, num_right: int) -> None:
        """Adapts the next guesses: where none is right, it waits 1, 2, 4, ... steps before the next."""
        self._most = MANY if num_right == num_guesses else FEW
        self._pause = 0 if num_right else min(MAX_PAUSE, max(1, 2 * self._pause))
        self._left = self._pause


def _decode_row(
    token_ids: Tensor,
    positions: Tensor,
    rows: AdapterRows,
    layers: list[LayerWeights],
    outer: OuterWeights,
    keys: list[Tensor],
    values: list[Tensor],
    slides: list[bool],
    window: int | None,
    length: int,
    sizes: LlamaSizes,
) -> Tensor:
    """Returns the logits after each of several tokens of the row in slot 0, which attend to `length` places."""
    x = F.embedding(token_ids, outer.embedding)
    cos, sin = outer.cos.index_select(0, positions)[:, None], outer.sin.index_select(0, positions)[:, None]
    lanes = torch.arange(sizes.num_kv_heads, device=x.device) * keys[0].shape[2]
    indices = (positions[:, None] + lanes).view(-1)
    zero, places = torch.zeros([], device=x.device, dtype=x.dtype), torch.arange(length, device=x.device)[None]
    full = build_additive_mask(positions[None], places, None, zero, sizes.least)
    sliding = full if window is None else build_additive_mask(positions[None], places, window, zero, sizes.least)
    for number, layer in enumerate(layers):
        query, key, value = project_qkv(x, layer, rows, cos, sin, sizes)
        keys[number].view(-1, sizes.head_size).index_copy_(0, indices, key.reshape(-1, sizes.head_size))
        values[number].view(-1, sizes.head_size).index_copy_(0, indices, value.reshape(-1, sizes.head_size))
        own = keys[number][:1, :, :length].float(), values[number][:1, :, :length].float()
        mask = sliding if slides[number] else full  # in float32, since few rows are slow in bfloat16
        attended = few_keys_attention(query.transpose(0, 1)[None].float(), own[0], own[1], mask.float(), sizes.scale)
        x = finish_layer(x, attended.reshape(x.shape[0], -1).to(x.dtype), layer, rows, sizes)
    return compute_logits(x, outer, sizes)


class GuessTrials(SamplerTrials):
    """Tries a step of several tokens."""

    def can_guess(self, decode_row: Callable[[NDArray[np.int64], NDArray[np.int64]], Tensor]) -> bool:
        """Returns True if several tokens of a reply can be computed in one step; else logs the reason.

        Args:
            decode_row: Returns the logits after each of some tokens of slot 0, from token ids and positions.
        """
        self._shortcut_limit = self._limit  # for float16 copies, too

        def compute() -> float:
            self._start(self._tokens[:NUM_PROMPT], 0)
            places = np.arange(NUM_PROMPT, NUM_PROMPT + NUM_STEPS)
            return self._measure(decode_row(np.array(self._tokens)[places], places), NUM_PROMPT)

        return self._try(compute, "computing one token of a reply at a time (slower)")


class GuessingSampler(ReplySampler):
    """Samples as `ReplySampler` does, but a reply alone in its batch by several tokens a step where it can."""

    can_guess = False  # set by a trial of this model
    _guessed: SampleRequest | None = None  # the reply that `_text` belongs to
    _text: RepeatedText

    def _validate(self) -> None:
        super()._validate()
        if self._prefiller.fast_llama is not None:
            trials = GuessTrials(self.model, self._prefiller, self._forward_mixed)
            self.can_guess = trials.can_guess(self._forward_row)

    def _step(self) -> None:
        if guesses := self._guess():
            self._step_with_guesses(guesses)
        else:
            super()._step()

    def _guess(self) -> list[int]:
        """Returns tokens that may come next in the only reply; empty without a guess, or with other replies."""
        batch = self._batch
        if not self.can_guess or batch.count != 1 or self._prefiller.fast_llama is None:
            return []
        if batch.is_filtered[0] or batch.is_constrained[0] or batch.num_top_logprobs[0]:
            return []
        request, count = batch.requests[0], int(batch.num_sampled[0])
        if self._guessed is not request:
            self._guessed, self._text = request, RepeatedText()
            self._text.extend(request.prompt)
        self._text.extend(batch.token_ids[0, len(self._text) - len(request.prompt) : count].tolist())
        return self._text.guess()[: int(batch.limits[0]) - count - 1]

    def _step_with_guesses(self, guesses: list[int]) -> None:
        """Samples the next token of the only reply, and those after it as long as they are the guessed ones."""
        batch, request, length = self._batch, self._batch.requests[0], len(guesses) + 1
        token_ids = np.array([batch.last_tokens[0], *guesses], np.int64)
        with self._route_adapters([request.adapter]):
            logits = self._retry_with_smaller_cache(
                lambda: self._forward_row(token_ids, batch.positions[0] + np.arange(length))
            )
        self._steps += 1
        uniforms = draw_uniforms(batch.seeds[:1].repeat(length), batch.num_sampled[0] + np.arange(length))
        temperatures, uniforms_T = self._to_device(np.stack((batch.temperatures[:1].repeat(length), uniforms)))
        sampled = sample_tokens(logits, temperatures, uniforms_T, torchscript=self.model.fast_paths.torchscript)
        tokens, logprobs = (each.numpy() for each in sampled[:2])
        num_right = count_right(tokens.tolist(), guesses)
        self._text.learn(len(guesses), num_right)
        for place in range(num_right + 1):
            if batch.count:  # the reply is not done
                batch.positions[0] += 1
                self._record(tokens[place : place + 1], logprobs[place : place + 1], 0)
                self._deliver_tokens(0)

    def _forward_row(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Returns the logits after each of several tokens of the reply in slot 0, `[T, V]`."""
        fast, length = self._prefiller.fast_llama, round_up(int(positions[-1]) + 1)
        assert fast is not None  # or there are no guesses
        self._cache.reserve(length, 1, 1)
        token_ids_T, positions_T = self._to_device(np.stack((token_ids, positions)))
        (rows, layers), (keys, values) = fast.choose_weights(len(token_ids)), fast.list_slots()
        outer, settings = fast.weights.collect_outer(length), (fast.slides, self._masks.window, length, fast.sizes)
        decode = compile_torchscript(_decode_row, self.model.device, enabled=self.model.fast_paths.torchscript)
        return decode(token_ids_T, positions_T, rows, layers, outer, keys, values, *settings)
