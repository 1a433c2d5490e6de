"""A server over a tiny model or a scripted policy, and the official clients that talk to it.

The clients read no certificates: a server here speaks plain HTTP, and reading them is most of what a client costs.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys

import httpx

from reinforge.serving.app import ServeApp
from reinforge.serving.models import ServedModels
from tests.doubles import ScriptedPolicy


@contextlib.asynccontextmanager
async def serve(policies, features=(), **settings):
    models = ServedModels()
    for name, policy in policies.items():
        models.add(name, policy)
    async with ServeApp(models, features, **settings) as app:
        yield app


class ScriptedLoader:
    """Serves a scripted policy in the place of each version of a folder."""

    def __init__(self, models):
        self._models = models

    async def load(self, name, folder, base, settings=None):
        policy = ScriptedPolicy()
        await policy.publish(int(name.rpartition("@")[2]))
        self._models.add(name, policy, root=base)

    async def unload(self, name):
        await self._models.remove(name)


def start_command(*arguments, stderr=subprocess.PIPE, **settings):
    """Starts `reinforge ...` so that SIGINT reaches it, which a shell's background jobs ignore."""
    return subprocess.Popen(
        [sys.executable, "-m", "reinforge", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **settings,
    )


def http(app, **settings):
    return httpx.AsyncClient(base_url=app.address, timeout=60, verify=False, **settings)


def async_openai(app, key="any", **settings):
    import openai

    plain = openai.DefaultAsyncHttpxClient(verify=False)
    settings = {"max_retries": 0, "http_client": plain, **settings}
    return openai.AsyncOpenAI(base_url=f"{app.address}/v1", api_key=key, **settings)


def async_anthropic(app, key="any"):
    import anthropic

    plain = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=app.address, api_key=key, max_retries=0, http_client=plain)


def says(text):
    return [{"role": "user", "content": text}]


async def wait_for(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
