"""How many random cases the tests of `make fault` take: a tenth of the full number, or SHARE of it."""

import os

SHARE = float(os.environ.get("REINFORGE_FAULT_SHARE", "0.1"))


def scaled(full: int, least: int = 1) -> int:
    return max(least, round(full * SHARE))
