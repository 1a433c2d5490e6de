"""Training samples as padded tensors, and how samples are cut into micro-batches.

Shapes: B samples, T tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from reinforge.engine.causal import Run, runs_of
from reinforge.errors import TrajectoryError
from reinforge.types.sample import TrainingSample

WORTH = 0.9
"""Prefixes are shared where that leaves at most this share of the tokens: a second pass has a price of its own."""

RUN_TOKENS = 1024
"""Tokens of prefixes, repeated row by row, that cost as much as a run of the kernel that sees them where they are."""

WORTH_TOKENS = 128
"""Stems are shared where that saves at least so many tokens: what the calls of another pass cost on small models."""


@dataclass(slots=True)
class Prefixes:
    """What siblings have in common: the tokens before the first trained one.

    Attributes:
        token_ids: `[G, P]`, padded on the right with 0.
        lengths: `[G]` tokens of each.
        groups: `[B]` the prefix of each sample.
        runs: The same for `causal.py`; None where siblings do not stand side by side, or repeating prefixes costs less.
    """

    token_ids: Tensor
    lengths: Tensor
    groups: Tensor
    runs: list[Run] | None


@dataclass(slots=True)
class Stems:
    """What different prompts begin with, all up to the same token: instructions, say, or the first squares of a board.

    Attributes:
        token_ids: `[S, C]`.
        groups: The stem of each row of the prompts.
    """

    token_ids: Tensor
    groups: Tensor


@dataclass(slots=True)
class BatchSupports:
    """The words that trained tokens were drawn from, in the order of `loss_mask.nonzero()`.

    Attributes:
        ends: `[N + 1]`, on the host: token n was drawn from `words[ends[n] : ends[n + 1]]`; from every word, if none.
        words: The words.
    """

    ends: np.ndarray
    words: Tensor


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
        returns: `[B, T]` what the critic's values should be; None where there is no critic.
        old_values: `[B, T]` the critic's values when the job began; None where there is no critic.
        weights: `[B]` weight of each sample.
        prefixes: What samples share; None where each begins in its own way.
        stems: What prefixes begin with, or samples where there are no prefixes; None where that is not worth a pass.
        pairs: `[P, 2]` rows of each preference pair whose two samples are here: the preferred one, the other one.
        entropies: `[B, T]` entropy of each token's distribution, set by the learner; None before it ran.
        values: `[B, T]` the critic's values as it is, set by the learner; None where there is no critic.
        old_is_learners: True where the learner has computed `old_logprobs`, False where they are the sampler's.
        supports: What trained tokens were drawn from; None where each was drawn from every word.
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
    prefixes: Prefixes | None = None
    stems: Stems | None = None
    pairs: Tensor | None = None
    entropies: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    values: Tensor | None = None
    old_is_learners: bool = False
    supports: BatchSupports | None = None


def collate(samples: Sequence[TrainingSample], device: torch.device | None = None) -> TokenBatch:
    """Returns the samples as one batch.

    Raises:
        TrajectoryError: A sample trains its first token, which no context precedes, or a preference pair is no pair.
    """
    if any(len(sample) and sample.loss_mask[0] for sample in samples):
        raise TrajectoryError("loss_mask[0] is True: the first token of a sample has no context to be predicted from")

    lengths = np.array([len(sample) for sample in samples])
    is_token_BT = np.arange(lengths.max()) < lengths[:, None]

    def pad(rows: Sequence[np.ndarray], dtype: type, fill: float = 0) -> Tensor:
        padded: np.ndarray = np.full(is_token_BT.shape, fill, dtype)
        padded[is_token_BT] = np.concatenate(rows)
        return torch.from_numpy(padded).to(device)

    families = _families(samples)
    prefixes = _prefixes(len(samples), families, device)
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
        stems=stems_of(list(families), width, device),  # without siblings each family is a sample, in order
        pairs=_pairs(samples, device),
        returns=pad(returns, np.float32) if len(returns) == len(samples) else None,
        old_values=pad(values, np.float32) if len(values) == len(samples) else None,
        old_is_learners=any(sample.old_logprobs is not None for sample in samples),
        supports=_supports(samples, device),
    )


def _supports(samples: Sequence[TrainingSample], device: torch.device | None) -> BatchSupports | None:
    if all(sample.supports is None for sample in samples):
        return None
    counts: list[np.ndarray] = [np.zeros(1, np.int64)]
    words: list[np.ndarray] = []
    for sample in samples:
        if sample.supports is None:
            counts.append(np.zeros(sample.num_trained, np.int64))
        else:
            counts.append(sample.supports.counts[sample.loss_mask])
            words.append(sample.supports.token_ids[np.repeat(sample.loss_mask, sample.supports.counts)])
    return BatchSupports(np.concatenate(counts).cumsum(), torch.from_numpy(np.concatenate(words)).to(device).long())


def _prefixes(count: int, families: dict[tuple[int, ...], list[int]], device: torch.device | None) -> Prefixes | None:
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
    are_worth_it = num_runs * RUN_TOKENS <= count * token_ids.shape[1]
    runs = runs_of(groups.tolist(), lengths) if are_worth_it else None
    return Prefixes(tensors[0], tensors[1], tensors[2], runs)


def stems_of(prompts: Sequence[tuple[int, ...]], width: int, device: torch.device | None) -> Stems | None:
    """Returns what prompts begin with, up to where computing that once leaves the fewest tokens; None: it saves little.

    The last token of every prompt is behind its stem, so that whatever is predicted from prompts is, too.

    Example: prompts a a a a b b c, a a a a d and e e e e b, 8 tokens wide: 3 x 8 = 24 tokens; with stems of 4 tokens
        2 x 4 + 3 x 4 = 20 (which is worth it where there are more of them).

    Args:
        prompts: Each row's tokens before the first trained one.
        width: Tokens of the rows.
        device: Where the tensors are put.
    """
    longest = min(map(len, prompts)) - 1
    if longest < 1 or len(prompts) * width <= WORTH_TOKENS:
        return None
    token_ids = np.array([prompt[:longest] for prompt in prompts], np.int64)
    order = sorted(range(len(prompts)), key=lambda row: token_ids[row].tobytes())
    differ = token_ids[order[1:]] != token_ids[order[:-1]]
    alike = np.where(differ.any(axis=1), differ.argmax(axis=1), longest)  # first tokens shared with the row before
    lengths = np.arange(1, longest + 1)
    counts = 1 + np.bincount(alike, minlength=longest).cumsum()[:longest]  # rows that begin anew within so many tokens
    whole = len(prompts) * width
    saved = (len(prompts) - counts) * lengths
    length = int(lengths[saved.argmax()])
    if saved.max() < WORTH_TOKENS or whole - saved.max() > WORTH * whole:
        return None
    begins = np.concatenate(([True], alike < length))
    groups = np.zeros(len(prompts), np.int64)
    groups[order] = begins.cumsum() - 1
    stems = token_ids[np.array(order)[begins], :length]
    return Stems(torch.from_numpy(stems).to(device), torch.from_numpy(groups).to(device))


def _families(samples: Sequence[TrainingSample]) -> dict[tuple[int, ...], list[int]]:
    """Returns the samples' indices by their prefixes."""
    families: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        families.setdefault(prefix_of(sample), []).append(index)
    return families


def prefix_of(sample: TrainingSample) -> tuple[int, ...]:
    """Returns what stands before a sample's first trained token (everything, if none is)."""
    first = int(sample.loss_mask.argmax()) if len(sample) else 0
    return tuple(sample.token_ids[: first if first or sample.num_trained else len(sample)].tolist())


def _pairs(samples: Sequence[TrainingSample], device: torch.device | None) -> Tensor | None:
    pairs = [sorted(unit, key=lambda i: -samples[i].reward) for unit in units_of(samples) if len(unit) > 1]
    for pair in pairs:
        rewards = [samples[i].reward for i in pair]
        if len(pair) != 2 or rewards[0] == rewards[1]:
            name = samples[pair[0]].pair_id
            raise TrajectoryError(f'pair "{name}" has to be two samples of different rewards, not {rewards}')
    return torch.tensor(pairs, device=device) if pairs else None


def units_of(samples: Sequence[TrainingSample]) -> list[list[int]]:
    """Returns the samples' indices by what must be computed together: the two of a pair, or one alone.

    Example: `pair_id` of a, None, a, None -> [[0, 2], [1], [3]].
    """
    units: dict[int | str, list[int]] = {}
    for index, sample in enumerate(samples):
        units.setdefault(index if sample.pair_id is None else sample.pair_id, []).append(index)
    return list(units.values())


@dataclass(frozen=True, slots=True)
class _Unit:
    """Siblings that share a forward: `prefix` tokens once, `suffix` at most for each member."""

    prefix: int
    suffix: int
    members: list[int]


def cut(samples: Sequence[TrainingSample], max_tokens: int, *, share: bool = True) -> list[list[int]]:
    """Returns indices in micro-batches of at most `max_tokens` tokens, padding included.

    Siblings stay together where their common prefix is worth sharing, and are cut only where they are too many for
    one batch. All others go with them where that leaves fewer tokens, else as rows, with rows of like length; one that
    is too long goes alone. The two samples of a preference pair are never parted, even where they are too long
    together.

    Example: three samples of a prefix of 6 tokens, each with 2 more, and one of 9: 12 tokens shared, 24 as rows
        => [[3], [0, 1, 2]] with max_tokens 12
    """
    families: dict[tuple[int, ...], list[list[int]]] = {}
    alone: list[list[int]] = []
    for together in units_of(samples):
        prefixes = {prefix_of(samples[i]) for i in together}
        (families.setdefault(prefixes.pop(), []) if len(prefixes) == 1 else alone).append(together)
    units: list[_Unit] = []
    others: list[_Unit] = []
    apart: list[list[int]] = []
    for prefix, members in families.items():
        suffixes = [len(samples[i]) - len(prefix) for i in chain(*members)]
        total, size = sum(suffixes), max(1, (max_tokens - len(prefix)) // max(suffixes))
        parts = [_Unit(len(prefix), max(suffixes), part) for part in _parts(members, size)]
        if share and len(prefix) + total <= WORTH * (len(prefix) * len(suffixes) + total):
            units += parts
        else:
            others += parts
            apart += members
    rows, batches = _rows(samples, alone + apart, max_tokens), _batches(units, max_tokens)
    if units and others:
        left, joint = _rows(samples, alone, max_tokens), _batches(units + others, max_tokens)
        if _computed(samples, left, joint) <= _computed(samples, rows, batches):
            rows, batches = left, joint
    return rows + [[i for unit in batch for i in unit.members] for batch in batches]


def _batches(units: Sequence[_Unit], max_tokens: int) -> list[list[_Unit]]:
    batches: list[list[_Unit]] = []
    suffix = num_rows = 0
    for unit in sorted(units, key=lambda unit: (unit.prefix, unit.suffix, unit.members)):
        suffix, num_rows = max(suffix, unit.suffix), num_rows + len(unit.members)
        if not batches or (len(batches[-1]) + 1) * unit.prefix + num_rows * suffix > max_tokens:
            batches.append([])
            suffix, num_rows = unit.suffix, len(unit.members)
        batches[-1].append(unit)
    return batches


def _rows(samples: Sequence[TrainingSample], units: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    lengths = [max(len(samples[i]) for i in together) for together in units]
    batches = micro_batches(lengths, max_tokens, list(map(len, units)))
    return [[i for number in batch for i in units[number]] for batch in batches]


def _computed(samples: Sequence[TrainingSample], rows: Sequence[list[int]], batches: Sequence[list[_Unit]]) -> int:
    """Returns the tokens of rows and of batches that share, padding included, and what their passes cost besides."""
    padded = sum(len(batch) * max(len(samples[i]) for i in batch) for batch in rows)
    return padded + sum(map(_num_tokens, batches)) + WORTH_TOKENS * (len(rows) + 2 * len(batches))


def _parts(members: Sequence[list[int]], size: int) -> list[list[int]]:
    """Returns members in parts of at most `size`; what must stay together does.

    Example: [[0, 3], [1], [2, 4]] in parts of 3 -> [[0, 3, 1], [2, 4]]; in parts of 1 -> [[0, 3], [1], [2, 4]].
    """
    parts: list[list[int]] = []
    for together in members:
        if not parts or len(parts[-1]) + len(together) > size:
            parts.append([])
        parts[-1] += together
    return parts


def _num_tokens(units: Sequence[_Unit]) -> int:
    num_rows = sum(len(unit.members) for unit in units)
    return len(units) * max(unit.prefix for unit in units) + num_rows * max(unit.suffix for unit in units)


def micro_batches(lengths: Sequence[int], max_tokens: int, counts: Sequence[int] | None = None) -> list[list[int]]:
    """Returns indices in batches of at most `max_tokens` tokens, padding included; a longer one goes alone.

    Example: lengths [3, 9, 4, 8], 16 tokens -> [[0, 2], [3], [1]] by length; with 20 tokens -> [[0, 2], [3, 1]].

    Args:
        lengths: Tokens of the longest row of each.
        max_tokens: Of one batch.
        counts: Rows of each; None: one.
    """
    batches: list[list[int]] = []
    num_rows = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        count = 1 if counts is None else counts[index]
        if not batches or lengths[index] * (num_rows + count) > max_tokens:
            batches.append([])
            num_rows = 0
        batches[-1].append(index)
        num_rows += count
    return batches


def plain_sample(token_ids: Sequence[int]) -> TrainingSample:
    """Returns tokens as a sample that looks at every token but the first, at temperature 1."""
    n = len(token_ids)
    return TrainingSample(
        token_ids=np.asarray(token_ids, np.int64),
        loss_mask=np.arange(n) > 0,
        sampling_logprobs=np.zeros(n, np.float32),
        temperatures=np.ones(n, np.float32),
        policy_versions=np.full(n, -1, np.int64),
        turn_ids=np.full(n, -1, np.int64),
    )
