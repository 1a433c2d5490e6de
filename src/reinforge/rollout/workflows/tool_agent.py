"""A plain agent with tools: ask the policy, run the tools that it calls, and repeat until it answers.

workflow: {_type: tool_agent, tools: [tools:look_up, {mcp: {command: [npx, -y, a-server]}}]}
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from reinforge.bounded import decode_json
from reinforge.config.imports import import_object
from reinforge.config.schema import Block
from reinforge.errors import ConfigError, PolicyFailure, Problem, did_you_mean
from reinforge.interfaces import Builder
from reinforge.registry import register_workflow
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.episode import extract_text
from reinforge.rollout.workflows.mcp_server import MCPServer, MCPServerConfig, check_server
from reinforge.rollout.workflows.outside_agent import AgentWorkflowConfig, OutsideWorkflow
from reinforge.rollout.workflows.templates import fill_text, list_placeholders
from reinforge.rollout.workflows.tools import (
    TOOL_NAME,
    AgentTool,
    PythonTool,
    ToolFailed,
    build_python_tool,
    format_result,
)
from reinforge.types.evaluation import EvalInputItem

MAX_PROBLEMS = 5


class ToolConfig(Block):
    """A Python function, which can be written as its name alone, or the tools of an MCP server."""

    function: str | None = Field(
        default=None,
        description="`module:function` in the project's folder. Its signature and docstring tell the policy how to "
        "call it.",
    )
    mcp: MCPServerConfig | None = Field(default=None, description="An MCP server, whose tools are offered.")

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(schema)]}

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_one(self) -> ToolConfig:
        if (self.function is None) == (self.mcp is None):
            raise ValueError("expected `module:function`, or `mcp:` with a server")
        return self


class ToolAgentConfig(AgentWorkflowConfig, name="tool_agent"):
    """A loop around the policy: it may call tools, and its first reply without a call is the answer."""

    system: str | None = Field(default=None, description="System prompt; null: none.")
    prompt: str = Field(
        default="{input}",
        description="The task as the policy sees it; `{input}` is the example's input, `{NAME}` a field of its row.",
    )
    tools: list[ToolConfig] = Field(
        default_factory=list, description="What the policy may call: `[module:function, {mcp: {command: [...]}}]`."
    )
    max_turns: int = Field(
        default=8, ge=1, description="Maximum replies in an episode; without an answer by then, the policy has failed."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="Maximum tokens of a reply; null: up to the context limit."
    )
    answer: Literal["text", "json"] = Field(
        default="text", description="The output: the text of the last reply, or its value as JSON."
    )


@dataclass(frozen=True)
class ToolAgent:
    config: ToolAgentConfig
    functions: list[PythonTool]
    servers: list[MCPServer]
    project_root: Path

    async def __call__(self, item: EvalInputItem, llm: Any, context: EpisodeContext) -> Any:
        prompt = fill_text(self.config.prompt, collect_fields(item))
        system = context.text("system", self.config.system or "")
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        text = ""
        async with self.open_tools() as tools:
            arguments: dict[str, Any] = {"tools": [tool.definition for tool in tools.values()]} if tools else {}
            if self.config.max_tokens is not None:
                arguments["max_tokens"] = self.config.max_tokens
            for _ in range(self.config.max_turns):
                reply = await llm.chat.completions.create(messages=messages, **arguments)
                message = reply.choices[0].message
                text = extract_text(message.content)
                if (failure := context.calls[-1].reply.failure) is not None:
                    raise PolicyFailure(failure, output=text)
                if not message.tool_calls:
                    return self._read_answer(text)
                messages.append(message)
                for call in message.tool_calls:
                    content = await run_tool(call, tools, item, context)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        raise PolicyFailure(f"no answer after {self.config.max_turns} replies (max_turns)", output=text or None)

    def _read_answer(self, text: str) -> Any:
        if self.config.answer == "text":
            return text
        try:
            return decode_json(text)
        except ValueError as error:
            raise PolicyFailure(f"the answer is not JSON: {error}", output=text) from None

    @asynccontextmanager
    async def open_tools(self) -> AsyncIterator[dict[str, AgentTool]]:
        """Yields the tools of one episode by name; starts the servers that are its own, or that have exited."""
        own = [MCPServer(config, self.project_root) for config in list_servers(self.config, per_episode=True)]
        try:
            for server in [*self.servers, *own]:
                await server.start()
            yield index_tools([*self.functions, *(tool for server in [*self.servers, *own] for tool in server.tools)])
        finally:
            for server in own:
                await server.close(at_once=True)

    def example_problems(self, items: Sequence[EvalInputItem]) -> list[Problem]:
        """Returns the placeholders of the prompt that an example has no field for."""
        problems = list[Problem]()
        for item in items:
            fields = collect_fields(item)
            for name in list_placeholders(self.config.prompt):
                if name not in fields and len(problems) < MAX_PROBLEMS:
                    message = f"the example {item.id} has no field for {{{name}}}{did_you_mean(name, fields)}"
                    fix = f"it has {', '.join(fields)}; write {{{{{name}}}}} for a literal {{{name}}}"
                    problems.append(Problem("workflow.prompt", message, fix))
        return problems


async def run_tool(call: Any, tools: Mapping[str, AgentTool], item: EvalInputItem, context: EpisodeContext) -> str:
    """Returns the result of a call; an error is a result too, which the policy can react to."""
    name = call.function.name
    try:
        arguments = decode_json(call.function.arguments or "{}")
    except ValueError as error:
        raise PolicyFailure(f"the arguments of a call of {name} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise PolicyFailure(f"the arguments of a call of {name} are not a JSON object")
    if name not in tools:
        return f"Error: there is no tool {name!r}; there are {', '.join(tools) or 'none'}"
    try:
        with context.function(name):
            return await tools[name].call(arguments, item, context)
    except ToolFailed as error:
        return f"Error: {format_result(str(error))}"


def collect_fields(item: EvalInputItem) -> dict[str, Any]:
    """Returns what a prompt may contain: the fields of the row, those of the input, and the `input` itself."""
    parts = [part for part in (item.full_dataset_entry, item.input_obj) if isinstance(part, Mapping)]
    return {**{str(name): value for part in parts for name, value in part.items()}, "input": item.input_obj}


def index_tools(tools: Sequence[AgentTool]) -> dict[str, AgentTool]:
    found = dict[str, AgentTool]()
    for tool in tools:
        if tool.name in found:
            raise ConfigError(Problem("tools", f"two tools are named {tool.name}", "rename one, or leave one out"))
        if not TOOL_NAME.fullmatch(tool.name):
            message = f"the name of the tool {tool.name!r} is not letters, digits, _ and -, at most 64"
            raise ConfigError(Problem("tools", message, "rename it"))
        found[tool.name] = tool
    return found


def list_servers(config: ToolAgentConfig, *, per_episode: bool) -> list[MCPServerConfig]:
    return [entry.mcp for entry in config.tools if entry.mcp is not None and entry.mcp.per_episode is per_episode]


def build_functions(config: ToolAgentConfig, project_root: Path) -> list[PythonTool]:
    found, problems = list[PythonTool](), list[Problem]()
    for index, entry in enumerate(config.tools):
        path = f"tools.{index}"
        try:
            if entry.mcp is not None:
                check_server(entry.mcp, project_root, f"{path}.mcp")
            if entry.function is not None:
                found.append(build_python_tool(import_object(entry.function, project_root, path=path), path))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    index_tools(found)
    return found


@register_workflow(config_type=ToolAgentConfig)
async def tool_agent(config: ToolAgentConfig, builder: Builder) -> AsyncIterator[OutsideWorkflow]:
    """Yields the loop as a workflow; starts the servers of the run unless the configuration is only checked."""
    functions = build_functions(config, builder.project_root)
    async with AsyncExitStack() as stack:
        servers = []
        for settings in list_servers(config, per_episode=False):
            servers.append(MCPServer(settings, builder.project_root))
            stack.push_async_callback(servers[-1].close)
        agent = ToolAgent(config, functions, servers, builder.project_root)
        if getattr(builder, "makes_models", True):
            async with agent.open_tools():  # names that collide, and servers that do not start, before any episode
                pass
        name = f"tool_agent ({len(config.tools)} tools)"
        yield OutsideWorkflow(agent, config.llm, True, config.share_environment_seed, name=name)
