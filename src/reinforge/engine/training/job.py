"""One job: whose weights it may change, and what it can be rolled back to."""

from __future__ import annotations

from reinforge.engine.training.learner import Learner
from reinforge.engine.training.snapshot import Snapshot


class Job:
    """The adapters of one job, and what they were before it.

    open -> ended. What is not published yet can be rolled back, all adapters together.

    Args:
        adapters: Names of those that it may train.

    Attributes:
        is_open: True until the job has ended.
    """

    def __init__(self, adapters: tuple[str, ...]):
        self.adapters, self.is_open = adapters, True
        self._before: dict[str, Snapshot] = {}

    def __str__(self) -> str:
        return ", ".join(self.adapters)

    @property
    def is_changed(self) -> bool:
        """True if there is something to put back."""
        return bool(self._before)

    def keep(self, adapter: str, learner: Learner) -> None:
        """Keeps an adapter as it is now, unless it was kept before: call it ahead of each change."""
        if adapter not in self._before:
            self._before[adapter] = Snapshot(learner)

    def forget(self, adapter: str) -> None:
        """Gives up what an adapter was: its weights are published."""
        self._before.pop(adapter, None)

    def restore(self) -> None:
        """Puts every adapter back that was changed."""
        for snapshot in self._before.values():
            snapshot.restore()
