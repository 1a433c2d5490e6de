"""The embedded backend: one model that samples and trains in this process.

Everything that touches a tensor is in this package. `Engine` is imported on first use, so importing the package does
not import torch.
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
    # libgomp reads this when torch is loaded. By default its threads spin some 300,000 times before they sleep, which
    # made training ten times slower while another program used a core. 5,000 is as fast on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__all__ = ["Engine", "LossOutput", "NamedPolicies", "register_loss"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)
