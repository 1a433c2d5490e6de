"""The rule that keeps a request with the student or sends it on, as a file.

    {"version": 1, "signal": "mean_logprob", "threshold": -0.21, "kept": [-0.05, -0.12, -0.21], "margin": 0.02, ...}

A reply of the student with a confidence of -0.2 stays, one of -0.3 goes to the teacher.
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reinforge.errors import ConfigError, Problem
from reinforge.files import read_json_file, write_json
from reinforge.routing.risk import Calibration
from reinforge.routing.signals import SIGNALS

MAX_SAMPLES = 32
Share = Annotated[float, Field(ge=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CurvePoint(_Strict):
    """Quality against share at one threshold."""

    threshold: float
    share: Share  # of the requests, answered by the student
    difference: float  # mean score of the mixture minus that of the teacher


class Router(_Strict):
    """Which replies of the student are sent, and what that promises."""

    version: Literal[1] = 1
    signal: Literal["mean_logprob", "min_logprob", "entropy", "agreement", "evaluator"]
    threshold: float | None  # a reply with at least this confidence stays; None: every request goes to the teacher
    kept: tuple[float, ...]  # all thresholds that keep the promise, the strictest first; the last one is `threshold`
    margin: float = Field(gt=0)  # the mixture is not worse than the teacher by more than this
    confidence: float = Field(gt=0, lt=1)
    share: Share  # of the requests that stay, with its 95 % interval
    share_low: Share
    share_high: Share
    num_requests: int = Field(ge=0)  # that it was calibrated on
    num_clusters: int = Field(ge=0)
    data_sha256: str  # of their confidences and scores
    metric: str | None = None  # that it was calibrated by; None: unknown
    num_samples: int = Field(0, ge=0, le=MAX_SAMPLES)  # beside the reply, for the signal `agreement`
    temperature: float = Field(1.0, gt=0, le=2)  # of these samples
    evaluator: dict[str, Any] | None = None  # for the signal `evaluator`: its `_type` and settings
    curve: tuple[CurvePoint, ...] = ()

    @classmethod
    def from_calibration(cls, signal: str, found: Calibration, **how: Any) -> Self:
        """Returns the router of a calibration; `how` has the metric, and the fields that the signal takes."""
        names = {*cls.model_fields} & {each.name for each in fields(found)} - {"curve"}
        curve = tuple(
            CurvePoint(threshold=each.threshold, share=each.share, difference=each.difference) for each in found.curve
        )
        if signal not in SIGNALS:
            raise ValueError(f"expected a signal of {', '.join(SIGNALS)}, found {signal!r}")
        measured = {name: getattr(found, name) for name in names}
        return cls.model_validate({**how, **measured, "signal": signal, "curve": curve})

    def keeps(self, confidence: float | None) -> bool:
        """Returns True if a reply of this confidence is sent; one whose confidence is unknown is not."""
        if self.threshold is None or confidence is None or math.isnan(confidence):
            return False
        return confidence >= self.threshold

    def tighten(self, num_kept: int) -> Router:
        """Returns the router with the strictest `num_kept` of its thresholds; 0: nothing stays with the student."""
        if num_kept == len(self.kept):
            return self
        kept = self.kept[:num_kept]
        threshold = kept[-1] if kept else None
        shares = [each.share for each in self.curve if threshold is not None and each.threshold == threshold]
        share = shares[0] if shares else 0.0
        update = {"kept": kept, "threshold": threshold, "share": share}
        update |= {"share_low": min(self.share_low, share), "share_high": min(self.share_high, share)}
        return self.model_copy(update=update)

    def save(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Returns the router of a file.

        Raises:
            ConfigError: It is damaged, of another version, or was edited so that its thresholds contradict each other.
        """
        try:
            return cls.model_validate(read_json_file(path))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise _refuse(path, f"{where}: {first['msg']}" if where else first["msg"]) from None
        except (OSError, ValueError) as error:
            raise _refuse(path, str(error)) from None

    def describe_signal(self) -> str:
        if self.num_samples:
            return f"agreement of {self.num_samples} further samples at temperature {self.temperature:g}"
        if self.evaluator is None:
            return self.signal
        return f"the evaluator {self.evaluator.get('function', self.evaluator.get('_type'))}"

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if list(self.kept) != sorted(self.kept, reverse=True) or self.threshold != (self.kept or (None,))[-1]:
            raise ValueError("threshold must be the last and smallest of kept")
        if (self.signal == "agreement") != (self.num_samples > 0):
            raise ValueError("num_samples must be 1 or more for the signal agreement, and 0 for any other")
        if (self.signal == "evaluator") != (self.evaluator is not None):
            raise ValueError("evaluator must hold settings for the signal evaluator, and be null for any other")
        return self


def _refuse(path: Path, why: str) -> ConfigError:
    return ConfigError(Problem("", f"{path} is not a router: {why}", "calibrate it again, or pass another file"))
