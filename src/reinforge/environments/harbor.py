"""Task folders of Harbor (schema 1.0 to 1.4): `environment: harbor:FOLDER`.

    FOLDER/hello/task.toml           timeouts, and the image if there is one
                 instruction.md      what the agent is told
                 environment/        a Dockerfile and its files
                 tests/test.sh       runs when the agent is done; writes /logs/verifier/reward.txt or reward.json
                 solution/           never shown

With an `agent` or a `command` the run's workflow is that program. Otherwise our agent plays with the tool `bash`, and a
reply without a call ends its work. Differs from Harbor: the tests find what the agent did in `path` and nothing else of
its container; without a reward's file the exit code counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from reinforge.config.schema import EnvironmentConfig
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Environment, EnvironmentSource
from reinforge.registry import register_environment
from reinforge.rollout.workflows.command_workflow import CommandAgent, CommandWorkflowConfig, open_agent
from reinforge.rollout.workflows.outside_agent import AgentAccess
from reinforge.rollout.workflows.presets import find_preset
from reinforge.rollout.workflows.program_runner import ProgramError
from reinforge.rollout.workflows.workspace import VERIFIER, CommandLine, WorkspaceError
from reinforge.types.environment import Observation, Reply, StepResult, ToolUse
from reinforge.types.evaluation import EvalInputItem

MAX_OUTPUT = 10_000  # characters of a command's output that the policy sees; of a longer one it sees both ends
EPISODE_S = 1800.0
"""The time limit of an episode, unless the configuration has one, and of an agent whose task has none."""
CANARY = re.compile(r"\A(?:\s*(?:<!--|#).*canary.*\n)+", re.IGNORECASE)
"""Lines that mark a benchmark's data, which agents are not shown."""
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


class HarborConfig(EnvironmentConfig, name="harbor"):
    """Task folders of Harbor: an instruction, files, and tests that decide the reward."""

    main_key: ClassVar[str] = "folder"
    metrics: ClassVar[tuple[str, ...]] = ("solved",)

    folder: str = Field(description="The folder of the task folders, or one task folder.")
    sandbox: Literal["container", "process"] = Field(
        default="container",
        description="`container`: in the image of each task, with docker or podman. `process`: as processes of this "
        "machine, for tasks that you trust; nothing of a Dockerfile is run.",
    )
    agent: str | None = Field(
        default=None, description="A preset of `workflow: {_type: command}`, such as claude_code or mini_swe_agent."
    )
    command: CommandLine | None = Field(default=None, description="Another program as the agent.")
    path: str = Field(default="/app", pattern="^/[^/]", description="The tasks' working directory.")
    command_timeout_s: float = Field(default=60.0, gt=0, description="Seconds that a command of our agent may take.")
    step_timeout_s: float = Field(default=EPISODE_S, gt=0, description="Seconds that a step, or the tests, may take.")

    @field_validator("agent")
    @classmethod
    def _check_agent(cls, agent: str | None) -> str | None:
        if agent is not None:
            find_preset(agent)
        return agent

    @classmethod
    def build_sections(cls, settings: dict[str, Any]) -> dict[str, Any]:
        sections: dict[str, Any] = {"finetuning": {"limits": {"episode_timeout_s": EPISODE_S}}}
        if settings.get("agent") or settings.get("command"):
            defaults = {name: field.default for name, field in cls.model_fields.items()}
            sections["workflow"] = {"_type": "command", **build_workflow({**defaults, **settings})}
        return sections


def build_workflow(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the `command` workflow that makes and scores the workspace of a row."""
    task, path = f"{settings['folder']}/{{task}}", settings["path"]
    agent = {"preset": settings["agent"]} if settings["agent"] else {"command": settings["command"] or ["bash"]}
    reward = {
        "command": ["bash", "-c", "{verifier}"],
        "mounts": {"/tests": f"{task}/tests", VERIFIER: None},
        "parse": "reward_file",
        "restore": [],
        "timeout_s": "{verifier_timeout_s}",
    }
    workflow = {**agent, "timeout_s": "{agent_timeout_s}", "reward": reward}
    if settings["sandbox"] == "container":
        return {**workflow, "workspace": {"path": path, "from_image": True}, "container": {"image": "{image}"}}
    setup = {"command": ["rm", "-f", "Dockerfile", ".dockerignore"]}
    return {**workflow, "workspace": {"path": path, "copy": f"{task}/environment", "setup": setup}}


@register_environment(config_type=HarborConfig)
async def harbor(config: HarborConfig, builder: Any) -> AsyncIterator[EnvironmentSource]:
    settings = {**vars(config), "agent": None, "command": None}
    workflow, access = CommandWorkflowConfig(**build_workflow(settings)), AgentAccess(None, "harbor")
    async with open_agent(workflow, access, builder.project_root, is_run=True) as runner:  # until this process ends
        yield Harbor(config, runner, workflow.reward)


class Harbor(EnvironmentSource):
    """Rows such as `{"id": "hello", "question": ..., "task": "hello", "image": ..., "agent_timeout_s": 900.0}`."""

    def __init__(self, config: HarborConfig, runner: CommandAgent, reward: Any):
        self.config, self.runner, self.reward, self.root = config, runner, reward, runner.project / config.folder
        about = f"Runs a command with bash in {config.path}. When the task is done, reply without a call."
        function = {"name": "bash", "description": about, "parameters": PARAMETERS}
        self.tools = [{"type": "function", "function": function}]

    def load(self) -> list[EvalInputItem]:
        folders = [path.parent for path in sorted([*self.root.glob("task.toml"), *self.root.glob("*/task.toml")])]
        if not folders:
            raise ConfigError(Problem("folder", f"there is no folder with a task.toml in {self.root}"))
        return [EvalInputItem.from_row(self._read(folder)) for folder in folders]

    def _read(self, folder: Path) -> dict[str, Any]:
        context, dockerfile = folder / "environment", folder / "environment" / "Dockerfile"
        try:
            task = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            instruction = (folder / "instruction.md").read_text(encoding="utf-8") if "steps" not in task else ""
            docker = dockerfile.read_text(encoding="utf-8") if dockerfile.exists() else ""
        except (OSError, ValueError) as error:
            raise ConfigError(Problem("folder", f"{folder.name}: {error}")) from None
        environment, verifier = task.get("environment", {}), task.get("verifier", {})
        workdir = environment.get("workdir") or [self.config.path, *re.findall(r"^WORKDIR\s+(\S+)", docker, re.M)][-1]
        copies = [line.split()[1:] for line in re.findall(r"^(?:COPY|ADD) .*", docker, re.M)]
        is_plain = all(
            target.rstrip("/") in (".", workdir) and all(name == "." or (context / name).is_file() for name in names)
            for *names, target in copies
        )
        refused = {
            "several steps": "steps" in task,
            "variables of its environment": environment.get("env"),
            "variables of this machine": "${" in str(verifier.get("env")),
            "MCP servers": environment.get("mcp_servers"),
            "another system than Linux": environment.get("os", "linux").lower() != "linux",
            "a verifier elsewhere": "environment" in verifier or verifier.get("environment_mode") == "separate",
            "several containers": [*folder.glob("environment/docker-compose.y*ml")],
            "no tests/test.sh": not (folder / "tests" / "test.sh").is_file(),
            f"the working directory {workdir} (`path` is another)": workdir != self.config.path,
            f"COPY of more than files to {self.config.path}": self.config.sandbox == "process" and not is_plain,
        }
        if reason := next((reason for reason, is_true in refused.items() if is_true), None):
            raise ConfigError(Problem("folder", f"{folder.name}: a task with {reason} cannot be played here"))
        variables = "".join(f"export {key}={shlex.quote(str(each))}; " for key, each in verifier.get("env", {}).items())
        return {
            "id": folder.name,
            "question": CANARY.sub("", instruction).strip(),
            "task": os.path.relpath(folder, self.root),
            "image": environment.get("docker_image") or self._find_image(folder),
            "verifier": f"{variables}chmod +x /tests/test.sh; exec /tests/test.sh",
            "agent_timeout_s": task.get("agent", {}).get("timeout_sec", EPISODE_S),
            "verifier_timeout_s": verifier.get("timeout_sec", 600.0),
            "metadata": json.loads(json.dumps(task.get("metadata", {}), default=str)),
        }

    def _find_image(self, folder: Path) -> str:
        """Returns the name of the image that is built from a task's Dockerfile."""
        image = f"harbor-{re.sub('[^a-z0-9]+', '-', folder.name.lower())}"
        if (container := self.runner.container) is not None:
            command = [container.client, "image", "inspect", image]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                fix = f"{container.client} build --tag {image} {folder / 'environment'}"
                raise ConfigError(Problem("folder", f"the image of the task {folder.name} has not been built", fix))
        return image

    def create(self) -> HarborTask:
        return HarborTask(self)


class HarborTask(Environment):
    """One task in a workspace of its own."""

    def __init__(self, source: Harbor):
        self.source, self.runner, self.stack = source, source.runner, AsyncExitStack()

    async def reset(self, item: EvalInputItem, seed: int) -> Observation:
        self.left_s = float(item.full_dataset_entry["agent_timeout_s"])
        self.place = await self.stack.enter_async_context(self.runner.open_place(item))
        return Observation([{"role": "user", "content": item.input_obj}], self.source.tools)

    async def step(self, reply: Reply) -> StepResult:
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": await self._run(call)} for call in reply.tool_calls
        ]
        if results and self.left_s > 0:
            return StepResult(Observation(results, self.source.tools))
        try:
            report = await self.runner.score(self.source.reward, self.place)
        except TimeoutError as error:  # not of the episode
            raise WorkspaceError(str(error)) from None
        return StepResult(reward=report.pop("reward"), done=True, info=report)

    async def _run(self, call: ToolUse) -> str:
        if call.name != "bash" or not isinstance(command := call.arguments.get("command"), str) or "\0" in command:
            return 'error: call bash with {"command": "..."}'
        limit_s, started = min(self.source.config.command_timeout_s, max(self.left_s, 0.0)), time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                result = await self.runner.run(["bash", "-c", command], self.place, self.place.environment())
        except (TimeoutError, ProgramError) as error:
            return f"error: the command {str(error) or f'took more than {limit_s:g} s'}"
        finally:
            self.left_s -= time.monotonic() - started
        text = (result.stdout + result.stderr).decode("utf-8", "replace")
        if len(text) > MAX_OUTPUT:
            text = f"{text[: MAX_OUTPUT // 2]}\n... ({len(text)} characters)\n{text[-MAX_OUTPUT // 2 :]}"
        return f"{text}(exit code {result.exit_code})" if result.exit_code else text

    async def close(self) -> None:
        await self.stack.aclose()
