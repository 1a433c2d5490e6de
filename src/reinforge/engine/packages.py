"""The packages that the embedded backend needs, looked up without importing them: no torch, a few milliseconds."""

from __future__ import annotations

import importlib.util
import sys

from reinforge.errors import Problem

BITSANDBYTES = "bitsandbytes"
EMBEDDINGS = "all_minilm_l6_v2"


def is_installed(name: str) -> bool:
    """Returns True if a package can be found; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # an import hook forbids it, or a broken module has no spec
        return False


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
