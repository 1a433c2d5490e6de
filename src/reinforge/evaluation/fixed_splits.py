"""Splits that stay as they are while a dataset grows: the hash of a conversation decides, and nothing else.

shares 0.6 / 0.15 / 0.25, hash 0.7 of [0, 1)  =>  select, in every run with this seed
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from reinforge.config.schema import SplitsConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.splits import PATH, SPLITS, group_by_column
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_seed


def assign_by_hash(
    items: Sequence[EvalInputItem], groups: list[list[str]], config: SplitsConfig, seed: int
) -> dict[str, str]:
    """Returns the split of each id, by the value of `group_key`, else by the id; empty: it is not used.

    Args:
        groups: Ids with the same question, of which those to train on are left out if any is held out.
    """
    ends = list(accumulate(read_shares(config).values()))
    names = {id_: value for value, ids in group_by_column(items, config.group_key).items() for id_ in ids}

    def choose(name: str) -> str:
        place = stable_seed(seed if config.seed is None else config.seed, "splits", name) / 2**63
        return next((split for split, end in zip(SPLITS, ends, strict=True) if place < end), "")

    assigned = {str(item.id): choose(names.get(str(item.id), str(item.id))) for item in items}
    for group in groups if config.near_duplicates != "allow" else ():
        if any(assigned[id_] in SPLITS[1:] for id_ in group):
            assigned |= {id_: "" for id_ in group if assigned[id_] == "train"}
    return assigned


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
