"""The blocks of docs/tinker.md, which `tinker_recipes.py` runs as they are printed, but for the model and sizes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "tinker.md"
RECIPES = "tinker_cookbook.recipes."


def read_blocks(language: str) -> list[str]:
    """Returns the page's blocks of a language; that of blocks without one is ""."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [code for found, code in blocks if found == language]


def read_commands(program: str) -> list[list[str]]:
    """Returns the commands of a program, each as its parts."""
    lines = "".join(read_blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith(f"{program} ")]


def read_recipes() -> dict[str, dict[str, str]]:
    """Returns the settings of each recipe on the page by its module.

    `python -m tinker_cookbook.recipes.x.train size=4` -> `{"tinker_cookbook.recipes.x.train": {"size": "4"}}`
    """
    commands = [parts[2:] for parts in read_commands("python") if parts[2].startswith(RECIPES)]
    return {module: dict(part.split("=", 1) for part in parts) for module, *parts in commands}


def load_functions() -> dict[str, Any]:
    """Returns what the page's Python blocks define."""
    defined: dict[str, Any] = {}
    for code in read_blocks("python"):
        exec(compile(code, str(PAGE), "exec"), defined)
    return defined
