"""One open job: the adapters that it may change, and snapshots to roll them back."""

from __future__ import annotations

from reinforge.engine.training.learner import Learner
from reinforge.engine.training.snapshot import LearnerSnapshot


class EngineJob:
    """The adapters of one job, with snapshots from before it.

    A job is open, then ended. Until the new weights are published it can be rolled back, all adapters together.

    Args:
        adapters: Names of the adapters that the job may train.

    Attributes:
        is_open: True until the job has ended.
    """

    def __init__(self, adapters: tuple[str, ...]):
        self.adapters, self.is_open = adapters, True
        self._snapshots: dict[str, LearnerSnapshot] = {}

    def __str__(self) -> str:
        return ", ".join(self.adapters)

    @property
    def is_changed(self) -> bool:
        return bool(self._snapshots)

    def take_snapshot(self, adapter: str, learner: Learner) -> None:
        """Takes a snapshot of an adapter before its first change; later calls do nothing."""
        if adapter not in self._snapshots:
            self._snapshots[adapter] = LearnerSnapshot(learner)

    def drop_snapshot(self, adapter: str) -> None:
        self._snapshots.pop(adapter, None)

    def restore(self) -> None:
        for snapshot in self._snapshots.values():
            snapshot.restore()
