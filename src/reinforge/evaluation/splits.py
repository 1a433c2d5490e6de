"""Splits examples into `train`, `select` and `confirm`, so that the verdict uses only examples held out from training.

    10 examples, shares 0.6 / 0.15 / 0.25  =>  6, 2, 2 (largest remainder; every split gets at least one)
    10 examples, confirm: 4 (a count), train: 0.5, select: 0.5  =>  3, 3, 4 (shares of the remaining 6)

Examples that differ only in their id (same input, expected output and other columns; an environment seed counts as
content) form a group that always goes into one split, or else training would see examples of `confirm`. Rows with
replies to train on form a group if their prompts are equal, whatever their replies and rewards are. If a column
names the split (`key`), equal rows in different splits are an error, since grouping them would override that column.

Rows of one conversation (equal values in the column `group_key`) form a group too: later ones repeat earlier ones.
Questions that nearly repeat each other form a group only with `near_duplicates: group`; see `contamination.py`.

A game has the same row for each of its episodes. Where the id alone makes them different examples, since it seeds the
environment, `key` names the column with the id.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import not_
from typing import Any

from reinforge.bounded import encode_any
from reinforge.config.schema import SplitsConfig
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.evaluation.contamination import find_equal_questions, find_id_key, group_near_duplicates
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random

SPLITS = ("train", "select", "confirm")
FIXED = "reinforge.trainer.setup.fixed_splits:split_fixed"  # in place of `split_examples` for a dataset that grows
PATH = "finetuning.splits"
REPLY_COLUMNS = ("completion", "chosen", "preferred_output")


def split_examples(
    items: Sequence[EvalInputItem], config: SplitsConfig, seed: int, *, id_key: str = "id"
) -> dict[str, list[EvalInputItem]]:
    """Returns the examples of each split, in the dataset's order.

    The order of the dataset's rows does not change which example goes into which split. The column `id_key` does not
    count as content.
    """
    _check_unique_ids(items)
    check_group_key(items, config.group_key)
    column = config.key if config.key != id_key else None
    groups = group_equal_examples(items, id_key, column, by_prompt=column is None)
    if config.key == id_key:
        groups = [[str(item.id)] for item in sorted(items, key=lambda item: str(item.id))]
    elif config.near_duplicates == "group":
        groups = merge_groups(groups, group_near_duplicates(items, config.near_duplicate_similarity))
    num_distinct = len(groups)
    if column is None and config.key != id_key:
        groups = merge_groups(groups, list(group_by_column(items, config.group_key).values()))
    assigned = (
        _assign_by_column(items, groups, column, config.group_key) if column else _assign_by_size(groups, config, seed)
    )
    splits = {name: [item for item in items if assigned[str(item.id)] == name] for name in SPLITS}
    empty = [name for name in SPLITS if not splits[name]]
    if empty:
        message = f"no examples are left for {' and '.join(empty)}: the dataset has {len(items)}"
        message += f", {num_distinct} of them distinct (replies to the same prompt count as one)"
        fix = "add examples (at least three distinct ones) or make the other splits smaller"
        if len(groups) < num_distinct:
            message += f", in {len(groups)} groups with equal {config.group_key}"
            fix += f"; or, if rows with equal {config.group_key} have nothing in common, set {PATH}.group_key: null"
        raise ConfigError(Problem(PATH, message, fix + suggest_id(groups, id_key)))
    return splits


def take_transfer(items: Sequence[EvalInputItem]) -> tuple[list[EvalInputItem], list[EvalInputItem]]:
    """Returns the examples that are split, and those with `transfer: true`, which no job trains on: another task's."""
    found = [isinstance(row := item.full_dataset_entry, Mapping) and row.get("transfer") is True for item in items]
    return list(compress(items, map(not_, found))), list(compress(items, found))


def merge_groups(groups: list[list[str]], similar: list[list[str]]) -> list[list[str]]:
    """Returns the groups, those that share examples of one similar set as one: [a b] [c] [d], [b c] -> [a b c] [d]."""
    place = {id_: number for number, group in enumerate(groups) for id_ in group}
    merged = {number: list(group) for number, group in enumerate(groups)}
    for ids in similar:
        numbers = sorted({place[id_] for id_ in ids})
        for number in numbers[1:]:
            for id_ in merged[number]:
                place[id_] = numbers[0]
            merged[numbers[0]] += merged.pop(number)
    return list(merged.values())


def group_by_column(items: Sequence[EvalInputItem], key: str | None) -> dict[str, list[str]]:
    """Returns the ids of the examples with each value of a column; only text and whole numbers are values."""
    groups: dict[str, list[str]] = defaultdict(list)
    for item in items:
        row = item.full_dataset_entry
        value = row.get(key) if isinstance(row, Mapping) and key is not None else None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # columns of whole numbers with gaps are read as decimal numbers
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            groups[str(value)].append(str(item.id))
    return groups


def find_clusters(items: Sequence[EvalInputItem], config: SplitsConfig) -> dict[str, str]:
    """Returns id -> its cluster, the first id, of examples that depend on each other: intervals count clusters.

    Examples of one conversation (`group_key`) do, and those with the same question (`find_equal_questions`), unless the
    id makes the example (`key` names the column with the id).
    """
    id_makes_example = config.key is not None and config.key == find_id_key(items)
    related = [] if id_makes_example else find_equal_questions(items)
    related += group_by_column(items, config.group_key).values()
    groups = merge_groups([[str(item.id)] for item in items], related)
    return {id_: group[0] for group in groups if len(group) > 1 for id_ in group}


def check_group_key(items: Sequence[EvalInputItem], key: str | None) -> None:
    """Raises a `ConfigError` if a configured column keeps no rows together, since none has it."""
    if key in (None, SplitsConfig().group_key) or group_by_column(items, key):
        return
    rows = [item.full_dataset_entry for item in items if isinstance(item.full_dataset_entry, Mapping)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    message = f'no row has text or a whole number in the column "{key}"{did_you_mean(str(key), columns)}'
    raise ConfigError(Problem(f"{PATH}.group_key", message, "name a column of the rows, or set it to null"))


def suggest_id(groups: list[list[str]], id_key: str) -> str:
    """Returns how to say that rows which differ only in their id are examples of their own, if there are such rows."""
    if all(len(group) == 1 for group in groups):
        return ""
    return f"; or, if the id alone defines an example (it seeds the environment), set {PATH}.key: {id_key}"


def _check_unique_ids(items: Sequence[EvalInputItem]) -> None:
    seen: set[str] = set()
    repeated = {str(item.id) for item in items if str(item.id) in seen or seen.add(str(item.id))}  # type: ignore[func-returns-value]
    if repeated:
        raise ConfigError(f"the dataset has these ids more than once: {', '.join(sorted(repeated)[:10])}")


def group_equal_examples(
    items: Sequence[EvalInputItem], id_key: str, split_key: str | None, *, by_prompt: bool = False
) -> list[list[str]]:
    """Returns groups of ids whose examples have equal content; groups and ids are in the order of the ids.

    Args:
        id_key: The column with the id, which does not count as content.
        split_key: The column with the split, which does not count either.
        by_prompt: Only the prompt counts in rows with replies to train on.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for item in sorted(items, key=lambda item: str(item.id)):
        row = item.full_dataset_entry
        if by_prompt and isinstance(row, Mapping) and _has_reply(row):
            groups[_hash_content([item.input_obj])].append(str(item.id))
            continue
        columns = {k: v for k, v in row.items() if k not in (id_key, split_key)} if isinstance(row, Mapping) else {}
        groups[_hash_content([item.input_obj, item.expected_output_obj, columns])].append(str(item.id))
    return list(groups.values())


def _has_reply(row: Mapping[str, Any]) -> bool:
    """Returns True if a row brings a reply to train on, which is not what the agent is given."""
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    ends_with_reply = isinstance(last, Mapping) and last.get("role") == "assistant"
    return ends_with_reply or any(row.get(key) is not None for key in REPLY_COLUMNS)


def _hash_content(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=repr)
    return hashlib.sha256(encode_any(text)).hexdigest()


def _assign_by_size(groups: list[list[str]], config: SplitsConfig, seed: int) -> dict[str, str]:
    """Returns the split of each id: large groups first, each to the split with the most free places."""
    free = _compute_sizes(sum(map(len, groups)), config)
    stable_random(seed if config.seed is None else config.seed, "splits").shuffle(groups)
    assigned: dict[str, str] = {}
    for group in sorted(groups, key=len, reverse=True):
        name = max(SPLITS, key=lambda name: free[name])
        if free[name] <= 0:
            break  # the shares add up to less than 1: the rest is not used
        free[name] -= len(group)
        assigned.update(dict.fromkeys(group, name))
    return defaultdict(str, assigned)


def _compute_sizes(total: int, config: SplitsConfig) -> dict[str, int]:
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


def _assign_by_column(
    items: Sequence[EvalInputItem], groups: list[list[str]], key: str, group_key: str | None
) -> dict[str, str]:
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
    for value, ids in group_by_column(items, group_key).items():
        names = dict.fromkeys(assigned[id_] for id_ in ids if id_ in assigned)
        if len(names) > 1:
            message = f"rows with {group_key} {value!r} are in different splits: {', '.join(names)}"
            fix = f"put them into one split, or set {PATH}.group_key: null if they have nothing in common"
            problems.append(Problem(f"{PATH}.group_key", message, fix))
    if problems:
        more = [Problem("", f"and {len(problems) - 20} more problems like these")] if len(problems) > 20 else []
        raise ConfigError(problems[:20] + more)
    return assigned


VALIDATION_DATASET = "finetuning.run_configuration.validation_dataset"
PREFIX = "validation:"


def split_with_validation(
    train: Sequence[EvalInputItem], validation: Sequence[EvalInputItem], config: SplitsConfig, seed: int, *, id_key: str
) -> dict[str, list[EvalInputItem]]:
    """Returns the splits; if the two datasets share ids, those of the validation dataset get a prefix.

    `config` sets the ratio of `select` to `confirm`; the column `id_key` does not count as content.

    Raises:
        ConfigError: A row is in both datasets, a split would be empty, or a column already names the splits.
    """
    by_id = config.key == id_key
    if config.key is not None and not by_id:
        message = "set together with a validation dataset, but both define which examples are held out"
        raise ConfigError(Problem(f"{PATH}.key", message, "remove one of the two"))
    if {str(item.id) for item in train} & {str(item.id) for item in validation}:
        validation = [item.copy_with_updates(id=f"{PREFIX}{item.id}") for item in validation]
    held_out = {str(item.id) for item in validation}
    check_group_key([*train, *validation], config.group_key)
    groups = group_equal_examples([*train, *validation], id_key, None)
    if by_id:
        groups = [[str(item.id)] for item in sorted([*train, *validation], key=lambda item: str(item.id))]
    shared = [group for group in groups if held_out & set(group) and set(group) - held_out]
    if shared:
        members = "; ".join(" and ".join(group[:10]) for group in shared[:10])
        message = f"{len(shared)} rows are also in the training dataset under another id: {members}"
        fix = f"remove them from one of the two datasets{suggest_id(groups, id_key)}"
        raise ConfigError(Problem(VALIDATION_DATASET, message, fix))
    if not by_id:
        related = group_by_column([*train, *validation], config.group_key)
        _refuse_shared_values(related, held_out, config.group_key)
        same_prompt = group_equal_examples(validation, id_key, None, by_prompt=True)
        groups = merge_groups(groups, [*related.values(), *same_prompt])
    chosen = _choose_select_ids([group for group in groups if held_out & set(group)], config, seed)
    splits = {
        "train": list(train),
        "select": [item for item in validation if str(item.id) in chosen],
        "confirm": [item for item in validation if str(item.id) not in chosen],
    }
    empty = [name for name, items in splits.items() if not items]
    if empty:
        message = f"no examples are left for {' and '.join(empty)}: the validation dataset has {len(validation)}"
        fix = f"add examples (at least two distinct ones){suggest_id(groups, id_key)}"
        raise ConfigError(Problem(VALIDATION_DATASET, message, fix))
    return splits


def _refuse_shared_values(groups: Mapping[str, list[str]], held_out: set[str], key: str | None) -> None:
    shared = [value for value, ids in groups.items() if held_out & set(ids) and set(ids) - held_out]
    if shared:
        message = f"{len(shared)} values of {key} are also in the training dataset: {', '.join(shared[:10])}"
        fix = f"move their rows into one of the two, or set {PATH}.group_key: null if they have nothing in common"
        raise ConfigError(Problem(VALIDATION_DATASET, message, fix))


def _choose_select_ids(groups: list[list[str]], config: SplitsConfig, seed: int) -> set[str]:
    """Returns the ids for `select`: whole groups in a seeded order, until the share is reached."""
    total = sum(map(len, groups))
    wanted = max(1, round(total * config.select / (config.select + config.confirm)))
    stable_random(seed if config.seed is None else config.seed, "validation").shuffle(groups)
    chosen: set[str] = set()
    for group in groups:
        if chosen and len(chosen) + len(group) > wanted:
            continue
        chosen.update(group)
    return chosen
