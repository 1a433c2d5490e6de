"""Seeds derived from names, equal in every process (`hash(str)` is not: Python salts it)."""

from __future__ import annotations

import hashlib
import random


def stable_seed(run_seed: int, *names: str | int) -> int:
    """Returns a 63-bit seed derived from the seed of the run and names.

    Example: `stable_seed(0, "collect", 3, "item-7")` is the same number on every machine.
    """
    text = "\x1f".join([str(run_seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stable_random(run_seed: int, *names: str | int) -> random.Random:
    return random.Random(stable_seed(run_seed, *names))
