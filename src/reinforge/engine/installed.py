"""Looks packages up without importing them."""

from __future__ import annotations

import importlib.util

BITSANDBYTES = "bitsandbytes"


def is_installed(name: str) -> bool:
    """Returns True if a package can be found; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # an import hook forbids it, or a broken module has no spec
        return False
