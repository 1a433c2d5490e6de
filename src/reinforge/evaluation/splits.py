"""Divides examples into `train`, `select` and `confirm`, so that no verdict rests on what was trained on.

    10 examples, shares 0.6 / 0.15 / 0.25  =>  6, 2, 2 (largest remainder; every split gets at least one)
    10 examples, confirm: 4 (a count), train: 0.5, select: 0.5  =>  3, 3, 4 (shares are of the 6 that are left)

Examples that are equal apart from their id (same input, same expected output, same other columns: a world's seed
counts as content) are one unit that is never torn apart, or training would see what `confirm` asks. Where a column
names the split (`key`), equal rows in two splits are an error, since it is the user's choice that would be undone.
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
    """Returns the examples of each split, in the dataset's order; the same for any order of the dataset's rows.

    Args:
        items: The examples; each id once.
        config: Shares (up to 1), counts (above 1), or the column that names the split.
        seed: The run's seed.
        id_key: The column of the rows that holds the id, which is no content.

    Raises:
        ConfigError: A split would be empty, the counts do not fit, ids repeat, or equal rows stand in two splits.
    """
    _refuse_repeated_ids(items)
    units = _units(items, id_key, config.key)
    chosen = _by_column(items, units, config.key) if config.key else _by_size(units, config, seed)
    splits = {name: [item for item in items if chosen[str(item.id)] == name] for name in SPLITS}
    empty = [name for name in SPLITS if not splits[name]]
    if empty:
        raise ConfigError(
            Problem(
                PATH,
                f"no examples are left for {' and '.join(empty)} of {len(items)}, {len(units)} of them different",
                "add examples (three different ones at the least) or give the other splits less",
            )
        )
    return splits


def _refuse_repeated_ids(items: Sequence[EvalInputItem]) -> None:
    seen: set[str] = set()
    repeated = {str(item.id) for item in items if str(item.id) in seen or seen.add(str(item.id))}  # type: ignore[func-returns-value]
    if repeated:
        raise ConfigError(f"the dataset has these ids more than once: {', '.join(sorted(repeated)[:10])}")


def _units(items: Sequence[EvalInputItem], id_key: str, split_key: str | None) -> list[list[str]]:
    """Returns the ids of examples with equal content together, units and ids in the order of the ids."""
    units: dict[str, list[str]] = defaultdict(list)
    for item in sorted(items, key=lambda item: str(item.id)):
        row = item.full_dataset_entry
        columns = {k: v for k, v in row.items() if k not in (id_key, split_key)} if isinstance(row, Mapping) else {}
        units[_digest([item.input_obj, item.expected_output_obj, columns])].append(str(item.id))
    return list(units.values())


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _by_size(units: list[list[str]], config: SplitsConfig, seed: int) -> dict[str, str]:
    """Returns the split of each id: big units first, each to the split that lacks most."""
    lacking = _sizes(sum(map(len, units)), config)
    stable_random(seed, "splits").shuffle(units)
    chosen: dict[str, str] = {}
    for unit in sorted(units, key=len, reverse=True):
        name = max(SPLITS, key=lambda name: lacking[name])
        if lacking[name] <= 0:
            break  # shares below 1 in all: the rest is not used
        lacking[name] -= len(unit)
        chosen.update(dict.fromkeys(unit, name))
    return defaultdict(str, chosen)


def _sizes(total: int, config: SplitsConfig) -> dict[str, int]:
    """Returns how many examples each split is to have."""
    given = {name: float(getattr(config, name)) for name in SPLITS}
    for name, value in given.items():
        if value > 1 and value != int(value):
            raise ConfigError(Problem(f"{PATH}.{name}", f"{value:g} is neither a share (up to 1) nor a whole number"))
    counts = {name: int(value) for name, value in given.items() if value > 1}
    left = total - sum(counts.values())
    if left < 0:
        asked = " + ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(Problem(PATH, f"{asked} is more than the {total} examples there are", "ask for fewer"))
    shares = {name: value for name, value in given.items() if name not in counts}
    if sum(shares.values()) > 1 + 1e-9:
        asked = " + ".join(f"{name} {share:g}" for name, share in shares.items())
        raise ConfigError(Problem(PATH, f"the shares {asked} add up to more than 1", "make them add up to 1"))
    return counts | _rounded(shares, left)


def _rounded(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Returns whole sizes for shares of `total`: largest remainder, then one from the largest to each empty one."""
    sizes = {name: math.floor(share * total + 1e-9) for name, share in shares.items()}
    spare = round(sum(shares.values()) * total) - sum(sizes.values())
    for name in sorted(shares, key=lambda name: sizes[name] - shares[name] * total)[:spare]:
        sizes[name] += 1
    for name in sizes:
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[name] == 0 and sizes[largest] > 1:
            sizes[name], sizes[largest] = 1, sizes[largest] - 1
    return sizes


def _by_column(items: Sequence[EvalInputItem], units: list[list[str]], key: str) -> dict[str, str]:
    """Returns the split that each row names."""
    problems: list[Problem] = []
    chosen: dict[str, str] = {}
    for item in items:
        row = item.full_dataset_entry if isinstance(item.full_dataset_entry, Mapping) else {}
        name = row.get(key)
        if key not in row:
            hint = did_you_mean(key, row)
            problems.append(Problem(f"{PATH}.key", f'example "{item.id}" has no field "{key}"{hint}'))
        elif name not in SPLITS:
            hint = did_you_mean(str(name), SPLITS)
            message = f'example "{item.id}" says {key}: {name!r}{hint or ";"} allowed: {", ".join(SPLITS)}'
            problems.append(Problem(f"{PATH}.key", message))
        else:
            chosen[str(item.id)] = str(name)
    for unit in units:
        names = dict.fromkeys(chosen[id_] for id_ in unit if id_ in chosen)
        if len(names) > 1:
            told = ", ".join(f"{id_} ({chosen[id_]})" for id_ in unit if id_ in chosen)
            message = f"these examples are equal apart from their id and stand in different splits: {told}"
            problems.append(Problem(f"{PATH}.key", message, "put them into one split, or keep one of them"))
    if problems:
        more = [Problem("", f"and {len(problems) - 20} more problems like these")] if len(problems) > 20 else []
        raise ConfigError(problems[:20] + more)
    return chosen
