"""What the guards of a run found: rows of the journal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from reinforge.runs.rows import StageRow

STAGE = "GUARD"
"""The stage under which the journal keeps them."""


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """A guard has warned, or stopped the run.

    Attributes:
        epoch: The epoch after which it did; -1: before training.
        guard: Its name in `finetuning.guards`.
        action: `warn` or `halt`.
        text: What was found and what to do, as sentences.
        value: The figure; None: there is none.
        limit: Its limit; None: there is none.
        count: Measurements in a row beyond the limit.
    """

    epoch: int
    guard: str
    action: Literal["warn", "halt"]
    text: str
    value: float | None = None
    limit: float | None = None
    count: int = 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})

    def __str__(self) -> str:
        where = "before training" if self.epoch < 0 else f"epoch {self.epoch}"
        return f"{where}, guard {self.guard}: {self.text}"


def list_guard_events(stages: Iterable[StageRow]) -> list[GuardEvent]:
    """Returns the events among the stages of a journal, each once, in their order."""
    found = {}
    for row in stages:
        if row.stage == STAGE:
            event = GuardEvent.from_dict(row.data)
            found[event.guard, event.epoch, event.action] = event
    return list(found.values())
