"""Servers of OpenEnv: `environment: openenv:http://127.0.0.1:8000`, or one that each process starts for itself.

    to the server     {"type": "reset", "data": {"seed": 7}}     {"type": "step", "data": {"message": "hello"}}
    from the server   {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}

Each episode is a WebSocket connection. A reply that is not a JSON object is the one required field of the action, where
the server's schema has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from pydantic import Field, model_validator

from reinforge.bounded import decode_json, load_json
from reinforge.config.schema import EnvironmentConfig
from reinforge.errors import ConfigError, PolicyFailure, Problem
from reinforge.interfaces import Environment, EnvironmentSource
from reinforge.registry import register_environment
from reinforge.rollout.workflows.command_workflow import inherit_variables
from reinforge.rollout.workflows.container import CLIENT_VARIABLES, ContainerConfig, find_container
from reinforge.rollout.workflows.program_runner import ProgramGuard, build_command
from reinforge.rollout.workflows.templates import fill_text
from reinforge.rollout.workflows.workspace import CommandLine
from reinforge.types.environment import Observation, Reply, StepResult
from reinforge.types.evaluation import EvalInputItem

MAX_MESSAGE = 64 << 20
START_S, SESSION_S, TRY_S = 50.0, 5.0, 0.1
"""Seconds until a started server must reply, and until it must have ended the session before; and between two tries."""


class CapacityReached(RuntimeError):
    """The server has as many sessions as it allows; `sessions` says how many that are."""


class OpenEnvConfig(EnvironmentConfig, name="openenv"):
    """A server that speaks OpenEnv's WebSocket protocol."""

    main_key: ClassVar[str] = "url"

    url: str | None = Field(default=None, pattern="^https?://", description="A server that runs already.")
    command: CommandLine | None = Field(
        default=None, description="Starts a server in the project's folder, for each process one, at port `{port}`."
    )
    image: str | None = Field(default=None, description="The same with a container, whose server has the port 8000.")
    sessions: int = Field(default=1, ge=1, description="Sessions that a server allows at a time.")
    size: int = Field(default=600, ge=3, description="Number of tasks: seeds that the server's reset gets.")
    seed: int = Field(default=0, ge=0, description="Seed of the tasks.")
    reset: dict[str, Any] = Field(default={}, description="What reset gets beside the seed.")
    show: str | None = Field(
        default=None,
        description="What the policy sees of an observation, with `{FIELD}` for its fields; null: its only field that "
        "is not empty, if that is a string, or else all as JSON.",
    )
    max_steps: int | None = Field(default=None, ge=1, description="Steps after which an episode is over in any case.")

    @model_validator(mode="after")
    def _check_server(self) -> OpenEnvConfig:
        if sum(each is not None for each in (self.url, self.command, self.image)) != 1:
            raise ValueError("write one of `url`, `command` and `image`")
        return self

    @classmethod
    def build_sections(cls, settings: dict[str, Any]) -> dict[str, Any]:
        given = {name: field.default for name, field in cls.model_fields.items()} | settings
        num_servers = 1 if given["url"] else given["num_workers"]
        return {"eval": {"general": {"max_concurrency": given["sessions"] * num_servers}}}


@register_environment(config_type=OpenEnvConfig)
async def openenv(config: OpenEnvConfig, builder: Any) -> AsyncIterator[EnvironmentSource]:
    async with ProgramGuard().open() as guard:  # until this process ends
        yield OpenEnv(config, builder.project_root, guard)


class OpenEnv(EnvironmentSource):
    """Rows such as `{"id": "openenv-00012", "question": "openenv 12", "seed": 12}`."""

    def __init__(self, config: OpenEnvConfig, project: Path, guard: ProgramGuard):
        self.config, self.project, self.guard = config, project, guard
        self.url, self.schema = (config.url or "").rstrip("/"), dict[str, Any]()
        self.process: subprocess.Popen[bytes] | None = None
        self.watch: subprocess.Popen[bytes] | None = None

    def load(self) -> list[EvalInputItem]:
        self.ensure_server()
        seeds = [self.config.seed * 1_000_003 + index for index in range(self.config.size)]
        rows = [{"id": f"openenv-{n:05}", "question": f"openenv {seed}", "seed": seed} for n, seed in enumerate(seeds)]
        return list(map(EvalInputItem.from_row, rows))

    def create(self) -> OpenEnvEpisode:
        return OpenEnvEpisode(self)

    def ensure_server(self) -> None:
        """Starts the server where none runs, and reads its schema."""
        if self.schema and (self.config.url or (self.process is not None and self.process.poll() is None)):
            return
        if not self.config.url:
            self._start()
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/schema", timeout=10) as response:
                    self.schema = load_json(response.read())["action"]
                return
            except (OSError, ValueError, KeyError) as error:
                code = None if self.process is None else self.process.poll()
                if self.process is None or code is not None or time.monotonic() > deadline:
                    state = error if code is None else f"it exited with code {code}"
                    raise ConfigError(Problem("url", f"no OpenEnv server replies at {self.url}: {state}")) from None
            time.sleep(TRY_S)

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command, quiet = [part.replace("{port}", str(port)) for part in self.config.command or ()], subprocess.DEVNULL
        if self.config.image is not None:
            client = find_container(ContainerConfig(image=self.config.image, mount_cwd=False), self.project).client
            name, publish = f"reinforge-{uuid.uuid4().hex}", f"127.0.0.1:{port}:8000"
            command = [client, "run", "--rm", "--init", "--name", name, "--publish", publish, self.config.image]
            # an orphan, which is not killed with this process, and removes the container when that has ended
            remove = f"exec 3<&0; (cat <&3; exec {shlex.join([client, 'rm', '--force', name])}) &"
            needed = {name: os.environ[name] for name in ("PATH", "HOME", *CLIENT_VARIABLES) if name in os.environ}
            self.watch = subprocess.Popen(
                ["sh", "-c", remove], env=needed, stdin=subprocess.PIPE, stdout=quiet, start_new_session=True
            )
        env = {**inherit_variables(), **self.guard.environment()}
        self.process = subprocess.Popen(
            build_command(command, self.project),
            cwd=self.project,
            env=env,
            stdin=quiet,
            stdout=quiet,
            start_new_session=True,
        )


class OpenEnvEpisode(Environment):
    def __init__(self, source: OpenEnv):
        self.source, self.config, self.num_steps = source, source.config, 0
        self.socket: Any = None
        self.client: aiohttp.ClientSession | None = None

    async def reset(self, item: EvalInputItem, seed: int) -> Observation:
        deadline, data = time.monotonic() + SESSION_S, {**self.config.reset, "seed": item.full_dataset_entry["seed"]}
        while True:
            self.source.ensure_server()
            try:
                await self._connect()
                text = self._show(await self._ask("reset", data))
                break
            except (CapacityReached, aiohttp.ClientConnectorError):  # a server that has died may still be exiting
                if time.monotonic() > deadline:
                    raise
            await self.close()
            await asyncio.sleep(TRY_S)
        if self._find_field() is None:
            text += f"\n\nReply with a JSON object of this schema: {json.dumps(self.source.schema)}"
        return Observation([{"role": "user", "content": text}])

    async def step(self, reply: Reply) -> StepResult:
        data = await self._ask("step", self._read_action(reply.text))
        self.num_steps += 1
        if done := bool(data["done"]) or self.num_steps == self.config.max_steps:
            await self.close()
        reward = None if data.get("reward") is None else float(data["reward"])
        return StepResult(Observation([{"role": "user", "content": self._show(data)}]), reward, done)

    def _find_field(self) -> str | None:
        """Returns the one required field of an action; None: there is none, or several."""
        required = self.source.schema.get("required", [])
        return required[0] if len(required) == 1 else None

    def _read_action(self, text: str) -> dict[str, Any]:
        """Returns the action that a reply is: "up" -> {"move": "up"}; '{"move": "up"}' -> the same."""
        properties, field = self.source.schema.get("properties", {}), self._find_field()
        try:
            value = decode_json(text)
        except ValueError:
            value = None
        if isinstance(value, dict) and (field is None or value.keys() <= properties.keys()):
            return value
        if field is None:
            raise PolicyFailure("the reply is not a JSON object", output=text)
        return {field: text.strip() if value is None or properties[field].get("type") == "string" else value}

    def _show(self, data: dict[str, Any]) -> str:
        observation = data["observation"]
        if self.config.show is not None:
            return fill_text(self.config.show, observation)
        said = [value for value in observation.values() if value not in (None, "", [], {})]
        return said[0] if len(said) == 1 and isinstance(said[0], str) else json.dumps(observation, ensure_ascii=False)

    async def _connect(self) -> None:
        self.client, self.replies = aiohttp.ClientSession(), asyncio.Queue[str | None]()
        self.socket = await self.client.ws_connect(f"{self.source.url}/ws", max_msg_size=MAX_MESSAGE)
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Reads all the time, since that is when the server's pings are answered."""
        async for message in self.socket:
            self.replies.put_nowait(message.data)
        self.replies.put_nowait(None)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(ConnectionError):  # then it is closed
            await self.socket.send_json({"type": kind, "data": data})
        if (text := await self.replies.get()) is None:
            raise RuntimeError("the server has closed the connection")
        answer = load_json(text)
        if answer["type"] == "error":
            code, message = answer["data"].get("code"), answer["data"].get("message")
            if code == "VALIDATION_ERROR" and kind == "step":
                raise PolicyFailure(f"the server refuses the action: {answer['data'].get('errors', message)}")
            error = CapacityReached if code == "CAPACITY_REACHED" else RuntimeError
            raise error(f"the server failed with {code}: {message}")
        return answer["data"]

    async def close(self) -> None:
        opened, self.socket, self.client = (self.socket, self.client), None, None
        for each in opened:
            if each is not None:
                await each.close()
