"""Splits examples into `train`, `select` and `confirm`, so that the verdict uses only examples held out from training.

    10 examples, shares 0.6 / 0.15 / 0.25  =>  6, 2, 2 (largest remainder; every split gets at least one)
    10 examples, confirm: 4 (a count), train: 0.5, select: 0.5  =>  3, 3, 4 (shares of the remaining 6)

Examples that differ only in their id (same input, expected output and other columns; an environment seed counts as
content) form a group that always goes into one split, or else training would see examples of `confirm`. If a column
names the split (`key`), equal rows in different splits are an error, since grouping them would override that column.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.config.schema import SplitsConfig
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random

SPLITS = ("train", "select", "confirm")
PATH = "finetuning.splits"


def split_examples(
    items: Sequence[EvalInputItem], config: SplitsConfig, seed: int, *, id_key: str = "id"
) -> dict[str, list[EvalInputItem]]:
    """Returns the examples of each split, in the dataset's order.

    The order of the dataset's rows does not change which example goes into which split.

    Args:
        items: The examples, with unique ids.
        config: Shares (up to 1), counts (above 1), or the column that names the split.
        seed: The run's seed.
        id_key: The column with the id, which does not count as content.

    Raises:
        ConfigError: A split would be empty, the counts exceed the number of examples, ids repeat, or equal rows are in
            different splits.
    """
    _check_unique_ids(items)
    groups = group_equal_examples(items, id_key, config.key)
    assigned = _assign_by_column(items, groups, config.key) if config.key else _assign_by_size(groups, config, seed)
    splits = {name: [item for item in items if assigned[str(item.id)] == name] for name in SPLITS}
    empty = [name for name in SPLITS if not splits[name]]
    if empty:
        raise ConfigError(
            Problem(
                PATH,
                f"no examples are left for {' and '.join(empty)}: the dataset has {len(items)}, "
                f"{len(groups)} of them distinct",
                "add examples (at least three distinct ones) or make the other splits smaller",
            )
        )
    return splits


def _check_unique_ids(items: Sequence[EvalInputItem]) -> None:
    seen: set[str] = set()
    repeated = {str(item.id) for item in items if str(item.id) in seen or seen.add(str(item.id))}  # type: ignore[func-returns-value]
    if repeated:
        raise ConfigError(f"the dataset has these ids more than once: {', '.join(sorted(repeated)[:10])}")


def group_equal_examples(items: Sequence[EvalInputItem], id_key: str, split_key: str | None) -> list[list[str]]:
    """Returns groups of ids whose examples have equal content; groups and ids are in the order of the ids."""
    groups: dict[str, list[str]] = defaultdict(list)
    for item in sorted(items, key=lambda item: str(item.id)):
        row = item.full_dataset_entry
        columns = {k: v for k, v in row.items() if k not in (id_key, split_key)} if isinstance(row, Mapping) else {}
        groups[_hash_content([item.input_obj, item.expected_output_obj, columns])].append(str(item.id))
    return list(groups.values())


def _hash_content(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _assign_by_size(groups: list[list[str]], config: SplitsConfig, seed: int) -> dict[str, str]:
    """Returns the split of each id: large groups first, each to the split with the most free places."""
    free = _compute_sizes(sum(map(len, groups)), config)
    stable_random(seed, "splits").shuffle(groups)
    assigned: dict[str, str] = {}
    for group in sorted(groups, key=len, reverse=True):
        name = max(SPLITS, key=lambda name: free[name])
        if free[name] <= 0:
            break  # the shares add up to less than 1: the rest is not used
        free[name] -= len(group)
        assigned.update(dict.fromkeys(group, name))
    return defaultdict(str, assigned)


def _compute_sizes(total: int, config: SplitsConfig) -> dict[str, int]:
    """Returns the number of examples for each split."""
    given = {name: float(getattr(config, name)) for name in SPLITS}
    for name, value in given.items():
        if value > 1 and value != int(value):
            message = f"{value:g} is neither a share (0 to 1) nor a whole number of examples"
            raise ConfigError(Problem(f"{PATH}.{name}", message))
    counts = {name: int(value) for name, value in given.items() if value > 1}
    left = total - sum(counts.values())
    if left < 0:
        wanted = " + ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(Problem(PATH, f"{wanted} is more than the dataset's {total} examples", "lower the counts"))
    shares = {name: value for name, value in given.items() if name not in counts}
    if sum(shares.values()) > 1 + 1e-9:
        wanted = " + ".join(f"{name} {share:g}" for name, share in shares.items())
        raise ConfigError(Problem(PATH, f"the shares {wanted} add up to more than 1", "lower them to a sum of 1"))
    return counts | _round_shares(shares, left)


def _round_shares(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Returns integer sizes: by largest remainder, then one example from the largest split to each empty one."""
    sizes = {name: math.floor(share * total + 1e-9) for name, share in shares.items()}
    spare = round(sum(shares.values()) * total) - sum(sizes.values())
    for name in sorted(shares, key=lambda name: sizes[name] - shares[name] * total)[:spare]:
        sizes[name] += 1
    for name in sizes:
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[name] == 0 and sizes[largest] > 1:
            sizes[name], sizes[largest] = 1, sizes[largest] - 1
    return sizes


def _assign_by_column(items: Sequence[EvalInputItem], groups: list[list[str]], key: str) -> dict[str, str]:
    """Returns the split of each id, read from the column `key`."""
    problems: list[Problem] = []
    assigned: dict[str, str] = {}
    for item in items:
        row = item.full_dataset_entry if isinstance(item.full_dataset_entry, Mapping) else {}
        name = row.get(key)
        if key not in row:
            hint = did_you_mean(key, row)
            problems.append(Problem(f"{PATH}.key", f'example "{item.id}" has no field "{key}"{hint}'))
        elif name not in SPLITS:
            hint = did_you_mean(str(name), SPLITS)
            message = f'example "{item.id}" has {key}: {name!r}{hint or ";"} allowed: {", ".join(SPLITS)}'
            problems.append(Problem(f"{PATH}.key", message))
        else:
            assigned[str(item.id)] = str(name)
    for group in groups:
        names = dict.fromkeys(assigned[id_] for id_ in group if id_ in assigned)
        if len(names) > 1:
            members = ", ".join(f"{id_} ({assigned[id_]})" for id_ in group if id_ in assigned)
            message = f"examples that differ only in their id are in different splits: {members}"
            problems.append(Problem(f"{PATH}.key", message, "put them into one split, or keep only one of them"))
    if problems:
        more = [Problem("", f"and {len(problems) - 20} more problems like these")] if len(problems) > 20 else []
        raise ConfigError(problems[:20] + more)
    return assigned
