"""Cuts samples into micro-batches, so that shared prefixes are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from reinforge.engine.training.collate import WORTH, WORTH_TOKENS, prefix_of, units_of
from reinforge.types.sample import TrainingSample


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
