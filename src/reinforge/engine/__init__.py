"""The embedded backend: one model that samples and trains in this process.

Everything that touches a tensor is in this package. `Engine` is imported on first use, so importing the package does
not import torch.
"""

from __future__ import annotations

import gc
import importlib
import os
from typing import TYPE_CHECKING, Any

from reinforge.engine.packages import INSTALL
from reinforge.errors import BackendUnavailable

if TYPE_CHECKING:
    from reinforge.engine.engine import Engine as Engine
    from reinforge.engine.losses.base import LossOutput as LossOutput
    from reinforge.engine.losses.base import register_loss as register_loss
    from reinforge.engine.policies import NamedPolicies as NamedPolicies

_NAMES = {
    "Engine": "reinforge.engine.engine",
    "LossOutput": "reinforge.engine.losses.base",
    "NamedPolicies": "reinforge.engine.policies",
    "register_loss": "reinforge.engine.losses.base",
}

if "OMP_WAIT_POLICY" not in os.environ:
    # libgomp reads this when torch is loaded. By default its threads spin some 300,000 times before they sleep, which
    # made training ten times slower while another program used a core. 5,000 is as fast on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__all__ = ["Engine", "LossOutput", "NamedPolicies", "import_engine", "register_loss"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def import_engine() -> type[Engine]:
    """Returns the class `Engine`; imports torch.

    Raises:
        BackendUnavailable: A package is installed but cannot be imported.
    """
    collects = gc.isenabled()
    gc.disable()  # scanning 3,000 modules that stay takes a sixth of the time
    try:
        from reinforge.engine.engine import Engine
    except (ImportError, OSError) as error:  # OSError: a shared library is missing or does not fit
        message = f"cannot import the packages that run a model: {type(error).__name__}: {error}"
        raise BackendUnavailable(f"{message}\n    fix: install them again: {INSTALL}") from error
    finally:
        if collects:
            gc.enable()
    return Engine
