"""Makes padded batches of samples and finds the prefixes and stems that their rows share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from reinforge.engine.model.flash_attention import find_prefix_runs
from reinforge.engine.token_batch import BatchSupports, Prefixes, Stems, TokenBatch
from reinforge.errors import TrajectoryError
from reinforge.types.sample import TrainingSample

MAX_SHARED_FRACTION = 0.9
"""Prefixes are shared if at most this fraction of the tokens remains: the second forward pass has its own overhead."""

RUN_OVERHEAD_TOKENS = 1024  # overhead of one run of the flash attention kernel, in prefix tokens repeated row by row

PASS_OVERHEAD_TOKENS = 128
"""Overhead of another forward pass on a small model, in tokens; stems are shared only if that saves more."""


def collate(samples: Sequence[TrainingSample], device: torch.device | None = None) -> TokenBatch:
    """Returns the samples as one batch.

    Raises:
        TrajectoryError: A sample trains its first token, which has no context, or a preference pair is not two samples
            of different rewards.
    """
    if any(len(sample) and sample.loss_mask[0] for sample in samples):
        raise TrajectoryError("loss_mask[0] is True, but the first token of a sample has no context to predict it from")

    lengths = np.array([len(sample) for sample in samples])
    is_token_BT = np.arange(lengths.max()) < lengths[:, None]

    def pad(rows: Sequence[np.ndarray], dtype: type, fill: float = 0) -> Tensor:
        padded: np.ndarray = np.full(is_token_BT.shape, fill, dtype)
        padded[is_token_BT] = np.concatenate(rows)
        return torch.from_numpy(padded).to(device)

    families = _group_by_prefix(samples)
    prefixes = _find_prefixes(len(samples), families, device)
    width = int(lengths.max()) - 1 if prefixes is None else prefixes.token_ids.shape[1]
    olds = [s.sampling_logprobs if s.old_logprobs is None else s.old_logprobs for s in samples]
    refs = [s.ref_logprobs for s in samples if s.ref_logprobs is not None]
    returns = [s.returns for s in samples if s.returns is not None]
    values = [s.values for s in samples if s.values is not None]
    return TokenBatch(
        token_ids=pad([s.token_ids for s in samples], np.int64),
        lengths=torch.from_numpy(lengths).to(device),
        loss_mask=pad([s.loss_mask for s in samples], np.bool_),
        temperatures=pad([s.temperatures for s in samples], np.float32, 1),
        sampling_logprobs=pad([s.sampling_logprobs for s in samples], np.float32),
        old_logprobs=pad(olds, np.float32),
        ref_logprobs=pad(refs, np.float32) if len(refs) == len(samples) else None,
        advantages=pad([np.zeros(len(s)) if s.advantages is None else s.advantages for s in samples], np.float32),
        weights=torch.tensor([s.weight for s in samples], dtype=torch.float32, device=device),
        prefixes=prefixes,
        stems=find_stems(list(families), width, device),  # without siblings each family is one sample, in order
        pairs=_find_pairs(samples, device),
        returns=pad(returns, np.float32) if len(returns) == len(samples) else None,
        old_values=pad(values, np.float32) if len(values) == len(samples) else None,
        old_logprobs_from_learner=any(sample.old_logprobs is not None for sample in samples),
        supports=_collect_supports(samples, device),
        targets=(
            None
            if all(sample.targets is None for sample in samples)
            else pad([s.token_ids if s.targets is None else s.targets for s in samples], np.int64)
        ),
    )


def _collect_supports(samples: Sequence[TrainingSample], device: torch.device | None) -> BatchSupports | None:
    if all(sample.supports is None for sample in samples):
        return None
    counts: list[np.ndarray] = [np.zeros(1, np.int64)]
    token_ids: list[np.ndarray] = [np.zeros(0, np.int32)]
    indices: list[np.ndarray] = []
    places: dict[bytes, int] = {}  # siblings under one grammar share masks
    for sample in samples:
        if sample.supports is None:
            counts.append(np.zeros(sample.num_trained, np.int64))
            indices.append(np.full(sample.num_trained, -1))
            continue
        numbers = np.maximum(sample.supports.counts, 0)
        counts.append(numbers[sample.loss_mask])
        token_ids.append(sample.supports.token_ids[np.repeat(sample.loss_mask, numbers)])
        rows = np.array([-1, *(places.setdefault(mask, len(places)) for mask in sample.supports.masks)])
        indices.append(rows[np.maximum(-sample.supports.counts[sample.loss_mask], 0)])
    masks = np.frombuffer(b"".join(places), np.uint8).reshape(len(places), -1 if places else 0)
    return BatchSupports(
        np.concatenate(counts).cumsum(),
        torch.from_numpy(np.concatenate(token_ids)).to(device).long(),
        np.concatenate(indices),
        torch.from_numpy(masks.copy()).to(device),
    )


def _find_prefixes(
    count: int, families: dict[tuple[int, ...], list[int]], device: torch.device | None
) -> Prefixes | None:
    if len(families) == count or () in families:
        return None
    groups = np.zeros(count, np.int64)
    token_ids = np.zeros((len(families), max(map(len, families))), np.int64)
    for number, (prefix, members) in enumerate(families.items()):
        groups[members] = number
        token_ids[number, : len(prefix)] = prefix
    lengths = [len(prefix) for prefix in families]
    tensors = [torch.from_numpy(array).to(device) for array in (token_ids, np.array(lengths), groups)]
    num_runs = 1 + sum(len(a) != len(b) for a, b in pairwise(families.values()))
    runs_pay_off = num_runs * RUN_OVERHEAD_TOKENS <= count * token_ids.shape[1]
    runs = find_prefix_runs(groups.tolist(), lengths) if runs_pay_off else None
    return Prefixes(tensors[0], tensors[1], tensors[2], runs)


def find_stems(prompts: Sequence[tuple[int, ...]], width: int, device: torch.device | None) -> Stems | None:
    """Returns the shared beginnings of prompts, of the length that saves the most tokens; None if it saves too few.

    A stem ends before the last token of every prompt, so every feature that predicts a token is computed after it.

    Example: prompts a a a a b b c, a a a a d and e e e e b, padded to 8 tokens: 3 x 8 = 24 tokens; with stems of 4
        tokens 2 x 4 + 3 x 4 = 20 (a saving that counts only with more rows).

    Args:
        prompts: Each row's tokens before the first trained one.
    """
    longest = min(map(len, prompts)) - 1
    if longest < 1 or len(prompts) * width <= PASS_OVERHEAD_TOKENS:
        return None
    token_ids = np.array([prompt[:longest] for prompt in prompts], np.int64)
    order = sorted(range(len(prompts)), key=lambda row: token_ids[row].tobytes())
    differ = token_ids[order[1:]] != token_ids[order[:-1]]
    shared = np.where(differ.any(axis=1), differ.argmax(axis=1), longest)  # leading tokens equal to the row before
    lengths = np.arange(1, longest + 1)
    counts = 1 + np.bincount(shared, minlength=longest).cumsum()[:longest]  # different beginnings of each length
    whole = len(prompts) * width
    saved = (len(prompts) - counts) * lengths
    length = int(lengths[saved.argmax()])
    if saved.max() < PASS_OVERHEAD_TOKENS or whole - saved.max() > MAX_SHARED_FRACTION * whole:
        return None
    begins = np.concatenate(([True], shared < length))
    groups = np.zeros(len(prompts), np.int64)
    groups[order] = begins.cumsum() - 1
    stems = token_ids[np.array(order)[begins], :length]
    return Stems(torch.from_numpy(stems).to(device), torch.from_numpy(groups).to(device))


def _group_by_prefix(samples: Sequence[TrainingSample]) -> dict[tuple[int, ...], list[int]]:
    families: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        families.setdefault(get_prefix(sample), []).append(index)
    return families


def get_prefix(sample: TrainingSample) -> tuple[int, ...]:
    first = int(sample.loss_mask.argmax()) if len(sample) else 0
    return tuple(sample.token_ids[: first if first or sample.num_trained else len(sample)].tolist())


def _find_pairs(samples: Sequence[TrainingSample], device: torch.device | None) -> Tensor | None:
    pairs = [sorted(pair, key=lambda i: -samples[i].reward) for pair in group_pairs(samples) if len(pair) > 1]
    for pair in pairs:
        rewards = [samples[i].reward for i in pair]
        if len(pair) != 2 or rewards[0] == rewards[1]:
            name = samples[pair[0]].pair_id
            raise TrajectoryError(f'pair "{name}" must be two samples with different rewards, but has {rewards}')
    return torch.tensor(pairs, device=device) if pairs else None


def make_plain_sample(token_ids: Sequence[int]) -> TrainingSample:
    """Returns a sample in which every token but the first is trained, at temperature 1."""
    n = len(token_ids)
    return TrainingSample(
        token_ids=np.asarray(token_ids, np.int64),
        loss_mask=np.arange(n) > 0,
        sampling_logprobs=np.zeros(n, np.float32),
        temperatures=np.ones(n, np.float32),
        policy_versions=np.full(n, -1, np.int64),
        turn_ids=np.full(n, -1, np.int64),
    )


def group_pairs(samples: Sequence[TrainingSample]) -> list[list[int]]:
    """Returns the samples' indices in units that must be computed together: a preference pair, or a single sample.

    Example: `pair_id` of a, None, a, None -> [[0, 2], [1], [3]].
    """
    units: dict[int | str, list[int]] = {}
    for index, sample in enumerate(samples):
        units.setdefault(index if sample.pair_id is None else sample.pair_id, []).append(index)
    return list(units.values())
