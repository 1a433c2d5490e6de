import os
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Generic, NamedTuple, TypeVar

import aiohttp
from aiohttp import web
from pydantic import BaseModel

T = TypeVar("T")


class HarnessConfig(BaseModel):
    id: str


class SubprocessConfig(BaseModel):
    type: str = "subprocess"


class SamplingConfig(BaseModel):
    max_tokens: int | None = None


class EvalClientConfig(BaseModel):
    base_url: str
    api_key_var: str


class AgentConfig(BaseModel):
    harness: HarnessConfig | None = None
    runtime: SubprocessConfig | None = None
    client: EvalClientConfig | None = None


class ModelContext(NamedTuple):
    model: str
    client: EvalClientConfig
    sampling: SamplingConfig


class ProgramResult(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


class TaskData(BaseModel):
    name: str | None = None
    prompt: str
    system_prompt: str | None = None
    answer: str = ""
    prompt_text = property(lambda self: self.prompt)


class Task:
    def __init__(self, data, config=None):
        self.data = data

    @classmethod
    def data_type(cls):
        return TaskData


class Taskset:
    def __init__(self, config):
        self.config, self.bounded = config, True

    def __iter__(self):
        return iter(self.load())

    @classmethod
    def task_type(cls):
        return Task


class Harness(Generic[T]):
    def resolve_prompt(self, data):
        return data.system_prompt, data.prompt


class Env:
    """Plays turns with the harness of its agent; what the model says goes through a server of its own."""

    def __init__(self, config, taskset):
        self.config, self.taskset = config, taskset

    @asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        agent = self.config.agent
        trace = SimpleNamespace(agent=SimpleNamespace(name="agent"), replies=[], metrics={}, errors=[], reward=0.0)
        async with intercept(context, trace) as endpoint:
            data = task.data
            for _ in range(self.config.taskset.turns):
                harness = self.load_harness(agent.harness.id)
                result = await harness.launch(context, trace, agent.runtime, endpoint, "secret", {}, data)
                if result.exit_code:
                    trace.errors.append(SimpleNamespace(type="ProviderError", message=result.stderr, traceback=None))
                    break
                said = [SimpleNamespace(role="assistant", content=text) for text in trace.replies]
                data = SimpleNamespace(system_prompt=data.system_prompt, prompt=said)
        trace.reward = sum("six" in text for text in trace.replies) / 2
        trace.metrics["turns"] = len(trace.replies)
        return SimpleNamespace(ok=not trace.errors, traces=[trace], errors=[])


@asynccontextmanager
async def intercept(context, trace):
    async def answer(request):
        body = {**await request.json(), **context.sampling.model_dump(exclude_none=True)}
        headers = {"authorization": f"Bearer {os.environ[context.client.api_key_var]}"}
        url = f"{context.client.base_url}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as response:
            reply = await response.json()
        if response.status == 200:
            trace.replies.append(reply["choices"][0]["message"]["content"])
        return web.json_response(reply, status=response.status)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
