"""TensorBoard event files, written by tensorboardX, which needs neither TensorFlow nor torch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic import Field

from reinforge.config.schema import TrackerConfig
from reinforge.files import make_private_folder
from reinforge.interfaces import Builder, Tracker
from reinforge.registry import register_tracker
from reinforge.trackers.packages import require_package
from reinforge.types.tracking import MetricPoint, TrackedRun

EVENT_FILES = "events.out.tfevents.*"


class TensorBoardConfig(TrackerConfig, name="tensorboard"):
    """Event files for TensorBoard; needs the package tensorboardX."""

    folder: Path | None = Field(
        default=None,
        description="Folder of the event files, with one folder for each run; null: `tensorboard` in the run folder.",
    )


class TensorBoardTracker(Tracker):
    """Writes event files; a resumed run rewrites them from its record."""

    def __init__(self, config: TensorBoardConfig):
        self.config = config
        self._writer: Any = None

    def start(self, run: TrackedRun) -> dict[str, int]:
        from tensorboardX import SummaryWriter

        folder = run.folder / "tensorboard"
        if self.config.folder is not None:
            folder = self.config.folder.expanduser() / run.name
        make_private_folder(folder)
        for file in folder.glob(EVENT_FILES):
            file.unlink()
        self._writer = SummaryWriter(str(folder), flush_secs=5)
        return {}

    def log(self, point: MetricPoint) -> None:
        for name, value in point.metrics.items():
            self._writer.add_scalar(name, value, point.step, walltime=point.at_s)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()


@register_tracker(config_type=TensorBoardConfig)
async def tensorboard(config: TensorBoardConfig, builder: Builder) -> AsyncIterator[TensorBoardTracker]:
    require_package("tensorboardX", "tensorboard")
    yield TensorBoardTracker(config)
