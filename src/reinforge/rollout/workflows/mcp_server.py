"""Tools of MCP servers (Model Context Protocol), through the official SDK: `pip install "reinforge[mcp]"`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib.util
import logging
import os
import shlex
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import Field, field_validator, model_validator

from reinforge.config.schema import Block
from reinforge.errors import BackendUnavailable, ConfigError, Problem, describe_error
from reinforge.limits import get_limits
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.isolation.processes import kill_marked
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.workflows.command_workflow import extract_tail, find_program
from reinforge.rollout.workflows.http_workflow import validate_agent_url
from reinforge.rollout.workflows.program_runner import MARK
from reinforge.rollout.workflows.tools import ToolFailed, define_tool, format_result
from reinforge.types.evaluation import EvalInputItem

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

logger = logging.getLogger(__name__)

START_S = 60.0  # seconds that a server may take to start and to list its tools
CLOSE_S = 10.0  # seconds that it may take to end; the SDK itself waits two before it kills
PING_S = 2.0  # seconds in which a server must answer a ping after a call that did not end
CONNECT_S = 30.0  # seconds that connecting to a server, or sending it a request, may take


class MCPServerConfig(Block):
    """An MCP server, whose tools the policy may call."""

    command: list[str] | None = Field(
        default=None,
        min_length=1,
        description="The server's program and arguments; it communicates over stdin and stdout.",
    )
    url: str | None = Field(default=None, description="URL of a server that speaks streamable HTTP.")
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Additional environment variables of the program; otherwise it gets only PATH, HOME and the like.",
    )
    headers: dict[str, str] = Field(
        default_factory=dict, description="Headers of each request to `url`; write secrets as ${VAR}."
    )
    tools: list[str] | None = Field(default=None, description="Names of the tools to offer; null: all of them.")
    per_episode: bool = Field(
        default=False,
        description="Start a server for each episode, for tools that change something; false: one for the whole run.",
    )

    @field_validator("command", mode="before", json_schema_input_type=list[str] | str | None)
    @classmethod
    def _split(cls, command: Any) -> Any:
        return shlex.split(command) if isinstance(command, str) else command

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        return None if url is None else validate_agent_url(url)

    @model_validator(mode="after")
    def _check_one(self) -> MCPServerConfig:
        if (self.command is None) == (self.url is None):
            raise ValueError("set either command (the server's program) or url")
        return self

    @property
    def shown_name(self) -> str:
        return self.url if self.url is not None else shlex.join(self.command or [])


class MCPServer:
    """A running server, or one that is started when it is needed; its connection lives in its own task."""

    def __init__(self, config: MCPServerConfig, cwd: Path):
        self.config, self.cwd = config, cwd
        self.tools: list[MCPTool] = []
        self._mark = uuid.uuid4().hex
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._lock = asyncio.Lock()
        self._is_suspect, self._tail = False, ""
        self._errors: TextIO | None = None

    async def start(self) -> None:
        """Starts the server unless it runs; one whose last call did not end must answer a ping, or is started again."""
        async with self._lock:
            if self._is_suspect and self._client is not None:
                try:
                    await asyncio.wait_for(self._client.send_ping(), PING_S)
                except Exception:  # noqa: BLE001  of the SDK, of the server, or of the network
                    logger.warning("%s", self._describe("hangs, so it is started again"))
                    await self.close(at_once=True)
            self._is_suspect = False
            if self._task is not None and not self._task.done():
                return
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stop = asyncio.Event()
            # the SDK must end a connection in the task that has begun it; and the server is not part of an episode
            self._task = asyncio.create_task(self._serve(ready), context=contextvars.Context())
            try:
                await asyncio.wait_for(asyncio.shield(ready), START_S)
            except TimeoutError:
                failure = self._describe(f"did not answer within {START_S:g} s")
                await self.close()
                raise failure from None

    def _describe(self, what: str) -> BackendUnavailable:
        """Returns the failure of the server, with the end of what it has written to its standard error."""
        if self._errors is not None:
            self._tail = extract_tail(read_end(self._errors))
        message = f"the MCP server {self.config.shown_name} {what}"
        return BackendUnavailable(message + (f":\n{self._tail}" if self._tail else ""))

    async def close(self, *, at_once: bool = False) -> None:
        self._stop.set()
        if at_once:
            await self._kill()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_S)
            self._task.cancel()
        await self._kill()

    async def _kill(self) -> None:
        if self.config.command is not None:
            await run_in_daemon_thread(lambda: kill_marked(f"{MARK}={self._mark}"), "mcp-end")

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        from mcp import Client

        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            self._errors = errors
            try:
                async with self._open_transport(errors) as transport, Client(transport) as client:
                    self.tools = await self._list_tools(client)
                    self._client = client
                    ready.set_result(None)
                    await self._stop.wait()
            except Exception as error:  # noqa: BLE001  of the SDK, of the server, or of the network
                if not ready.done():
                    ready.set_exception(self._describe(f"cannot be used: {describe_cause(error)}"))
            finally:
                self._describe("has exited")  # keeps what it has written
                self._client = self._errors = None

    @contextlib.asynccontextmanager
    async def _open_transport(self, errors: TextIO) -> AsyncIterator[Any]:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        if self.config.command is not None:
            program, *arguments = [find_program(self.config.command, self.cwd), *self.config.command[1:]]
            env = {**self.config.env, MARK: self._mark}
            parameters = StdioServerParameters(command=program, args=arguments, env=env, cwd=self.cwd)
            yield stdio_client(parameters, errlog=errors)
            return
        from mcp.client.streamable_http import streamable_http_client

        async with build_http_client(self.config.headers) as client:
            yield streamable_http_client(str(self.config.url), http_client=client)

    async def _list_tools(self, client: Client) -> list[MCPTool]:
        found, cursor = list[MCPTool](), None
        for _ in range(get_limits().list_pages):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                definition = define_tool(tool.name, tool.description or "", tool.input_schema)
                found.append(MCPTool(tool.name, definition, self))
            cursor = page.next_cursor
            if cursor is None:
                break
        wanted, names = self.config.tools, [tool.name for tool in found]
        for name in wanted or ():
            if name not in names:
                raise LookupError(f'it has no tool "{name}"; it has {", ".join(names) or "none"}')
        return [tool for tool in found if wanted is None or tool.name in wanted]

    async def call(self, name: str, arguments: dict[str, Any], context: EpisodeContext) -> str:
        from mcp import MCPError

        client, task = self._client, self._task
        if client is None or task is None:
            raise self._describe("has exited")
        calling = asyncio.ensure_future(client.call_tool(name, arguments))
        try:
            await asyncio.wait({calling, task}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise self._describe(f"exited during a call of {name}")
            result = calling.result()
        except MCPError as error:
            if is_lost(error):
                self._stop.set()  # the next episode starts it again
                raise self._describe(f"was lost: {error}") from None
            raise ToolFailed(str(error)) from None
        except asyncio.CancelledError:  # the episode has no time left
            self._is_suspect = True
            context.note_waiting(str(self._describe(f"has not answered a call of {name}")))
            raise
        finally:
            calling.cancel()
        text = format_content(result)
        if result.is_error:
            raise ToolFailed(text)
        return text


@dataclass(frozen=True)
class MCPTool:
    name: str
    definition: dict[str, Any]
    server: MCPServer

    async def call(self, arguments: dict[str, Any], item: EvalInputItem, context: EpisodeContext) -> str:
        return await self.server.call(self.name, arguments, context)


def build_http_client(headers: Mapping[str, str]) -> httpx2.AsyncClient:
    import httpx2

    return httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(CONNECT_S, read=None))


def is_lost(error: Any) -> bool:
    from mcp_types import CONNECTION_CLOSED

    return bool(error.code == CONNECTION_CLOSED)


def format_content(result: Any) -> str:
    """Returns the result of a call as text: its texts, or else its structured content; other blocks by their kind."""
    parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return format_result(result.structured_content)
    return format_result("\n".join(parts))


def read_end(errors: TextIO) -> str:
    size = os.fstat(errors.fileno()).st_size
    most = get_limits().error_bytes
    return os.pread(errors.fileno(), most, max(0, size - most)).decode("utf-8", "replace")


def describe_cause(error: BaseException) -> str:
    """Returns the first cause of an error that a task group has wrapped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe_error(error)


def check_server(config: MCPServerConfig, cwd: Path, path: str) -> None:
    """Checks what can be checked without starting a server."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(Problem(path, "the MCP SDK is not installed", 'pip install "reinforge[mcp]"'))
    if config.command is not None:
        try:
            find_program(config.command, cwd)
        except ConfigError as error:
            raise ConfigError([Problem(f"{path}.command", each.message, each.fix) for each in error.problems]) from None
