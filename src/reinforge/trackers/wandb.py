"""Weights & Biases; offline, a run is uploaded later by `wandb sync`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import Field

from reinforge.config.schema import TrackerConfig
from reinforge.errors import BackendError
from reinforge.interfaces import Builder, Tracker
from reinforge.registry import register_tracker
from reinforge.trackers.packages import require_package
from reinforge.types.tracking import MetricPoint, TrackedRun

STEP = "optimizer_step"  # the x-axis of every chart; W&B's own step only counts calls


class WandbConfig(TrackerConfig, name="wandb"):
    """Metrics in Weights & Biases; needs the package wandb, and online a login (`wandb login`, WANDB_API_KEY)."""

    project: str = Field(default="reinforge", description="Name of the project.")
    entity: str | None = Field(default=None, description="User or team; null: that of the login.")
    mode: Literal["online", "offline"] | None = Field(
        default=None,
        description="online, or offline: write into `wandb` in the run folder, for `wandb sync` to upload; null: as "
        "the variable WANDB_MODE says, else online.",
    )
    base_url: str | None = Field(default=None, description="URL of a server of your own; null: that of the login.")
    send_config: bool = Field(default=True, description="Also send the resolved configuration.")

    @property
    def is_offline(self) -> bool:
        return (self.mode or os.environ.get("WANDB_MODE", "online")) in ("offline", "dryrun", "disabled")

    @property
    def url(self) -> str:
        """The server that metrics are sent to; empty: none."""
        return "" if self.is_offline else self.base_url or os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


class WandbTracker(Tracker):
    """Writes into one W&B run, whose id is the key of the run."""

    def __init__(self, config: WandbConfig):
        self.config = config
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Opens the W&B run; W&B cannot tell which steps it has."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        config = self.config
        if not config.is_offline and not wandb.api.api_key:
            raise BackendError("W&B has no API key: run `wandb login`, set WANDB_API_KEY, or set mode: offline")
        server = {} if config.base_url is None else {"base_url": config.base_url}
        settings = wandb.Settings(console="off", disable_git=True, save_code=False, silent=True, **server)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            id=run.key,
            name=run.name,
            resume="allow",
            mode="offline" if config.is_offline else "online",
            dir=str(run.folder),
            config=dict(run.settings) if config.send_config else None,
            settings=settings,
            reinit="create_new",
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, point: MetricPoint) -> None:
        self._run.log({**point.metrics, STEP: point.step})

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "completed" else 1)


@register_tracker(config_type=WandbConfig)
async def wandb(config: WandbConfig, builder: Builder) -> AsyncIterator[WandbTracker]:
    require_package("wandb", "wandb")
    yield WandbTracker(config)
