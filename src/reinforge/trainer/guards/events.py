"""Watches a run by its guards: warns once for each series of bad measurements, and stops the run if configured.

    halt_after: 3      measurement   ok  bad  bad  bad  bad  bad  bad
                       count          0    1    2    3    4    5    6
                                         warns    halts          halts, if the run was resumed after the first time

The counts follow from the metrics that the journal keeps, so a run that was killed and resumed goes on counting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reinforge.config.blocks import GuardLimits, GuardsConfig
from reinforge.errors import GuardHalted
from reinforge.runs.guard_events import STAGE, GuardEvent, list_guard_events
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.rows import EpochMetrics, ValidationRow
from reinforge.trainer.guards.measures import MEASURES, History, Measurement, list_guards


def find_events(config: GuardsConfig, history: History) -> list[GuardEvent]:
    """Returns the events of the last epoch of a history."""
    found = []
    for name, limits in list_guards(config).items():
        assert limits.limit is not None  # `list_guards` leaves the others out
        counted = count_in_a_row(name, limits.limit, history)
        if counted is not None:
            found += _list_events(name, limits, history.last.epoch, *counted)
    return found


def count_in_a_row(name: str, limit: float, history: History) -> tuple[int, Measurement] | None:
    """Returns the number of measurements in a row beyond the limit, up to the last epoch, and its measurement.

    None: the last epoch has no measurement.
    """
    measure = MEASURES[name]
    last = measure(history, limit)
    if last is None:
        return None
    count = 0
    for number in reversed(range(len(history.epochs))):
        measured = measure(history.up_to(number), limit)
        if measured is not None and not measured.is_beyond:
            break
        count += measured is not None
    return count, last


def _list_events(name: str, limits: GuardLimits, epoch: int, count: int, measured: Measurement) -> list[GuardEvent]:
    def make(action: str) -> GuardEvent:
        return GuardEvent(epoch, name, action, measured.text, measured.value, limits.limit, count)  # type: ignore[arg-type]

    warns = count == limits.warn_after
    halts = limits.halt_after is not None and count > 0 and count % limits.halt_after == 0
    return [*([make("warn")] if warns else []), *([make("halt")] if halts else [])]


class GuardWatch:
    """The guards of one run.

    Args:
        held_out: Metrics apart from the reward that must not get worse.
        is_relative: The reward compares siblings, so the mean of a training reward says nothing.
    """

    def __init__(
        self,
        config: GuardsConfig,
        journal: RunJournal,
        note: Callable[[str], None],
        held_out: Sequence[str] = (),
        *,
        is_relative: bool = False,
    ):
        self.config, self.journal, self.note = config, journal, note
        self.held_out, self.is_relative = list(held_out), is_relative
        self._known = {(each.guard, each.epoch, each.action) for each in list_guard_events(journal.stages())}

    def check(self, epochs: Sequence[EpochMetrics], validations: Sequence[ValidationRow], *, is_last: bool) -> None:
        """Warns about the last epoch, and stops the run if a guard says so; nothing is said again after a resume.

        Args:
            is_last: Training is over, so there is nothing to stop.
        """
        if not epochs:
            return
        history = History(list(epochs), list(validations), self.held_out, self.is_relative)
        history = history.up_to(len(epochs) - 1)
        found = find_events(self.config, history)
        events = [each for each in found if (each.guard, each.epoch, each.action) not in self._known]
        events = [each for each in events if each.action == "warn" or not is_last]
        for event in events:
            self._known.add((event.guard, event.epoch, event.action))
            self.journal.record_stage(event.epoch, STAGE, event.as_dict())
            if event.action == "warn":
                self.note(f"warning: {event}")
        halts = [each for each in events if each.action == "halt"]
        if halts:
            raise GuardHalted(describe_halt(self.config, halts[0]))


def describe_halt(config: GuardsConfig, event: GuardEvent) -> str:
    """Returns why the run stops and how it can go on."""
    limits: GuardLimits = getattr(config, event.guard)
    path = f"finetuning.guards.{event.guard}"
    many = f"{event.count} {limits.measured_at} in a row" if event.count > 1 else f"epoch {event.epoch}"
    return (
        f"guard {event.guard} stopped the run after {many} beyond {path}.limit: {event.text}. To go on all the same, "
        f"resume it, with -o {path}.halt_after null if this guard should only warn"
    )
