"""How much of a run is done and how long the rest takes: what is left of each kind of work x what one of it takes.

    held out   episodes of baseline, validations and verdict
    collect    episodes of training
    train      epochs: the job, and new weights served and checked

What one takes is measured as the run goes; before that it is what a preflight of the same configuration measured, or
follows from the other kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HELD_OUT, COLLECT, TRAIN = PER_KIND = ("held out", "collect", "train")
KINDS = {
    **dict.fromkeys(("BASELINE", "VALIDATE", "CONFIRM_BASE", "CONFIRM_TUNED"), HELD_OUT),
    **dict.fromkeys(("SUBMIT", "AWAIT", "ADOPT"), TRAIN),
    "COLLECT": COLLECT,
}
"""The kind of work of a stage; the others take little time."""
BEFORE = ("", "START", "LOAD")  # stages before the first episode
TRAIN_FACTOR = 2.0
"""How long training on a group is guessed to take, as a multiple of its sampling, before it has been measured."""
ENOUGH, PATIENCE_S = 0.1, 30.0
"""The share of its episodes after which a stage's own speed counts: the first ones end late, since many run at once.
After so many seconds it counts all the same if nothing else is known."""


@dataclass(frozen=True, slots=True)
class RunSize:
    """How much a run does."""

    num_epochs: int
    examples_per_epoch: int
    group_size: int  # episodes of an example; 0: the agent does not run in training
    groups_per_example: int
    num_select: int
    num_validations: int  # validations after the baseline, the final one included
    num_confirm: int
    num_samples: int  # episodes of each of them, for each of the two models

    @property
    def num_collected(self) -> int:
        return self.num_epochs * self.examples_per_epoch * self.group_size

    @property
    def num_validated(self) -> int:
        return (1 + self.num_validations) * self.num_select

    @property
    def num_confirmed(self) -> int:
        return 2 * self.num_confirm * self.num_samples

    @property
    def num_episodes(self) -> int:
        return self.num_collected + self.num_validated + self.num_confirmed

    def count_work(self) -> dict[str, float]:
        """Returns how much of each kind of work the run has: episodes, and epochs to train."""
        held_out = self.num_validated + self.num_confirmed
        return {HELD_OUT: held_out, COLLECT: self.num_collected, TRAIN: self.num_epochs}

    def count_stage(self, stage: str) -> int:
        """Returns the episodes of a stage, 1 for a training job, 0 for a stage that has neither."""
        each = {
            "BASELINE": self.num_select,
            "VALIDATE": self.num_select,
            "COLLECT": self.examples_per_epoch * self.group_size,
            "AWAIT": 1,
        }
        return self.num_confirmed // 2 if stage.startswith("CONFIRM") else each.get(stage, 0)


class Forecast:
    """Follows the stages of a run, and says how far it is.

    Args:
        predicted: What one of each kind of work takes by a preflight, in seconds; empty: there was none.
    """

    def __init__(self, size: RunSize, predicted: Mapping[str, float]):
        self._size, self._predicted = size, predicted
        self._seconds, self._done = dict.fromkeys(PER_KIND, 0.0), dict.fromkeys(PER_KIND, 0.0)

    def end_stage(self, stage: str, seconds: float, num_done: float) -> None:
        """Adds what a stage took; of a run that is followed, ended stages come without their episodes."""
        if (kind := KINDS.get(stage)) is not None:
            self._seconds[kind] += seconds
            self._done[kind] += stage == "AWAIT" if kind == TRAIN else num_done or self._size.count_stage(stage)

    def estimate(self, epoch: int | None, stage: str, seconds: float, num_done: float) -> tuple[float, float] | None:
        """Returns the share of the run that is done and the seconds that the rest takes; None: nothing is known yet.

        Args:
            seconds: How long the stage has run.
            num_done: Its episodes that have ended; for a training job the share that is done, 0 if that is not known.
        """
        each = self._measure_each(stage, seconds, num_done)
        if each is None:
            return None
        left, work = self._count_left(epoch, stage, num_done), self._size.count_work()
        left_s = sum(left[kind] * each[kind] for kind in each)
        if stage == "AWAIT" and not num_done:
            left_s -= min(seconds, each[TRAIN])
        total_s = sum(work[kind] * each[kind] for kind in each)
        return (max(0.0, 1 - left_s / total_s) if total_s else 0.0), max(0.0, left_s)

    def _measure_each(self, stage: str, seconds: float, num_done: float) -> dict[str, float] | None:
        known = {**self._predicted, **{kind: self._seconds[kind] / n for kind, n in self._done.items() if n}}
        current, total = KINDS.get(stage), self._size.count_stage(stage)
        is_enough = num_done >= ENOUGH * total or (current not in known and seconds >= PATIENCE_S)
        if current is not None and num_done and is_enough:
            known[current] = (self._seconds[current] + seconds) / (self._done[current] + num_done)
        episode_s, num_collected = known.get(COLLECT, known.get(HELD_OUT)), self._size.count_stage("COLLECT")
        if episode_s is not None and num_collected:
            known.setdefault(TRAIN, TRAIN_FACTOR * episode_s * num_collected)
        if episode_s is None or TRAIN not in known:
            return None
        return {COLLECT: episode_s, HELD_OUT: known.get(HELD_OUT, episode_s), TRAIN: known[TRAIN]}

    def _count_left(self, epoch: int | None, stage: str, num_done: float) -> dict[str, float]:
        size, here = self._size, max(0.0, self._size.count_stage(stage) - num_done)
        left = size.count_work()
        if epoch is not None:
            later, is_trained = size.num_epochs - epoch - 1, stage in ("ADOPT", "VALIDATE")
            validations = size.num_validations * (later + (stage != "VALIDATE")) / max(1, size.num_epochs)
            left[HELD_OUT] = validations * size.num_select + size.num_confirmed + here * (stage == "VALIDATE")
            left[COLLECT] = later * size.count_stage("COLLECT") + here * (stage == "COLLECT")
            left[TRAIN] = later + (0 if is_trained else here if stage == "AWAIT" else 1)
        elif stage == "BASELINE":
            left[HELD_OUT] -= size.num_select - here
        elif stage not in BEFORE:
            left = {HELD_OUT: here + (size.num_confirmed // 2 if stage == "CONFIRM_BASE" else 0), COLLECT: 0, TRAIN: 0}
        return left
