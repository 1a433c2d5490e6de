"""Trials of a loaded model: whether the sampler computes what a plain forward does, and which shortcuts are exact."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reinforge.engine.model.causal_model import TRIAL_FAILURES, CausalModel
from reinforge.engine.sampling.prefill import Prefiller, PrefillRequest
from reinforge.engine.sampling.prefix_cache import CachedPrefix
from reinforge.engine.sampling.projection import can_halve
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.errors import EngineError

logger = logging.getLogger(__name__)

NUM_PROMPT, NUM_STEPS = 5, 3  # tokens of a trial's prompt, and decode steps after it


class SamplerTrials:
    """Compares the sampler's logits with those of a plain forward; runs in the sampler's thread, on empty slots.

    Args:
        decode: Returns the logits after one more token of each row, from token ids and positions.
    """

    def __init__(
        self, model: CausalModel, prefiller: Prefiller, decode: Callable[[NDArray[np.int64], NDArray[np.int64]], Tensor]
    ):
        self.model, self.prefiller, self._decode = model, prefiller, decode
        self._family = model.config.model_type
        # from the middle of the vocabulary: its first tokens may be reserved ones, which a pretrained model has never
        # seen and whose logits change by up to half of their size by rounding in bfloat16 alone
        self._tokens = tuple(
            model.vocab_size // 4 + n * (model.vocab_size // 32) for n in range(NUM_PROMPT + NUM_STEPS)
        )
        self._limit = 1e-3 if model.dtype == torch.float32 else 0.35
        if can_halve(model):
            self._limit = 0.1  # SmolLM2 0.027; its shape with random weights 0.0015
        self._shortcut_limit = 1e-4 if model.dtype == torch.float32 else 0.1

    @torch.no_grad()
    def check(self) -> None:
        """Compares two prompts that begin one after the other, and three decode steps of both together.

        In models without states also a prompt after a cached one. Two rows show modules that keep a state of their own.
        """
        rows = [(self._tokens, NUM_PROMPT), (self._tokens[2:], 2)]
        try:
            logits = [[self._start(ids[:start], slot)[0]] for slot, (ids, start) in enumerate(rows)]
            for step in range(NUM_STEPS):
                tokens = np.array([ids[start + step] for ids, start in rows], np.int64)
                both = self._decode(tokens, np.array([start + step for _, start in rows]))
                for found, row in zip(logits, both, strict=True):
                    found.append(row.clone())  # the next step may overwrite it
            if not self.model.has_states:
                logits[0].append(self._continue()[0])
            errors = [
                self._measure(torch.stack(found), start - 1, ids)
                for found, (ids, start) in zip(logits, rows, strict=True)
            ]
        except TRIAL_FAILURES as cause:
            reason = f"{type(cause).__name__}: {cause}"
            raise EngineError(f"cannot sample from {self._family!r} models: {reason}") from cause
        if not max(errors) <= self._limit:
            raise EngineError(f"cannot sample from {self._family!r} models: cached logits differ by {max(errors):g}")

    def can_continue(self) -> bool:
        """Returns True if a cached prompt can be continued by several tokens at once; else logs the reason."""
        if not self.model.has_states:
            return True  # `check` has tried it

        def compute() -> float:
            self._start(self._tokens[:NUM_PROMPT], 0)
            return self._measure(self._continue(), NUM_PROMPT + NUM_STEPS - 1)

        return self._try(compute, "computing every prompt whole (slower)")

    def can_pad(self) -> bool:
        """Returns True if prompts of different lengths can be computed together; else logs the reason."""
        if not self.model.has_states:
            return True  # padded on the right, where a causal model never looks

        def compute() -> float:
            short = self._tokens[1:3]
            both = [PrefillRequest(ids, [SampleRequest(ids, 1)]) for ids in (self._tokens[:NUM_PROMPT], short)]
            logits = [self.prefiller.run(both, 0)]
            tokens = [self._tokens[NUM_PROMPT], self._tokens[3]]
            logits.append(self._decode(np.array(tokens, np.int64), np.array([NUM_PROMPT, 2])))
            long = self._measure(torch.stack([each[0] for each in logits]), NUM_PROMPT - 1)
            return max(long, self._measure(torch.stack([each[1] for each in logits]), 1, self._tokens[1:4]))

        return self._try(compute, "computing only prompts of equal length together (slower)")

    def _start(self, prompt: tuple[int, ...], slot: int) -> Tensor:
        return self.prefiller.run([PrefillRequest(prompt, [SampleRequest(prompt, 1)])], slot)

    def _continue(self) -> Tensor:
        """Returns the logits after the whole sequence, computed after the first tokens of slot 0."""
        prompt, states = self._tokens[:NUM_PROMPT], self.prefiller.cache.copy_out(0, NUM_PROMPT)
        cached = CachedPrefix(prompt, states)
        whole = PrefillRequest(self._tokens, [SampleRequest(self._tokens, 1)], cached=cached, num_cached=NUM_PROMPT)
        return self.prefiller.run([whole], 0)

    def _measure(self, logits: Tensor, first: int, token_ids: tuple[int, ...] | None = None) -> float:
        """Returns the largest difference to the plain logits from position `first` on, in units of their size."""
        ids = torch.tensor([token_ids or self._tokens], device=self.model.device)
        plain = self.model.logits(self.model.features(ids)[0])
        expected = plain[[*range(first, len(plain)), *[-1] * (first + len(logits) - len(plain))]][: len(logits)]
        return (logits - expected).abs().max().item() / max(1.0, plain.abs().max().item())

    @torch.no_grad()
    def _try(self, compute: Callable[[], float], consequence: str) -> bool:
        try:
            error = compute()
        except TRIAL_FAILURES as cause:
            reason = f"{type(cause).__name__}: {cause}"
        else:
            if error <= self._shortcut_limit:
                return True
            reason = f"logits differ by {error:g}"
        logger.info("%s: %s: %s", self._family, consequence, reason)
        return False
