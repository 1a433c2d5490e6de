"""A server that keeps chats, over a scripted policy."""

import contextlib

from reinforge.learning.api import LearningApi
from reinforge.learning.store import STORE, read_chats
from reinforge.serving.recording import RecordConfig
from tests.doubles import ScriptedPolicy
from tests.serving.serving import http, says, serve


@contextlib.asynccontextmanager
async def learn(folder, script=lambda request: "yes", token=None, policy=None, trainings=None, **record):
    """Yields a client of a server that keeps chats in a folder, and the part of the server that does."""
    learning = LearningApi(folder, RecordConfig(**record), token, trainings=trainings)
    policies = {"m": policy or ScriptedPolicy(script)}
    headers = {"authorization": f"Bearer {token or 'any'}"}
    async with (
        serve(policies, [learning], keeper=learning.keeper, token=token) as app,
        http(app, headers=headers) as client,
    ):
        client.app = app
        yield client, learning


async def chat(client, text="hi", path="/v1/chat/completions", headers=None, **more):
    """Returns the answer to a chat."""
    response = await client.post(path, json={"model": "m", "messages": says(text), **more}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def rate(client, headers=None, **body):
    return await client.post("/v1/feedback", json=body, headers=headers)


def kept(folder):
    return list(read_chats(folder / STORE))
