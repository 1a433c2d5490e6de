"""Splits that stay as they are while a dataset grows: the hash of a conversation decides, and nothing else.

shares 0.6 / 0.15 / 0.25, hash 0.7 of [0, 1)  =>  select, in every run with this seed
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from reinforge.config.schema import SplitsConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.contamination import group_near_duplicates
from reinforge.evaluation.splits import (
    PATH,
    SPLITS,
    check_group_key,
    group_by_column,
    group_equal_examples,
    merge_groups,
)
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_seed


def split_fixed(
    items: Sequence[EvalInputItem], config: SplitsConfig, seed: int, *, id_key: str = "id"
) -> dict[str, list[EvalInputItem]]:
    """Returns the examples of each split, as `split_examples` does, by the value of `group_key`, else by the id.

    Of examples with the same question, those to train on are left out if any is held out.
    """
    ends = list(accumulate(read_shares(config).values()))
    check_group_key(items, config.group_key)
    names = {id_: value for value, ids in group_by_column(items, config.group_key).items() for id_ in ids}

    def choose(name: str) -> str:
        place = stable_seed(seed if config.seed is None else config.seed, "splits", name) / 2**63
        return next((split for split, end in zip(SPLITS, ends, strict=True) if place < end), "")

    assigned = {str(item.id): choose(names.get(str(item.id), str(item.id))) for item in items}
    groups = group_equal_examples(items, id_key, None, by_prompt=True)
    if config.near_duplicates == "group":
        groups = merge_groups(groups, group_near_duplicates(items, config.near_duplicate_similarity))
    for group in groups if config.near_duplicates != "allow" else ():
        if any(assigned[id_] in SPLITS[1:] for id_ in group):
            assigned |= {id_: "" for id_ in group if assigned[id_] == "train"}
    splits = {name: [item for item in items if assigned[str(item.id)] == name] for name in SPLITS}
    if empty := [name for name in SPLITS if not splits[name]]:
        message = f"no examples are left for {' and '.join(empty)}: the dataset has {len(items)}, and fixed splits"
        raise ConfigError(Problem(PATH, message, "wait for more of it, or give these splits larger shares"))
    return splits


def read_shares(config: SplitsConfig) -> dict[str, float]:
    """Returns the shares by split; a `ConfigError` if something else decides, such as counts."""
    if config.key is not None:
        raise ConfigError(Problem(f"{PATH}.key", "set together with fixed, but both define the splits", "remove one"))
    shares = {name: float(getattr(config, name)) for name in SPLITS}
    fix = "write a share from 0 to 1: users keep their split when others come"
    if counts := [name for name, share in shares.items() if share > 1]:
        raise ConfigError([Problem(f"{PATH}.{name}", f"{shares[name]:g} is a count", fix) for name in counts])
    if (total := sum(shares.values())) > 1 + 1e-9:
        raise ConfigError(Problem(PATH, f"the shares add up to {total:g}, more than 1", "lower them to a sum of 1"))
    return shares
