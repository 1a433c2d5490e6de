"""A server of sessions in a thread of its own, and projects that train there."""

from contextlib import contextmanager

from reinforge.config.policy import PolicyConfig
from reinforge.protocols.sessions.server.api import SessionLimits, SessionsApi
from reinforge.serving.app import ServeApp
from reinforge.serving.loading import BaseModels
from reinforge.serving.models import ServedModels
from tests.loop_thread import serve_in_thread

NAME = "tiny/base"


@contextmanager
def serve_sessions(model, folder, **limits):
    api = SessionsApi(
        BaseModels({NAME: PolicyConfig(model=str(model))}), folder, device="cpu", limits=SessionLimits(**limits)
    )
    with serve_in_thread(ServeApp(ServedModels(), [api])) as app:
        yield app


def use_http_adapter(project, app, **settings):
    adapter = {"_type": "http", "url": app.address, "base_model": NAME, **settings}
    project.settings["trainer_adapters"] = {"adapter": adapter}
    project.settings["finetuning"].pop("device", None)
    return project
