"""How an unfinished run is resumed: by a command, or by the Python code that started it."""

from __future__ import annotations

import shlex
from pathlib import Path

from reinforge.config.imports import PYTHON_OBJECT
from reinforge.files import MAX_RECORD_BYTES, read_regular_file


def describe_resume(folder: Path) -> str:
    """Returns what resumes a run: a command, or the argument for the Python code that started the run.

    Example: `reinforge finetune --resume runs/r`, or `reinforge.finetune(..., resume='runs/r')` where the agent is a
    function that only Python code can pass.
    """
    if is_from_python(folder):
        return f"reinforge.finetune(..., resume={str(folder)!r}) with the same agent, dataset and reward"
    return f"reinforge finetune --resume {shlex.quote(str(folder))}"


def is_from_python(folder: Path) -> bool:
    """Returns True if a run's configuration names objects that no file can name, so that no command can resume it."""
    try:
        text = read_regular_file(folder / "config.yml", MAX_RECORD_BYTES).decode("utf-8")
        return PYTHON_OBJECT.search(text) is not None
    except (OSError, ValueError):
        return False
