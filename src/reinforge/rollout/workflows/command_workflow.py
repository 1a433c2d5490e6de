"""Agents that are programs: `workflow: {_type: command, command: [node, agent.js]}`.

The program gets its task, calls the model at OPENAI_BASE_URL (or ANTHROPIC_BASE_URL) with the SDK of its language, and
writes its answer. Each episode is one run of the program, in a process group of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from reinforge.errors import ConfigError, PolicyFailure, Problem, did_you_mean
from reinforge.files import read_regular_file
from reinforge.interfaces import Builder
from reinforge.limits import get_limits
from reinforge.registry import register_workflow
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.isolation.processes import describe_exit
from reinforge.rollout.workflows.container import CLIENT_VARIABLES, Container, ContainerConfig, find_container
from reinforge.rollout.workflows.outside_agent import (
    AgentAccess,
    AgentFailed,
    AgentWorkflowConfig,
    OutsideWorkflow,
    build_variables,
    decode_answer,
    describe_episode,
    format_task,
    open_access,
    refuse_windows,
)
from reinforge.rollout.workflows.program_runner import (
    MARK,
    ProgramError,
    ProgramGuard,
    ProgramLimits,
    ProgramResult,
    ProgramWatch,
    run_program,
)
from reinforge.safe_text import redact_secrets
from reinforge.types.evaluation import EvalInputItem

INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "VIRTUAL_ENV"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    }
)
"""Variables of the run's environment that a program gets, besides LC_*; none of them holds a secret."""
SET_BY_RUN = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", MARK)
SET_PREFIX = "REINFORGE_"
INPUT_PLACE, OUTPUT_PLACE = "{input}", "{output}"
INPUT_FILE, OUTPUT_FILE = "REINFORGE_INPUT_FILE", "REINFORGE_OUTPUT_FILE"
MAX_ARGUMENT = (128 << 10) - 1
"""Bytes of one argument on Linux, MAX_ARG_STRLEN."""
MAX_LINES, MAX_CHARS = 10, 2_000
"""How much of the end of a program's standard error a reason holds."""
SCRIPT_ENDINGS = (".py", ".js", ".mjs", ".cjs", ".ts", ".sh", ".rb")


class CommandWorkflowConfig(AgentWorkflowConfig, name="command"):
    """A program in any language that calls the model through OpenAI's or Anthropic's API."""

    command: list[str] = Field(
        min_length=1,
        description="The program and its arguments, as a list or as one string; no shell is involved. `{input}` stands "
        "for the task (`input: argument`) or its file, `{output}` for the file of the answer.",
    )
    input: Literal["stdin", "file", "argument"] = Field(
        default="stdin",
        description="How the program gets its task: a string unchanged, anything else as JSON. `file`: as a file, "
        "whose path is REINFORGE_INPUT_FILE; `argument`: as the last argument; end `command` with `--` if the program "
        "takes options and a task may begin with a dash.",
    )
    output: Literal["stdout", "last_line_json", "file"] = Field(
        default="stdout",
        description="Where the answer is: the whole standard output; its last line, as JSON; or the text of the file "
        "REINFORGE_OUTPUT_FILE.",
    )
    cwd: Path | None = Field(default=None, description="Working directory; null: the project's folder.")
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Additional environment variables. A program gets PATH, HOME and the like, but no secret of your "
        "environment unless you name it here: `TOKEN: ${TOKEN}`.",
    )
    policy_error_codes: list[int] = Field(
        default_factory=list,
        description="Exit codes that mean that the policy's answer is unusable: a failure of the "
        "policy, whose reward is finetuning.outcomes.policy_error.",
    )
    max_memory_mb: int | None = Field(
        default=None, ge=16, description="MiB of memory, of each process and of all together; null: no limit."
    )
    max_processes: int | None = Field(
        default=256, ge=1, description="Maximum number of its processes; with more, it is killed; null: no limit."
    )
    container: ContainerConfig | None = Field(
        default=None, description="Run it in a container; null: as a process of this machine."
    )

    @field_validator("command", mode="before", json_schema_input_type=list[str] | str)
    @classmethod
    def _split(cls, command: Any) -> Any:
        return shlex.split(command) if isinstance(command, str) else command

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: list[str]) -> list[str]:
        if not command[0] or any("\0" in part for part in command):
            raise ValueError("expected the name of a program and its arguments")
        return command

    @field_validator("env")
    @classmethod
    def _check_names(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if name in SET_BY_RUN or name.startswith(SET_PREFIX):
                raise ValueError(f"{name} is set by the run, so that the program's model calls reach it; remove it")
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"{name!r} cannot be the name of a variable, or its value has a NUL character")
        return env


@dataclass
class CommandAgent:
    config: CommandWorkflowConfig
    program: str
    cwd: Path
    container: Container | None
    accesses: AgentAccess
    watch: ProgramWatch
    guard: ProgramGuard

    async def __call__(self, item: EvalInputItem, llm: Any, context: EpisodeContext) -> Any:
        task = format_task(item.input_obj)
        async with self.accesses.open(context) as access, self.guard.open_folder() as folder:
            variables = {"TMPDIR": str(folder), **self.config.env}
            variables |= build_variables(describe_episode(item, context), access)
            variables |= {INPUT_FILE: str(folder / "input")} if self.config.input == "file" else {}
            variables |= {OUTPUT_FILE: str(folder / "output")} if self.config.output == "file" else {}
            if self.config.input == "file":
                (folder / "input").write_text(task, encoding="utf-8")
            try:
                result = await self._run(self._fill_in(task, folder), task, folder, variables)
            except ProgramError as error:
                raise AgentFailed(f"{self.accesses.name}: {error}") from None
            self._check_exit(result, access.api_key)
            return self._read_answer(result, folder, context)

    def _fill_in(self, task: str, folder: Path) -> list[str]:
        """Returns the command with the task, or the files, in place of their placeholders."""
        values = {OUTPUT_PLACE: str(folder / "output")} if self.config.output == "file" else {}
        if self.config.input != "stdin":
            values[INPUT_PLACE] = task if self.config.input == "argument" else str(folder / "input")
        places = re.compile(
            "|".join(map(re.escape, values)) or r"(?!)"
        )  # in one pass: a task may contain a placeholder
        filled = [self.program, *(places.sub(lambda match: values[match[0]], part) for part in self.config.command[1:])]
        if self.config.input == "argument" and not any(INPUT_PLACE in part for part in self.config.command[1:]):
            filled.append(task)
        return filled

    async def _run(
        self, command: Sequence[str], task: str, folder: Path, variables: Mapping[str, str]
    ) -> ProgramResult:
        limits = ProgramLimits(self.config.max_memory_mb, self.config.max_processes)
        stdin = task.encode() if self.config.input == "stdin" else b""
        env = {**inherit_variables(), **variables, **self.guard.environment()}
        if self.container is None:
            return await run_program(command, cwd=self.cwd, env=env, stdin=stdin, limits=limits, watch=self.watch)
        env |= {name: os.environ[name] for name in CLIENT_VARIABLES if name in os.environ}
        name = f"reinforge-{uuid.uuid4().hex}"
        inside = self.container.build_command(
            command, name=name, cwd=self.cwd, folder=folder, variables=variables, limits=limits
        )
        try:
            return await run_program(
                inside, cwd=self.cwd, env=env, stdin=stdin, limits=ProgramLimits(), watch=self.watch
            )
        finally:
            await asyncio.shield(self.container.kill(name, env))

    def _check_exit(self, result: ProgramResult, key: str) -> None:
        if result.exit_code == 0:
            return
        tail = extract_tail(result.stderr.decode("utf-8", "replace").replace(key, "***"))
        message = f"{self.accesses.name} {describe_exit(result.exit_code)}" + (f":\n{tail}" if tail else "")
        if result.exit_code in self.config.policy_error_codes:
            raise PolicyFailure(message, output=result.stdout.decode("utf-8", "replace") or None)
        raise AgentFailed(message)

    def _read_answer(self, result: ProgramResult, folder: Path, context: EpisodeContext) -> Any:
        text = result.stdout.decode("utf-8", "replace")
        if self.config.output == "stdout":
            return text.rstrip("\r\n")
        if self.config.output == "file":
            try:
                content = read_regular_file(folder / "output", get_limits().program_output_bytes)
                return content.decode("utf-8", "replace")
            except OSError as error:
                reason = "it wrote none" if isinstance(error, FileNotFoundError) else str(error)
                raise AgentFailed(f"{self.accesses.name}: no answer in the file {OUTPUT_FILE}: {reason}") from None
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            name = self.accesses.name
            raise AgentFailed(f"{name} wrote nothing to its standard output, whose last line is the answer")
        return decode_answer(lines[-1], f"the last line that {self.accesses.name} wrote", context)

    def example_problems(self, items: Sequence[EvalInputItem]) -> list[Problem]:
        """Returns the first example whose task cannot be an argument."""
        if self.config.input != "argument":
            return []
        for item in items:
            task = format_task(item.input_obj)
            reason = "contains a NUL character, which no argument can" if "\0" in task else ""
            if len(task.encode()) > MAX_ARGUMENT:
                reason = f"is longer than {MAX_ARGUMENT:,} bytes, too long for an argument"
            if reason:
                message = f"the task of the example {item.id} {reason}"
                return [Problem("workflow.input", message, "use `input: stdin` or `input: file`")]
        return []


def extract_tail(text: str) -> str:
    """Returns the last lines of a program's messages, without secrets."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return redact_secrets("\n".join(lines[-MAX_LINES:])[-MAX_CHARS:])


def inherit_variables() -> dict[str, str]:
    """Returns the variables of this process that every program gets."""
    kept = {name: value for name, value in os.environ.items() if name in INHERITED or name.startswith("LC_")}
    return {**kept, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


def find_program(command: Sequence[str], cwd: Path) -> str:
    name = command[0]
    path = str(cwd / Path(name).expanduser()) if "/" in name else shutil.which(name)
    if path is None:
        known = ["python3", "python", "node", "bash", "sh", "deno", "bun", "ruby", "go", "java", "npx", "uv"]
        hint = did_you_mean(name, [each for each in known if shutil.which(each)])
        fix = "install it, or write its path"
        if (cwd / name).is_file():
            fix = f"to run {name} of the folder {cwd}, write ./{name}"
        elif name.startswith("python"):
            fix = f"write the path of one; this run's own is {sys.executable}"
        raise ConfigError(Problem("command", f'there is no program "{name}" in PATH{hint}', fix))
    if not Path(path).is_file():
        raise ConfigError(Problem("command", f"there is no file {path}", "check the path; it starts from `cwd`"))
    if not os.access(path, os.X_OK):
        fix = f"chmod +x {path}, or write the interpreter first: [python3, {name}]"
        raise ConfigError(Problem("command", f"{path} is not executable", fix))
    script = command[1] if len(command) > 1 else ""
    if script.endswith(SCRIPT_ENDINGS) and "{" not in script and not (cwd / script).exists():
        folder = (cwd / script).parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        message = f"there is no file {cwd / script}{did_you_mean(Path(script).name, names)}"
        raise ConfigError(Problem("command", message, "check the path; it starts from `cwd`"))
    return path


def find_folder(cwd: Path | None, project_root: Path) -> Path:
    folder = (project_root / (Path() if cwd is None else cwd.expanduser())).resolve()
    if not folder.is_dir():
        raise ConfigError(Problem("cwd", f"there is no folder {folder}", "relative paths start from the project"))
    return folder


@register_workflow(config_type=CommandWorkflowConfig)
async def command_workflow(config: CommandWorkflowConfig, builder: Builder) -> AsyncIterator[OutsideWorkflow]:
    refuse_windows("a command")
    cwd = find_folder(config.cwd, builder.project_root)
    container = find_container(config.container, cwd) if config.container is not None else None
    program = config.command[0] if container is not None else find_program(config.command, cwd)
    name = shlex.join(config.command)
    guard = ProgramGuard()
    async with open_access(builder, name) as accesses, ProgramWatch().open() as watch, AsyncExitStack() as stack:
        if accesses.gateway is not None:
            await stack.enter_async_context(guard.open())
        agent = CommandAgent(config, program, cwd, container, accesses, watch, guard)
        yield OutsideWorkflow(agent, config.llm, True, config.share_environment_seed, name=name)
