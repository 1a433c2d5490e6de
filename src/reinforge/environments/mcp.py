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
from reinforge.rollout.http import exchange
from reinforge.rollout.http.exchange import EndpointRequest, EndpointResponse
from reinforge.types.environment import Observation, Reply, StepResult, ToolUse
from reinforge.version import __version__

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol, the newest first; what is used of them is the same in all."""
VERSION_HEADER = "mcp-protocol-version"
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
INSTRUCTIONS = "These tools act in an environment, until a result says that the episode is over. The environment says:"
OVER = "The episode is over."
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
ACT = {"description": "Sends your reply to the environment; returns what it says next.", "inputSchema": TEXT}
OBSERVE = {
    "description": "Returns what the environment said last, at first the task; changes nothing.",
    "inputSchema": {"type": "object", "properties": {}},
    "annotations": {"readOnlyHint": True},
}


class RPCError(Exception):
    def __init__(self, code: int, message: str, *, status: int = 200):
        super().__init__(message)
        self.code, self.status = code, status


class PlayedEnvironment(Protocol):
    """What is needed of `context.environment`."""

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
        exchange.check_method(request, "POST")
        body: dict[str, Any] = {"jsonrpc": "2.0", "id": None}
        try:
            message = await exchange.read_beside(read_message, request.body)
            if "method" not in message or "id" not in message:  # an answer, or a notification
                return EndpointResponse(202, {}, b"")
            body["id"] = message["id"]
            return exchange.respond({**body, "result": await self._call(message, request.headers)})
        except RPCError as error:
            answer = exchange.respond({**body, "error": {"code": error.code, "message": str(error)}})
            return EndpointResponse(error.status, answer.headers, answer.body)

    async def _call(self, message: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        environment, method, params = self._environment, message["method"], message.get("params", {})
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
        environment.is_served = True
        async with self._lock:
            try:
                if environment.failure is not None:
                    raise environment.failure
                observation = environment.observation or await environment.reset()
                if method == "tools/call":
                    return await self._call_tool(observation, params)
            except RPCError:
                raise
            except Exception as error:  # noqa: BLE001  a program cannot raise it, so the end of the episode does
                environment.failure = environment.failure or error
                reason = show(error) if isinstance(error, PolicyFailure) else "The environment failed"
                if method != "tools/call":
                    raise RPCError(INTERNAL_ERROR, f"{reason}. {OVER}") from None
                return write_result(f"{reason}. {OVER}", is_error=True)
        if method == "tools/list":
            return {"tools": [{"name": name, **tool} for name, tool in list_tools(observation).items()]}
        return {
            "protocolVersion": version if version in VERSIONS else VERSIONS[0],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "reinforge", "version": __version__},
            "instructions": f"{INSTRUCTIONS}\n\n{write_text(observation)}",
        }

    async def _call_tool(self, observation: Observation, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._environment.done:
            return write_result(OVER, is_error=True)
        name, arguments, tools = params.get("name"), params.get("arguments") or {}, list_tools(observation)
        if not isinstance(name, str) or name not in tools:
            raise RPCError(INVALID_PARAMS, f"there is no tool {str(name)[:60]!r}; there are {', '.join(tools)}")
        if not isinstance(arguments, dict):
            raise RPCError(INVALID_PARAMS, "arguments must be an object")
        if tools[name] is OBSERVE:
            return write_result(write_text(observation))
        text = arguments.get("text")
        if tools[name] is ACT and not isinstance(text, str):
            raise RPCError(INVALID_PARAMS, f"{name}: text must be a string")
        reply = Reply(str(text)) if tools[name] is ACT else Reply("", [ToolUse("0", name, arguments)])
        result = await self._environment.step(reply)
        return write_result("\n\n".join(filter(None, [write_text(result.observation), OVER if result.done else ""])))


def read_message(body: bytes) -> dict[str, Any]:
    """Returns a JSON-RPC message; one without an `id` wants no answer."""
    try:
        message = decode_json(exchange.check_body(body).decode())  # a model wrote the arguments, so the stricter reader
    except (BadRequest, ValueError) as error:
        raise RPCError(PARSE_ERROR, f"not JSON: {error}", status=getattr(error, "status", 400)) from None
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        text = 'expected an object with "jsonrpc": "2.0"; batches are not part of the protocol'
        raise RPCError(INVALID_REQUEST, text, status=400)
    method = message.get("method", "" if message.keys() & {"result", "error"} else None)
    if not isinstance(method, str) or type(message.get("id", 0)) not in (str, int):
        raise RPCError(INVALID_REQUEST, "expected a string as method, and a string or a number as id", status=400)
    if not isinstance(message.get("params", {}), dict):
        raise RPCError(INVALID_PARAMS, "params must be an object", status=400)
    return message


def list_tools(observation: Observation) -> dict[str, dict[str, Any]]:
    """Returns the tools by name: those of the environment, and ours where it has none of that name."""
    own: dict[str, dict[str, Any]] = {"act": ACT, "observe": OBSERVE}
    found = {}
    for function in (tool["function"] for tool in observation.tools):
        schema = {"type": "object", **(function.get("parameters") or {})}
        found[function["name"]] = {"description": function.get("description", ""), "inputSchema": schema}
    return found | {name: tool for name, tool in own.items() if name not in found}


def write_text(observation: Observation) -> str:
    return "\n\n".join(filter(None, (extract_text(message.get("content")) for message in observation.messages)))


def write_result(text: str, *, is_error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": is_error}
