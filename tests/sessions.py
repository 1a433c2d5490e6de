"""A server of sessions in a thread of its own, and projects that train there."""

import asyncio
import threading
from contextlib import contextmanager

from reinforge.config.policy import PolicyConfig
from reinforge.server.app import ServeApp
from reinforge.server.base_models import BaseModels
from reinforge.server.models import ServedModels
from reinforge.server.sessions.api import SessionLimits, SessionsApi

NAME = "tiny/base"


@contextmanager
def serve_sessions(model, folder, **limits):
    """Yields a running server."""
    api = SessionsApi(
        BaseModels({NAME: PolicyConfig(model=str(model))}), folder, device="cpu", limits=SessionLimits(**limits)
    )
    app, started = ServeApp(ServedModels(), [api]), threading.Event()
    loop, done = asyncio.new_event_loop(), asyncio.Event()

    async def serve():
        async with app:
            started.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(60)
    try:
        yield app
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(60)
        loop.close()


def use_http_adapter(project, app, **settings):
    """Configures a project to train at the server."""
    adapter = {"_type": "http", "url": app.address, "base_model": NAME, **settings}
    project.settings["trainer_adapters"] = {"adapter": adapter}
    project.settings["finetuning"].pop("device", None)
    return project
