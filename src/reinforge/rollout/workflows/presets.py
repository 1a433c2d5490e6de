"""Coding agents by name, as settings of `workflow: {_type: command}`: the table is presets.yml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from reinforge.errors import did_you_mean

PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))
"""The settings of each, and `install`, the command that installs its program."""


def find_preset(name: str) -> dict[str, Any]:
    """Returns the settings of a preset; raises a `ValueError` if there is none."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r}: there are {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")
    return {"workspace": {}, **PRESETS[name]}
