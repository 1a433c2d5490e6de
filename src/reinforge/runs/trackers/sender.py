"""Sends points to one tracker, on a thread of its own: a slow or broken dashboard never holds up the run."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from reinforge.errors import describe_error
from reinforge.interfaces import Tracker
from reinforge.types.tracking import MetricPoint, TrackedRun

logger = logging.getLogger(__name__)

Record = Callable[[Mapping[str, int]], None]


class TrackerSender:
    """Sends each point once, in order.

    A point is sent if its step is above the last one that the dashboard has; where the dashboard cannot tell, above the
    last one that the run recorded as sent. That record is on disk before the point is sent, so a run that is killed and
    resumed sends no point twice, and loses at most the one that it was sending.

    Args:
        name: Name of the tracker in the configuration.
        tracker: The tracker.
        run: The run.
        sent: Last step of each metric that earlier processes recorded as sent.
        record: Records the last steps on disk before it returns.
    """

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, sent: Mapping[str, int], record: Record):
        self.name, self.tracker, self.run, self.record = name, tracker, run, record
        self._known, self._keeps_record = dict(sent), False
        self._failure: str | None = None
        self._queue: queue.Queue[MetricPoint | str] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name=f"reinforge-tracker-{name}", daemon=True)
        self._thread.start()

    def send(self, point: MetricPoint) -> None:
        self._queue.put(point)

    def finish(self, status: str, timeout_s: float) -> bool:
        """Waits until everything is sent and the run is closed; returns False if that takes longer.

        Args:
            status: How the run ended.
            timeout_s: How long to wait; what is left then may not be sent.
        """
        self._queue.put(status)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def take_failure(self) -> str | None:
        """Returns the first failure, once; None: there was none, or it was returned before."""
        failure, self._failure = self._failure, None if self._failure is None else ""
        return failure or None

    def _work(self) -> None:
        """Runs in the thread."""
        try:
            known = self.tracker.start(self.run)
        except Exception as error:  # noqa: BLE001  a dashboard may raise anything, and the run goes on
            self._fail(error)
            return
        self._keeps_record = known is None
        self._known = dict(self._known if known is None else known)
        while True:
            entry = self._queue.get()
            try:
                if isinstance(entry, str):
                    self.tracker.finish(entry)
                    return
                self._send(entry)
            except Exception as error:  # noqa: BLE001  as above
                self._fail(error)
                if isinstance(entry, str):
                    return

    def _send(self, point: MetricPoint) -> None:
        new = {name: value for name, value in point.metrics.items() if point.step > self._known.get(name, -1)}
        if not new:
            return
        self._known |= dict.fromkeys(new, point.step)
        if self._keeps_record:
            self.record(self._known)
        self.tracker.log(replace(point, metrics=new))

    def _fail(self, error: Exception) -> None:
        logger.warning("tracker %s: %s", self.name, describe_error(error), exc_info=error)
        if self._failure is None:
            self._failure = describe_error(error)
