"""A dataset of its own to select and confirm on: all of the other one is trained on, and nothing stands in both.

train.jsonl: a b c d     validation.jsonl: x y z w u     shares select 0.15, confirm 0.25
    =>  train a b c d; select x y; confirm z w u          (0.15 : 0.25 of the five, by a seeded order)
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.config.schema import SplitsConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.splits import PATH, _units
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random

VALIDATION_DATASET = "finetuning.run_configuration.validation_dataset"
PREFIX = "validation:"


def split_with_validation(
    train: Sequence[EvalInputItem], validation: Sequence[EvalInputItem], config: SplitsConfig, seed: int, *, id_key: str
) -> dict[str, list[EvalInputItem]]:
    """Returns the splits; ids of the validation dataset get a prefix where both datasets use the same ones.

    Args:
        train: Every example to train on.
        validation: Examples to divide into `select` and `confirm`.
        config: The shares (or counts) of `select` and `confirm` say how to divide.
        seed: The run's seed.
        id_key: The column of the rows that holds the id, which is no content.

    Raises:
        ConfigError: Rows are equal in both, a split would be empty, or a column names the splits already.
    """
    if config.key is not None:
        message = (
            "a column of the dataset names the splits, and a validation dataset is given; both say what to hold out"
        )
        raise ConfigError(Problem(f"{PATH}.key", message, "remove one of the two"))
    if {str(item.id) for item in train} & {str(item.id) for item in validation}:
        validation = [item.copy_with_updates(id=f"{PREFIX}{item.id}") for item in validation]
    held_out = {str(item.id) for item in validation}
    units = _units([*train, *validation], id_key, None)
    torn = [unit for unit in units if held_out & set(unit) and set(unit) - held_out]
    if torn:
        told = "; ".join(" and ".join(unit) for unit in torn[:10])
        message = f"{len(torn)} rows are equal, apart from their id, to rows that are trained on: {told}"
        raise ConfigError(Problem(VALIDATION_DATASET, message, "remove them from one of the two datasets"))
    chosen = _select([unit for unit in units if held_out & set(unit)], config, seed)
    splits = {
        "train": list(train),
        "select": [item for item in validation if str(item.id) in chosen],
        "confirm": [item for item in validation if str(item.id) not in chosen],
    }
    empty = [name for name, items in splits.items() if not items]
    if empty:
        message = f"no examples are left for {' and '.join(empty)} of {len(validation)} in the validation dataset"
        raise ConfigError(Problem(VALIDATION_DATASET, message, "give it at least two different examples"))
    return splits


def _select(units: list[list[str]], config: SplitsConfig, seed: int) -> set[str]:
    """Returns the ids of `select`: whole units in a seeded order, until the share is reached."""
    total = sum(map(len, units))
    wanted = max(1, round(total * config.select / (config.select + config.confirm)))
    stable_random(seed, "validation").shuffle(units)
    chosen: set[str] = set()
    for unit in units:
        if chosen and len(chosen) + len(unit) > wanted:
            continue
        chosen.update(unit)
    return chosen
