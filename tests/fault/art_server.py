"""Servers of ART's protocols that can be killed.

At a site the server kills itself: before or after a call of `METHODS` (`train:before`, `record_result:after`), or at a
crash point of training and of checkpoints (`step.after_optim`). With `forget` it does not recognize retries; with
`twice` it trains a job again whose step is saved.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from reinforge import crash
from reinforge.config.policy import PolicyConfig
from reinforge.engine.policy import EmbeddedPolicy
from reinforge.protocols.art.server.api import ARTApi
from reinforge.protocols.art.server.model import ARTModel
from reinforge.protocols.art.server.records import ModelFolder
from reinforge.serving.app import ServeApp
from reinforge.serving.loading import BaseModels
from reinforge.serving.models import ServedModels
from tests.fault.killed_servers import kill_at

METHODS: dict[str, tuple[type[Any], str]] = {
    "create": (ModelFolder, "create"),
    "record_job": (ModelFolder, "record_job"),
    "train": (ARTModel, "_train"),
    "publish": (EmbeddedPolicy, "publish"),
    "name": (ARTApi, "_serve_step"),
    "record_result": (ModelFolder, "record_result"),
}
"""A part of a job -> the call that it is."""


def die_at(site: str) -> None:
    """Makes this process kill itself at a site."""
    name, _, place = site.partition(":")
    if name not in METHODS:
        crash.arm(site)
        return
    target, method = METHODS[name]
    is_step = name in ("publish", "name")  # both are called for the base model, too, while it is loaded
    kill_at(target, method, place, lambda *arguments: not is_step or arguments[-1] == 1)


def make_app(base: Path, folder: Path, port: int) -> ServeApp:
    """Returns a server that trains the model in a folder."""
    policy = PolicyConfig(model=str(base), lora={"r": 4}, batch={"batch_size": 8})
    models = ServedModels()
    return ServeApp(models, [ARTApi(models, BaseModels({"tiny": policy}), folder, device="cpu")], port=port)


async def serve(base: Path, folder: Path, port: int, site: str) -> None:
    """Serves until the process is killed."""
    if site.startswith("forget"):
        ModelFolder.find_repeated = lambda self, request: None  # type: ignore[method-assign]
    if site.startswith("twice"):
        ModelFolder.find_step_of = lambda self, job: None  # type: ignore[method-assign]
    if site := site.removeprefix("forget").removeprefix("twice").strip():
        die_at(site)
    async with make_app(base, folder, port):
        await asyncio.Event().wait()
