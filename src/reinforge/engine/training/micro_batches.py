"""Splits samples into micro-batches so that shared prefixes are computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from reinforge.config.policy import MICRO_BATCH_TOKENS, BatchConfig
from reinforge.engine.machine import measure_machine
from reinforge.engine.training.collate import MAX_SHARED_FRACTION, PASS_OVERHEAD_TOKENS, get_prefix, group_pairs
from reinforge.types.sample import TrainingSample
from reinforge.types.seeding import stable_random

if TYPE_CHECKING:
    from reinforge.engine.model.causal_model import CausalModel

MAX_TOKENS_CPU, MIN_TOKENS = 4096, 256
KEYS_OF_STEM = 5  # tokens of a stem whose keys and values in a row need the memory of a computed token
KEPT_PER_LAYER = 16
"""Vectors of the hidden size that a layer keeps of a token for the backward pass: the inputs of its products."""


def plan_steps(samples: Sequence[TrainingSample], settings: BatchConfig, seed: int, epoch: int) -> list[list[int]]:
    """Returns the samples' indices for each optimizer step, reshuffled in each iteration; pairs are never split.

    Example: 5 samples, batch_size 2 -> 3 steps of 2, 2 and 1 samples.

    Args:
        samples: The job's samples; those without trained tokens or weight are left out.
        settings: How many steps, and how often.
        seed: Of the order.
    """
    usable = [i for i, sample in enumerate(samples) if sample.num_trained and sample.weight > 0]
    units = [[usable[i] for i in unit] for unit in group_pairs([samples[i] for i in usable])]
    num_steps = settings.steps_per_job or math.ceil(len(usable) / settings.batch_size)
    num_steps = min(num_steps, len(units))
    steps = []
    for number in range(settings.num_iterations):
        order = units.copy()
        stable_random(seed, "shuffle", epoch, number).shuffle(order)
        bounds = [round(step * len(order) / num_steps) for step in range(num_steps + 1)] if num_steps else []
        steps += [sorted(chain(*order[a:b])) for a, b in pairwise(bounds)]
    return steps


def choose_micro_batch_tokens(given: int | None, model: CausalModel) -> int:
    """Returns the maximum tokens of a forward pass, as given or chosen for a model and the machine's memory.

    Smaller passes are faster on a CPU, whose caches then hold what an operation needs. Free memory does not count: the
    passes of a run that is resumed are the same.

    Example: SmolLM2-135M keeps 1.1 MB of a token in float32 -> 4,096 with 24 GB, 1,024 with 8 GB.
    """
    if given is not None:
        return given
    if model.device.type != "cpu":
        return MICRO_BATCH_TOKENS
    memory, tokens = measure_machine(), MAX_TOKENS_CPU
    while memory is not None and tokens > MIN_TOKENS and tokens * estimate_token(model) > memory // 4:
        tokens //= 2
    return tokens


def estimate_token(model: CausalModel) -> int:
    """Returns the bytes that the layers keep of a token for the backward pass."""
    size: int = getattr(model.config, "hidden_size", 0) * model.dtype.itemsize
    return model.num_layers * KEPT_PER_LAYER * size


@dataclass(frozen=True, slots=True)
class _Unit:
    """Siblings that go through one forward pass: `prefix` tokens once, at most `suffix` tokens for each member."""

    prefix: int
    suffix: int
    members: list[int]


def make_micro_batches(
    samples: Sequence[TrainingSample], max_tokens: int, *, share: bool = True, share_stems: bool = False
) -> list[list[int]]:
    """Returns the samples' indices in micro-batches of at most `max_tokens` tokens, padding included.

    Siblings of a prompt longer than half of that share it nevertheless, in batches of up to half as many tokens more.
    With `share_stems` a beginning that all prompts have, such as a long system prompt, counts once in a batch; of each
    row only its keys and values count, as a fifth. Siblings stay together where sharing their prefix saves enough, and
    are split only if they do not fit one batch. The other samples join them where that computes fewer tokens; else they
    are batched with samples of similar length. A sample longer than `max_tokens` is a batch of its own. The two samples
    of a preference pair are never split, even where they exceed the limit together.

    Example: three samples that share a prefix of 6 tokens, each with 2 more, and one of 9 tokens. Sharing computes 12
        tokens, plain rows 24 => [[3], [0, 1, 2]] with max_tokens 12
    """
    stem = _count_stem(samples, max_tokens) if share_stems else 0
    saved = stem - stem // KEYS_OF_STEM  # of each row or prefix
    max_tokens -= stem
    families: dict[tuple[int, ...], list[list[int]]] = {}
    alone: list[list[int]] = []
    for pair in group_pairs(samples):
        prefixes = {get_prefix(samples[i]) for i in pair}
        (families.setdefault(prefixes.pop(), []) if len(prefixes) == 1 else alone).append(pair)
    shared: list[_Unit] = []
    unshared: list[_Unit] = []
    plain: list[list[int]] = []
    for prefix, members in families.items():
        suffixes = [len(samples[i]) - len(prefix) for i in chain(*members)]
        length = len(prefix) - saved
        total, size = sum(suffixes), max(1, max(max_tokens - length, max_tokens // 2) // max(suffixes))
        units = [_Unit(length, max(suffixes), part) for part in _split_members(members, size)]
        if share and length + total <= MAX_SHARED_FRACTION * (length * len(suffixes) + total):
            shared += units
        else:
            unshared += units
            plain += members
    lengths = [len(sample) - saved for sample in samples]
    rows, batches = _pack_plain(lengths, alone + plain, max_tokens), _pack_units(shared, max_tokens)
    if shared and unshared:
        fewer_rows, joint = _pack_plain(lengths, alone, max_tokens), _pack_units(shared + unshared, max_tokens)
        if _count_cost(lengths, fewer_rows, joint) <= _count_cost(lengths, rows, batches):
            rows, batches = fewer_rows, joint
    return rows + [[i for unit in batch for i in unit.members] for batch in batches]


def _count_stem(samples: Sequence[TrainingSample], max_tokens: int) -> int:
    """Returns the tokens that begin every prompt, without the last one of any; 0 if sharing them saves too little."""
    prompts = [get_prefix(sample) for sample in samples]
    longest = min(map(len, prompts), default=0) - 1
    if longest < PASS_OVERHEAD_TOKENS or len(prompts) < 2:
        return 0
    token_ids = np.array([prompt[:longest] for prompt in prompts])
    differ = (token_ids != token_ids[0]).any(axis=0)
    length = int(differ.argmax()) if differ.any() else longest
    return length if PASS_OVERHEAD_TOKENS <= length <= max_tokens // 2 else 0


def _pack_units(units: Sequence[_Unit], max_tokens: int) -> list[list[_Unit]]:
    batches: list[list[_Unit]] = []
    suffix = num_rows = 0
    for unit in sorted(units, key=lambda unit: (unit.prefix, unit.suffix, unit.members)):
        suffix, num_rows = max(suffix, unit.suffix), num_rows + len(unit.members)
        if not batches or (len(batches[-1]) + 1) * unit.prefix + num_rows * suffix > max_tokens:
            batches.append([])
            suffix, num_rows = unit.suffix, len(unit.members)
        batches[-1].append(unit)
    return batches


def _pack_plain(lengths: Sequence[int], pairs: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    batches = pack_rows([max(lengths[i] for i in pair) for pair in pairs], max_tokens, list(map(len, pairs)))
    return [[i for number in batch for i in pairs[number]] for batch in batches]


def _count_cost(lengths: Sequence[int], rows: Sequence[list[int]], batches: Sequence[list[_Unit]]) -> int:
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in rows)
    return padded + sum(map(_count_tokens, batches)) + PASS_OVERHEAD_TOKENS * (len(rows) + 2 * len(batches))


def _split_members(members: Sequence[list[int]], size: int) -> list[list[int]]:
    """Returns members in parts of at most `size`, never splitting a pair.

    Example: [[0, 3], [1], [2, 4]] in parts of 3 -> [[0, 3, 1], [2, 4]]; in parts of 1 -> [[0, 3], [1], [2, 4]].
    """
    parts: list[list[int]] = []
    for pair in members:
        if not parts or len(parts[-1]) + len(pair) > size:
            parts.append([])
        parts[-1] += pair
    return parts


def _count_tokens(units: Sequence[_Unit]) -> int:
    num_rows = sum(len(unit.members) for unit in units)
    return len(units) * max(unit.prefix for unit in units) + num_rows * max(unit.suffix for unit in units)


def pack_rows(lengths: Sequence[int], max_tokens: int, counts: Sequence[int] | None = None) -> list[list[int]]:
    """Returns indices, by length, in batches of at most `max_tokens` tokens, padding included.

    An item longer than `max_tokens` is a batch of its own.

    Example: lengths [3, 9, 4, 8], 16 tokens -> [[0, 2], [3], [1]]; with 20 tokens -> [[0, 2], [3, 1]].

    Args:
        counts: Rows of each item; None: one each.
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
