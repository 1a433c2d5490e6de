"""What a preflight predicted of a run, kept so that the run can show how far off it was.

preflight  predictions for a configuration and its data  =>  a file in the folder for caches, named by their hash
run        the same configuration and data               =>  its summary has each prediction and what was measured;
                                                             its display knows the time left from the start
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from reinforge.files import find_json, home, to_json, write_json
from reinforge.runs.rows import EpochMetrics
from reinforge.types.evaluation import MetricSummary
from reinforge.version import __version__

BASE, SIGNAL, SECONDS = "base", "signal", "seconds"
"""The base model's score on `select`; the share of the first epoch's groups with signal; its time after loading."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One figure of a run, before it ran; the interval is of 95 %, and its ends are None if they are unknown."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    measured: float | None = None  # by the run; None: not known (yet)

    def __str__(self) -> str:
        """Returns `signal 0.800 [0.520, 0.960], measured 0.400 (-0.400, outside)`; seconds have no decimals."""
        decimals, name = (0, f"{SECONDS} after loading") if self.name == SECONDS else (3, self.name)
        value, *others = (
            "unknown" if each is None else f"{each:.{decimals}f}"
            for each in (self.value, self.low, self.high, self.measured)
        )
        low, high, measured = others
        text = f"{name} {value} [{low}, {high}]" if self.low is not None else f"{name} {value} (interval unknown)"
        if self.measured is None:
            return text
        outside = self.low is not None and self.high is not None and not self.low <= self.measured <= self.high
        difference = f"{self.measured - self.value:+.{decimals}f}"
        return f"{text}, measured {measured} ({difference}{', outside' if outside else ''})"


def locate_predictions(config: str, data: str) -> Path:
    """Returns the file for a resolved configuration, as `config.yml` has it, and the hash of its examples."""
    return home() / "preflights" / f"{hashlib.sha256(to_json([__version__, config, data]).encode()).hexdigest()}.json"


def write_predictions(path: Path, predictions: Sequence[Prediction], each_s: Mapping[str, float]) -> None:
    """Writes what a preflight predicts of a run, with the seconds that one of each kind of work takes (`Forecast`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"predictions": list(map(asdict, predictions)), "each_s": dict(each_s)})


def read_predictions(path: Path) -> tuple[list[Prediction], dict[str, float]]:
    """Returns what was predicted; empty: no preflight of this configuration and data ran here."""
    found = find_json(path) or {"predictions": [], "each_s": {}}
    return [Prediction(**row) for row in found["predictions"]], found["each_s"]


def measure_predictions(
    predictions: Sequence[Prediction],
    baseline: MetricSummary | None,
    epochs: Sequence[EpochMetrics],
    seconds: Mapping[str, float],
) -> list[Prediction]:
    """Returns the predictions of a run with what it measured, as far as it came.

    Args:
        seconds: Stage -> seconds; empty: the run is not complete.
    """
    without = epochs[0].share_without_signal if epochs else None
    measured = {
        BASE: baseline.mean if baseline is not None else None,
        SIGNAL: None if without is None else 1 - without,
        SECONDS: sum(taken for stage, taken in seconds.items() if stage != "LOAD") if seconds else None,
    }
    return [replace(each, measured=measured[each.name]) for each in predictions]
