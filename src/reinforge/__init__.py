"""Improves the model behind an LLM agent from the agent's own runs, and measures the improvement.

    summary = reinforge.finetune(agent, "questions.jsonl", reward="exact_match", model="path/to/model")

Public names are imported on first use, so `import reinforge` is fast and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from reinforge.version import __version__ as __version__

_MODULES = {
    "finetune": "reinforge.trainer.api",
    "improve": "reinforge.improvement.api",
    "export": "reinforge.exports.api",
    "EpisodeContext": "reinforge.rollout.context",
    "Environment": "reinforge.interfaces",
    "EnvironmentSource": "reinforge.interfaces",
    "Observation": "reinforge.types.environment",
    "Reply": "reinforge.types.environment",
    "StepResult": "reinforge.types.environment",
    "PolicyFailure": "reinforge.rollout.workflow",
    "ReinforgeError": "reinforge.errors",
    "ConfigError": "reinforge.errors",
    "RunSummary": "reinforge.runs.summary",
    "current_openai": "reinforge.rollout.context",
    "current_text": "reinforge.rollout.context",
    "current_async_openai": "reinforge.rollout.context",
    "current_http_client": "reinforge.rollout.context",
    "current_async_http_client": "reinforge.rollout.context",
}

__all__ = ["__version__", *_MODULES]

if TYPE_CHECKING:
    from reinforge.errors import ConfigError as ConfigError
    from reinforge.errors import ReinforgeError as ReinforgeError
    from reinforge.exports.api import export as export
    from reinforge.improvement.api import improve as improve
    from reinforge.interfaces import Environment as Environment
    from reinforge.interfaces import EnvironmentSource as EnvironmentSource
    from reinforge.rollout.context import EpisodeContext as EpisodeContext
    from reinforge.rollout.context import current_async_http_client as current_async_http_client
    from reinforge.rollout.context import current_async_openai as current_async_openai
    from reinforge.rollout.context import current_http_client as current_http_client
    from reinforge.rollout.context import current_openai as current_openai
    from reinforge.rollout.context import current_text as current_text
    from reinforge.rollout.workflow import PolicyFailure as PolicyFailure
    from reinforge.runs.summary import RunSummary as RunSummary
    from reinforge.trainer.api import finetune as finetune
    from reinforge.types.environment import Observation as Observation
    from reinforge.types.environment import Reply as Reply
    from reinforge.types.environment import StepResult as StepResult


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'reinforge' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "annotations", "importlib"})
