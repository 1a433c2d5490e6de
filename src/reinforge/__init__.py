"""Improves the model behind an LLM agent from the agent's own runs, and proves that it did.

    summary = reinforge.finetune(workflow=agent, dataset="questions.jsonl", reward="exact_match", model="folder")

Public names are loaded when they are first used, so `import reinforge` is quick and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from reinforge.version import __version__ as __version__

_HOMES = {
    "finetune": "reinforge.trainer.api",
    "PolicyFailure": "reinforge.rollout.workflow",
    "ReinforgeError": "reinforge.errors",
    "ConfigError": "reinforge.errors",
    "RunSummary": "reinforge.runs.summary",
}

__all__ = ["ConfigError", "PolicyFailure", "ReinforgeError", "RunSummary", "__version__", "finetune"]

if TYPE_CHECKING:
    from reinforge.errors import ConfigError, ReinforgeError
    from reinforge.rollout.workflow import PolicyFailure
    from reinforge.runs.summary import RunSummary
    from reinforge.trainer.api import finetune


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'reinforge' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
