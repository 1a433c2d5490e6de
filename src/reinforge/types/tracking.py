"""What a run reports to its trackers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TrackedRun:
    name: str
    folder: Path
    key: str  # names the run everywhere: 16 hexadecimal digits, the same after every resume
    is_resumed: bool = False  # an earlier process worked on the run
    settings: Mapping[str, Any] = field(default_factory=dict)  # the resolved configuration, without secrets


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """Metrics of one moment of a run."""

    step: int  # optimizer steps of the run so far; 0: before training
    metrics: Mapping[str, float]  # name -> value; all are finite
    at_s: float  # when they were measured, in seconds since the Unix epoch
