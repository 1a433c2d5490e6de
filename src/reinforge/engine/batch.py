"""Training samples as padded tensors, and how samples are cut into micro-batches.

Shapes: B samples, T tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reinforge.errors import TrajectoryError
from reinforge.types.sample import TrainingSample


@dataclass(slots=True)
class TokenBatch:
    """What a loss sees; rows are padded on the right with token 0, mask False and zeros.

    Attributes:
        token_ids: `[B, T]`.
        lengths: `[B]` tokens of each row.
        loss_mask: `[B, T]` True where a token is trained; never at t = 0, which nothing comes before.
        temperatures: `[B, T]` temperature each token was drawn at; 1 elsewhere.
        sampling_logprobs: `[B, T]` log p under the sampler.
        old_logprobs: `[B, T]` log p under the weights that the job began with; the sampler's where not computed.
        ref_logprobs: `[B, T]` log p under the reference; None where not computed.
        advantages: `[B, T]` credit; 0 where an algorithm gave none.
        weights: `[B]` weight of each sample.
        entropies: `[B, T]` entropy of each token's distribution, set by the learner; None before it ran.
    """

    token_ids: Tensor
    lengths: Tensor
    loss_mask: Tensor
    temperatures: Tensor
    sampling_logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    entropies: Tensor | None = None


def collate(samples: Sequence[TrainingSample], device: torch.device | None = None) -> TokenBatch:
    """Returns the samples as one batch.

    Raises:
        TrajectoryError: A sample trains its first token, which no context precedes.
    """
    if any(len(sample) and sample.loss_mask[0] for sample in samples):
        raise TrajectoryError("loss_mask[0] is True: the first token of a sample has no context to be predicted from")

    def pad(rows: Sequence[np.ndarray], dtype: type, fill: float = 0) -> Tensor:
        padded: np.ndarray = np.full((len(rows), max(map(len, rows))), fill, dtype)
        for target, row in zip(padded, rows, strict=True):
            target[: len(row)] = row
        return torch.from_numpy(padded).to(device)

    olds = [s.sampling_logprobs if s.old_logprobs is None else s.old_logprobs for s in samples]
    refs = [s.ref_logprobs for s in samples if s.ref_logprobs is not None]
    return TokenBatch(
        token_ids=pad([s.token_ids for s in samples], np.int64),
        lengths=torch.tensor([len(s) for s in samples], device=device),
        loss_mask=pad([s.loss_mask for s in samples], np.bool_),
        temperatures=pad([s.temperatures for s in samples], np.float32, 1),
        sampling_logprobs=pad([s.sampling_logprobs for s in samples], np.float32),
        old_logprobs=pad(olds, np.float32),
        ref_logprobs=pad(refs, np.float32) if len(refs) == len(samples) else None,
        advantages=pad([np.zeros(len(s)) if s.advantages is None else s.advantages for s in samples], np.float32),
        weights=torch.tensor([s.weight for s in samples], dtype=torch.float32, device=device),
    )


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Returns indices in batches of at most `max_tokens` tokens, padding included; a longer row goes alone.

    Example: lengths [3, 9, 4, 8], 16 tokens -> [[0, 2], [3], [1]] by length; with 20 tokens -> [[0, 2], [3, 1]].
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if not batches or lengths[index] * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches
