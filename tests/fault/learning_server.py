"""Servers with `--learn` over a scripted policy, which can be killed.

The site `early SITE` removes a safety: feedback is acknowledged before it is on disk.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from reinforge import crash
from reinforge.learning.api import LearningApi
from reinforge.learning.store import LearningStore
from reinforge.serving.app import ServeApp
from reinforge.serving.models import ServedModels
from reinforge.serving.recording import RecordConfig
from tests.doubles import ScriptedPolicy


def acknowledge_early() -> None:
    """Makes the store return what work returns before it is committed."""
    run = LearningStore.run

    def run_early(store: LearningStore, work: Any) -> Any:
        vars(store._writer)["flush"] = lambda: None
        return run(store, work)

    LearningStore.run = run_early  # type: ignore[method-assign]


async def serve(folder: Path, port: int, site: str) -> None:
    """Serves until the process is killed."""
    if site.startswith("early"):
        acknowledge_early()
    folder.mkdir(exist_ok=True)
    models = ServedModels()
    models.add("m", ScriptedPolicy())
    learning = LearningApi(folder, RecordConfig(), None)
    crash.arm(site.removeprefix("early").strip())  # not before the tables are made
    async with ServeApp(models, [learning], keeper=learning.keeper, port=port):
        await asyncio.Event().wait()
