"""The embedded backend: one model that samples and learns; everything that touches a tensor.

`Engine` is loaded when it is first used, so importing the package imports no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

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
    # Read by libgomp when torch is loaded. Its threads spin for a third of a million turns before they sleep; where
    # another program holds a core, that made training ten times slower. With 5,000 it is as fast on a quiet machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__all__ = ["Engine", "LossOutput", "NamedPolicies", "register_loss"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)
