"""The packages that the embedded backend needs, looked up without importing them: no torch, a few milliseconds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from reinforge.engine.installed import is_installed
from reinforge.errors import BackendUnavailable, Problem

if TYPE_CHECKING:
    from reinforge.engine import Engine

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers")
PEFT = "peft"
INSTALL = 'pip install torch==2.13.0, then pip install "reinforge[train]" (in a checkout: pip install -e ".[train]")'


def check_packages(*, lora: bool = False) -> list[Problem]:
    """Returns one problem that names every missing package, with the command that installs them, or none.

    It is a problem, too, if Python runs without docstrings, since transformers then cannot be imported.

    Args:
        lora: True if the model has LoRA adapters, which need peft as well.
    """
    if sys.flags.optimize > 1:
        message = "Python runs with -OO or PYTHONOPTIMIZE=2, which removes the docstrings that transformers needs"
        return [Problem("", message, "run without it; -O and PYTHONOPTIMIZE=1 work")]
    missing = [name for name in (*PACKAGES, *([PEFT] if lora else [])) if not is_installed(name)]
    if not missing:
        return []
    verb = "is" if len(missing) == 1 else "are"
    message = f"running a model on this machine needs {', '.join(missing)}, which {verb} not installed"
    return [Problem("", message, INSTALL)]


def import_engine() -> type[Engine]:
    """Returns the class `Engine`; imports torch.

    Raises:
        BackendUnavailable: A package is installed but cannot be imported.
    """
    try:
        from reinforge.engine import Engine
    except (ImportError, OSError) as error:  # OSError: a shared library is missing or does not fit
        message = f"cannot import the packages that run a model: {type(error).__name__}: {error}"
        raise BackendUnavailable(f"{message}\n    fix: install them again: {INSTALL}") from error
    return Engine
