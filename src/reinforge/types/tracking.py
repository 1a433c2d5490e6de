"""What a tracker is told about a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run, as a tracker sees it.

    Attributes:
        name: Name of the run.
        folder: The run folder.
        key: Names the run everywhere: 16 hexadecimal digits, the same after every resume.
        is_resumed: An earlier process worked on the run.
        settings: The resolved configuration, without secrets.
    """

    name: str
    folder: Path
    key: str
    is_resumed: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """Metrics of one moment of a run.

    Attributes:
        step: Optimizer steps of the run so far; 0: before training.
        metrics: Name -> value; all are finite.
        at_s: When they were measured, in seconds since the Unix epoch.
    """

    step: int
    metrics: Mapping[str, float]
    at_s: float
