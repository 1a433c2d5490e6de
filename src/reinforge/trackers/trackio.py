"""Trackio: a dashboard on this machine (`trackio show`), with one SQLite file for each project."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from reinforge.config.schema import TrackerConfig
from reinforge.interfaces import Builder, Tracker
from reinforge.registry import register_tracker
from reinforge.trackers.packages import require_package
from reinforge.types.tracking import MetricPoint, TrackedRun


class TrackioConfig(TrackerConfig, name="trackio"):
    """Metrics in Trackio; needs the package trackio."""

    project: str = Field(default="reinforge", description="Name of the project.")
    send_config: bool = Field(default=True, description="Also send the resolved configuration.")


class TrackioTracker(Tracker):
    """Writes into one Trackio run on this machine, whose id is the key of the run."""

    def __init__(self, config: TrackioConfig):
        self.config = config
        self._run: TrackedRun | None = None
        self._settings: dict[str, Any] | None = None

    def start(self, run: TrackedRun) -> dict[str, int]:
        from trackio.sqlite_storage import SQLiteStorage

        self._run = run
        self._settings = {
            "_Created": datetime.now(UTC).isoformat(),
            **(run.settings if self.config.send_config else {}),
        }
        known: dict[str, int] = {}
        for row in SQLiteStorage.get_logs(self.config.project, run.name, run_id=run.key):
            known |= {name: max(int(row["step"]), known.get(name, -1)) for name in row}
        return known

    def log(self, point: MetricPoint) -> None:
        """Writes the metrics into the project's file.

        `trackio.log` would write them half a second later, which a process that is killed may not see, and print to the
        standard output, which is the result of our commands.
        """
        from trackio.sqlite_storage import SQLiteStorage

        assert self._run is not None  # `start` comes first
        SQLiteStorage.bulk_log(
            self.config.project,
            self._run.name,
            [dict(point.metrics)],
            steps=[point.step],
            timestamps=[datetime.fromtimestamp(point.at_s, UTC).isoformat()],
            config=self._settings,
            run_id=self._run.key,
        )
        self._settings = None

    def finish(self, status: str) -> None:
        """Does nothing: everything is written."""


@register_tracker(config_type=TrackioConfig)
async def trackio(config: TrackioConfig, builder: Builder) -> AsyncIterator[TrackioTracker]:
    require_package("trackio", "trackio")
    yield TrackioTracker(config)
