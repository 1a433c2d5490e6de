"""Follows a run through its journal: what its own process showed reaches another display, from the beginning on.

    journal of the run  ->  RunReplay.update()  ->  any RunProgress: a terminal (`reinforge watch`), a line of a page

The journal holds a stage when it has ended. Which one runs now follows from the stage before it and from the
episodes that arrive. Times are those of the journal, so epochs last as long as they did.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from reinforge.runs.forecast import RunSize
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.progress import RunProgress
from reinforge.runs.rows import (
    BASELINE,
    GUARD,
    EpisodeExtent,
    EpochMetrics,
    GuardEvent,
    ListedEpisode,
    StageRow,
    ValidationRow,
)
from reinforge.runs.run_folder import is_in_use, read_config

FOLLOWING = {"COLLECT": "SELECT", "SELECT": "SUBMIT", "SUBMIT": "AWAIT", "AWAIT": "ADOPT"}
"""Stages without episodes, by the stage before them."""
EVERY_EPOCH = 10**9


class JournalClock:
    """Returns the time `at_s` of what is replayed, and the present time after that."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def __call__(self) -> float:
        return time.time() if self.at_s is None else self.at_s


class RunReplay:
    """Passes what the journal of a run holds on to a display, each thing once; sets the clock that it measures by."""

    def __init__(self, folder: Path, progress: RunProgress, clock: JournalClock):
        self._folder, self._progress, self._clock = folder, progress, clock
        self._reader = JournalReader(folder)
        self._has_started = self._has_plan = False
        self._num_stages, self._num_sessions = 0, 0
        self._extent = EpisodeExtent(0, 0, 0.0)
        self._shown_epochs: set[int] = set()
        self._waiting: list[EpochMetrics] = []
        self._stage: tuple[int | None, str] | None = None
        self._ended: Counter[tuple[int | None, str]] = Counter()
        self._last_s: float | None = None

    def update(self) -> bool:
        """Passes on what is new; returns True while a process works on the run."""
        is_running = is_in_use(self._folder)  # asked first: what the process writes before it ends is read below
        if not self._has_started:
            planned = read_config(self._folder).get("finetuning", {}).get("num_epochs")
            if planned is None and is_running:  # it has not written its configuration yet
                return True
            self._has_started = True
            self._progress.start(self._folder.name, self._folder, planned if isinstance(planned, int) else 0, ())
        if not self._has_plan and (size := (facts := self._reader.facts()).get("size")) is not None:
            self._has_plan = True
            self._progress.plan(RunSize(**size), facts["each_s"])
        metrics, sessions, stages = self._reader.metrics(EVERY_EPOCH), self._reader.sessions(), self._reader.stages()
        self._shown_epochs &= {row.epoch for row in metrics}  # an epoch that runs again after a stop is shown again
        self._waiting = [row for row in metrics if row.epoch not in self._shown_epochs]
        starts = [row.started_s for row in sessions[self._num_sessions :]]
        for row in stages[self._num_stages :]:
            while starts and starts[0] <= row.at_s:
                self._last_s = starts.pop(0)
            self._pass_stage_on(row)
        self._num_stages, self._num_sessions = len(stages), len(sessions)
        self._last_s = starts[-1] if starts else self._last_s
        self._pass_epochs_on(EVERY_EPOCH)
        self._clock.at_s = None
        self._pass_episodes_on()
        return is_running

    def _pass_stage_on(self, row: StageRow) -> None:
        """Shows a stage that has ended, and begins the next one where that is known."""
        if row.stage == GUARD:
            self._pass_epochs_on(row.epoch + 1)
            event = GuardEvent(**row.data)
            kind = "" if event.action == "note" else "warning: "
            self._progress.note(f"{kind}{event.text if row.epoch == BASELINE else event}")
            return
        epoch = None if row.epoch == BASELINE else row.epoch
        is_after_training = row.stage.startswith("CONFIRM")
        self._pass_epochs_on(EVERY_EPOCH if is_after_training else row.epoch + (row.stage == "VALIDATE"))
        self._clock.at_s = row.at_s if self._last_s is None else self._last_s
        self._begin(epoch, row.stage)
        self._clock.at_s = self._last_s = row.at_s
        if row.stage in ("BASELINE", "VALIDATE"):
            self._progress.validation(ValidationRow.from_dict({**row.data, "epoch": row.epoch}))
        self._ended[epoch, row.stage] += 1
        if row.stage in FOLLOWING:
            self._begin(epoch, FOLLOWING[row.stage])

    def _begin(self, epoch: int | None, stage: str) -> None:
        if self._stage != (epoch, stage):
            self._stage = (epoch, stage)
            self._progress.stage(epoch, stage, None)

    def _pass_epochs_on(self, before: int) -> None:
        """Shows the metrics of the epochs before one, at the time of the last stage."""
        if self._last_s is not None:
            self._clock.at_s = self._last_s
        for row in self._waiting:
            if row.epoch < before:
                self._shown_epochs.add(row.epoch)
                self._progress.epoch_done(row)
        self._waiting = [row for row in self._waiting if row.epoch >= before]

    def _pass_episodes_on(self) -> None:
        """Counts the episodes of the stage that has not ended."""
        extent = self._reader.find_extent()
        if extent == self._extent:
            return
        for episode in self._reader.list_episodes(after=self._extent.newest):
            stage = _find_stage(episode)
            # a refill of an epoch is a further COLLECT
            if self._ended[stage] <= (episode.round if episode.phase == "collect" else 0):
                self._begin(*stage)
                self._progress.episode(episode.outcome, episode.reward, 0)
        self._extent = extent


def _find_stage(episode: ListedEpisode) -> tuple[int | None, str]:
    if episode.epoch == BASELINE or episode.phase.startswith("confirm"):
        return None, "BASELINE" if episode.phase == "validate" else episode.phase.upper()
    return episode.epoch, {"collect": "COLLECT", "validate": "VALIDATE"}.get(episode.phase, episode.phase.upper())
