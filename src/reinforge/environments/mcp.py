"""The environment of an episode as an MCP server, so that a program in any language can play it.

    {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "act", "arguments": {"text": "6"}}}
    {"jsonrpc": "2.0", "id": 2, "result": {"content": [{"type": "text", "text": "Rolled 6. Again?"}], "isError": false}}

The transport is streamable HTTP (https://modelcontextprotocol.io/specification/2025-11-25/basic/transports) with
answers in JSON. The server sends nothing unasked, so GET, which opens a stream, gets a 405, and there are no sessions.
Rewards are recorded as those of any agent, and never shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from reinforge.bounded import decode_json
from reinforge.dialects.chat_call import BadRequest
from reinforge.errors import PolicyFailure, show
from reinforge.rollout.episode import extract_text
from reinforge.rollout.http.exchange import (
    EndpointRequest,
    EndpointResponse,
    check_body,
    check_method,
    encode_body,
    read_beside,
)
from reinforge.types.environment import Observation, Reply, StepResult, ToolUse
from reinforge.version import __version__

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol, the newest first; what is used of them is the same in all."""
VERSION_HEADER = "mcp-protocol-version"
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
INSTRUCTIONS = (
    "These tools act in an environment. Call them until a result says that the episode is over. The environment says:"
)
ACT, OBSERVE = "act", "observe"
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
OWN_TOOLS: dict[str, dict[str, Any]] = {
    ACT: {"description": "Sends your reply to the environment; returns what it says next.", "inputSchema": TEXT},
    OBSERVE: {
        "description": "Returns what the environment said last, at first the task; changes nothing.",
        "inputSchema": {"type": "object", "properties": {}},
        "annotations": {"readOnlyHint": True},
    },
}
OVER = "The episode is over."


class RPCError(Exception):
    def __init__(self, code: int, message: str, *, status: int = 200):
        super().__init__(message)
        self.code, self.message, self.status = code, message, status


class PlayedEnvironment(Protocol):
    """What a server needs of `context.environment`."""

    observation: Observation | None
    done: bool
    failure: BaseException | None
    is_served: bool

    async def reset(self) -> Observation: ...

    async def step(self, reply: Reply) -> StepResult: ...


class EnvironmentServer:
    """Answers the MCP requests of one episode's programs; calls that come at the same time are played in turn."""

    def __init__(self, environment: PlayedEnvironment):
        self._environment, self._lock = environment, asyncio.Lock()

    async def answer(self, request: EndpointRequest) -> EndpointResponse:
        check_method(request, "POST")
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": None}
        try:
            message = await read_beside(read_message, request.body)
            if "method" not in message or "id" not in message:  # an answer, or a notification
                return EndpointResponse(202, {}, b"")
            answer["id"] = message["id"]
            body, status = {**answer, "result": await self._call(message, request.headers)}, 200
        except RPCError as error:
            body, status = {**answer, "error": {"code": error.code, "message": error.message}}, error.status
        return EndpointResponse(status, {"content-type": "application/json"}, encode_body(body))

    async def _call(self, message: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        method, params = message["method"], message.get("params", {})
        if method not in ("initialize", "ping", "tools/list", "tools/call"):
            raise RPCError(METHOD_NOT_FOUND, f"there is no method {method[:60]!r}")
        version = params.get("protocolVersion") if method == "initialize" else headers.get(VERSION_HEADER, VERSIONS[0])
        if not isinstance(version, str):
            raise RPCError(INVALID_PARAMS, "protocolVersion must be a string")
        if version not in VERSIONS and method != "initialize":
            text = f"{VERSION_HEADER} {version[:40]!r} is not supported; there are {', '.join(VERSIONS)}"
            raise RPCError(INVALID_REQUEST, text, status=400)
        if method == "ping":
            return {}
        async with self._lock:
            observation = await self._observe()
            if method == "tools/call":
                return await self._call_tool(observation, params)
        if method == "tools/list":
            return {"tools": [{"name": name, **tool} for name, tool in list_tools(observation).items()]}
        return {
            "protocolVersion": version if version in VERSIONS else VERSIONS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "reinforge", "version": __version__},
            "instructions": f"{INSTRUCTIONS}\n\n{write_text(observation)}",
        }

    async def _observe(self) -> Observation:
        """Returns what the environment said last; the first request of an episode starts it."""
        environment = self._environment
        environment.is_served = True
        if environment.observation is None and environment.failure is None:
            try:
                return await environment.reset()
            except Exception as error:  # noqa: BLE001  a program cannot raise it, so the end of the episode does
                environment.failure = environment.failure or error
        if environment.observation is None:
            raise RPCError(INTERNAL_ERROR, self._describe_end())
        return environment.observation

    async def _call_tool(self, observation: Observation, params: Mapping[str, Any]) -> dict[str, Any]:
        environment, name, arguments = self._environment, params.get("name"), params.get("arguments") or {}
        if environment.done or environment.failure is not None:
            return write_result(self._describe_end(), is_error=True)
        tools = list_tools(observation)
        if not isinstance(name, str) or name not in tools:
            raise RPCError(INVALID_PARAMS, f"there is no tool {str(name)[:60]!r}; there are {', '.join(tools)}")
        if not isinstance(arguments, dict):
            raise RPCError(INVALID_PARAMS, "arguments must be an object")
        reply = Reply("", [ToolUse("0", name, arguments)])
        if tools[name] is OWN_TOOLS[ACT]:
            if not isinstance(text := arguments.get("text"), str):
                raise RPCError(INVALID_PARAMS, f"{ACT}: text must be a string")
            reply = Reply(text)
        if tools[name] is OWN_TOOLS[OBSERVE]:
            return write_result(write_text(observation))
        try:
            result = await environment.step(reply)
        except Exception as error:  # noqa: BLE001  a program cannot raise it, so the end of the episode does
            environment.failure = environment.failure or error
            return write_result(self._describe_end(), is_error=True)
        said = write_text(result.observation)
        return write_result("\n\n".join(filter(None, [said, OVER])) if result.done else said)

    def _describe_end(self) -> str:
        failure = self._environment.failure
        if failure is None:
            return f"{OVER} Nothing was done."
        reason = show(failure) if isinstance(failure, PolicyFailure) else "The environment failed"
        return f"{reason}. {OVER}"


def read_message(body: bytes) -> dict[str, Any]:
    """Returns a JSON-RPC message; one without an `id` wants no answer."""
    try:
        message = decode_json(check_body(body).decode())  # a model wrote the arguments, so the stricter reader
    except BadRequest as error:
        raise RPCError(PARSE_ERROR, error.message, status=error.status) from None
    except ValueError as error:
        raise RPCError(PARSE_ERROR, f"the body is not JSON: {error}", status=400) from None
    if isinstance(message, list):
        raise RPCError(INVALID_REQUEST, "batches are not part of the protocol; send one message at a time", status=400)
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise RPCError(INVALID_REQUEST, 'expected an object with "jsonrpc": "2.0"', status=400)
    is_answer = "method" not in message and ("result" in message or "error" in message)
    if not is_answer and not isinstance(message.get("method"), str):
        raise RPCError(INVALID_REQUEST, "method must be a string", status=400)
    if "id" in message and (not isinstance(message["id"], str | int) or isinstance(message["id"], bool)):
        raise RPCError(INVALID_REQUEST, "id must be a string or a whole number", status=400)
    if not isinstance(message.get("params", {}), dict):
        raise RPCError(INVALID_PARAMS, "params must be an object", status=400)
    return message


def list_tools(observation: Observation) -> dict[str, dict[str, Any]]:
    """Returns the tools by name: those of the environment, and ours where it has none of that name."""
    found = {}
    for function in (tool["function"] for tool in observation.tools):
        schema = {"type": "object", **(function.get("parameters") or {})}
        found[function["name"]] = {"description": function.get("description", ""), "inputSchema": schema}
    return {**found, **{name: tool for name, tool in OWN_TOOLS.items() if name not in found}}


def write_text(observation: Observation) -> str:
    texts = (extract_text(message.get("content")) for message in observation.messages)
    return "\n\n".join(filter(None, texts))


def write_result(text: str, *, is_error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": is_error}
