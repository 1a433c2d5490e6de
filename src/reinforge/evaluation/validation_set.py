"""Splits for a run with a separate validation dataset.

The validation dataset becomes `select` and `confirm`; the other dataset is all `train`.

    train.jsonl: a b c d     validation.jsonl: x y z w u     shares select 0.15, confirm 0.25
    =>  train a b c d; select x y; confirm z w u          (0.15 : 0.25 of the five, in a seeded order)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reinforge.config.schema import SplitsConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.splits import (
    PATH,
    check_group_key,
    group_by_column,
    group_equal_examples,
    merge_groups,
    suggest_id,
)
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random

VALIDATION_DATASET = "finetuning.run_configuration.validation_dataset"
PREFIX = "validation:"


def split_with_validation(
    train: Sequence[EvalInputItem], validation: Sequence[EvalInputItem], config: SplitsConfig, seed: int, *, id_key: str
) -> dict[str, list[EvalInputItem]]:
    """Returns the splits; if the two datasets share ids, those of the validation dataset get a prefix.

    Args:
        validation: Examples to divide into `select` and `confirm`.
        config: Sets the ratio of `select` to `confirm` by their shares (or counts).
        id_key: The column with the id, which does not count as content.

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
    """Raises a `ConfigError` if rows of both datasets have the same value in the column `group_key`."""
    shared = [value for value, ids in groups.items() if held_out & set(ids) and set(ids) - held_out]
    if shared:
        message = f"{len(shared)} values of {key} are also in the training dataset: {', '.join(shared[:10])}"
        fix = f"move their rows into one of the two, or set {PATH}.group_key: null if they have nothing in common"
        raise ConfigError(Problem(VALIDATION_DATASET, message, fix))


def _choose_select_ids(groups: list[list[str]], config: SplitsConfig, seed: int) -> set[str]:
    """Returns the ids for `select`: whole groups in a seeded order, until the share is reached."""
    total = sum(map(len, groups))
    wanted = max(1, round(total * config.select / (config.select + config.confirm)))
    stable_random(seed, "validation").shuffle(groups)
    chosen: set[str] = set()
    for group in groups:
        if chosen and len(chosen) + len(group) > wanted:
            continue
        chosen.update(group)
    return chosen
