"""The packages of the trackers, which are extras of reinforge."""

from __future__ import annotations

import importlib.util

from reinforge.errors import ConfigError, Problem


def require_package(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        message = f"the package {module} is not installed"
        raise ConfigError(Problem("_type", message, f"pip install 'reinforge[{extra}]', or remove this tracker"))
