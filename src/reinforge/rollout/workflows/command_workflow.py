"""Agents that are programs: `workflow: {_type: command, command: [node, agent.js]}`.

The program gets its task, calls the model at OPENAI_BASE_URL (or that of another API) with the SDK of its language, and
writes its answer. Each episode is one run of the program, in a process group of its own; with a `workspace` it works in
a copy of a folder, and a command may score what it did there.
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
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from reinforge.config.schema import CallMatch, LLMConfig
from reinforge.errors import ConfigError, PolicyFailure, Problem, did_you_mean
from reinforge.files import read_regular_file
from reinforge.interfaces import Builder
from reinforge.limits import get_limits
from reinforge.registry import register_workflow
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.isolation.processes import describe_exit
from reinforge.rollout.isolation.threads import run_in_daemon_thread
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
from reinforge.rollout.workflows.workspace import (
    REPORT,
    VERIFIER,
    CommandLine,
    Place,
    RewardCommandConfig,
    Seconds,
    StepConfig,
    WorkspaceConfig,
    WorkspaceError,
    Workspaces,
    copy_over,
    fill_path,
    fill_row,
    read_reward,
    read_seconds,
)
from reinforge.safe_text import redact_secrets
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.steps import REPORTED_REWARD

INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "VIRTUAL_ENV"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    }
)
"""Variables of the run's environment that a program gets, besides LC_*; none of them holds a secret."""
SET_BY_RUN = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
    *("GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY", MARK),
)
SET_PREFIX = "REINFORGE_"
INPUT_PLACE, OUTPUT_PLACE = "{input}", "{output}"
INPUT_FILE, OUTPUT_FILE = "REINFORGE_INPUT_FILE", "REINFORGE_OUTPUT_FILE"
MAX_ARGUMENT = (128 << 10) - 1  # bytes of one argument on Linux, MAX_ARG_STRLEN
MAX_LINES, MAX_CHARS = 10, 2_000  # how much of the end of a program's standard error a reason holds
PLAY = (
    "Do this with the tools of the MCP server `environment`, whose `observe` returns what it says, until a result says "
    "that the episode is over."
)
"""What a coding agent is told after its task, if the run has an environment."""
SCRIPT_ENDINGS = (".py", ".js", ".mjs", ".cjs", ".ts", ".sh", ".rb")


class CommandWorkflowConfig(AgentWorkflowConfig, name="command"):
    """A program in any language that calls the model through OpenAI's, Anthropic's or Gemini's API."""

    preset: str | None = Field(
        default=None,
        description="A coding agent whose settings are the defaults of the other keys: aider, claude_code, codex, "
        "gemini_cli, mini_swe_agent, opencode or qwen_code.",
    )
    command: CommandLine = Field(
        min_length=1,
        description="The program and its arguments, as a list or as one string; no shell is involved. `{input}` stands "
        "for the task (`input: argument`) or its file, `{output}` for the file of the answer, `{project}` for the "
        "project's folder, `{model}` and `{base_url}` for the model's name and URL.",
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
    cwd: Path | None = Field(
        default=None, description="Working directory; null: the workspace, or without one the project's folder."
    )
    workspace: WorkspaceConfig | None = Field(default=None, description="A folder of its own for each episode.")
    reward: RewardCommandConfig | None = Field(default=None, description="What scores the workspace afterwards.")
    timeout_s: Seconds | None = Field(
        default=None,
        description="Its time limit in seconds, within the episode's; then it is killed, and with a `reward` the "
        "workspace is scored as it is. `{NAME}`: the column NAME of the row; null: the episode's limit alone.",
    )
    home_files: dict[str, str] = Field(
        default_factory=dict,
        description="Files of the episode's HOME, which only a `workspace` has, by their path; `{model}`, "
        "`{base_url}`, `{api_key}` and `{environment_url}` are filled in.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Additional environment variables. A program gets PATH, HOME and the like, but no secret of your "
        "environment unless you name it here: `TOKEN: ${TOKEN}`. `{project}`, `{home}` (its HOME), `{model}` and "
        "`{base_url}` are filled in.",
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

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("preset"), str):
            return data
        from reinforge.rollout.workflows.presets import find_preset

        preset = find_preset(data["preset"])
        del preset["install"]
        preset.pop("environment", None)
        merged = {name: {**preset.get(name, {}), **(data.get(name) or {})} for name in ("env", "home_files")}
        return {**preset, **{name: value for name, value in data.items() if value is not None}, **merged}

    def add_llms(self, llms: dict[str, LLMConfig]) -> list[str]:
        """Adds the entry that answers what the preset's program asks beside its work, which is not trained."""
        from reinforge.rollout.http.routes import AUXILIARY_CALLS

        policies = [name for name, llm in llms.items() if llm.static_type == "policy" and llm.train]
        main = self.llm or (policies[0] if len(policies) == 1 else None)
        is_matched = any(match.program == self.preset for llm in llms.values() for match in llm.match)
        name = f"{self.preset}_auxiliary"
        if self.preset not in AUXILIARY_CALLS or is_matched or name in llms or main not in policies:
            return []
        self.llm = main  # with two entries, the program could ask for no other name
        match = [CallMatch.model_validate({"program": self.preset})]
        llms[name] = llms[main].model_copy(update={"match": match, "train": False})
        return [name]

    @model_validator(mode="after")
    def _check_workspace(self) -> CommandWorkflowConfig:
        if self.workspace is None and (self.reward is not None or self.home_files):
            raise ValueError("`reward` and `home_files` need a workspace; `workspace: {}` is an empty one")
        places = [*self.home_files, *([] if self.workspace is None or self.cwd is None else [str(self.cwd)])]
        for place in places:
            if Path(place).is_absolute() or ".." in Path(place).parts:
                raise ValueError(f"{place} must be a path inside the folder of the episode")
        return self

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
    project: Path
    container: Container | None
    accesses: AgentAccess
    watch: ProgramWatch
    guard: ProgramGuard
    workspaces: Workspaces | None

    async def __call__(self, item: EvalInputItem, llm: Any, context: EpisodeContext) -> Any:
        if self.config.reward is not None:
            context.answer_environment = None  # the workspace has the reward
        elif context.answer_environment is not None:  # now, since MCP clients may wait only for some seconds
            await context.environment.reset()  # type: ignore[attr-defined]
        try:
            async with self.open_place(item) as place:
                answer = await self._run_agent(item, context, place)
                if self.workspaces is not None:
                    context.mark({"workspace_diff": await run_in_daemon_thread(place.describe_changes, "workspace")})
                if self.config.reward is not None:
                    await self._report(self.config.reward, place, context)
                return answer
        except (ProgramError, WorkspaceError, TimeoutError) as error:
            raise AgentFailed(f"{self.accesses.name}: {error}") from None

    @asynccontextmanager
    async def open_place(self, item: EvalInputItem) -> AsyncIterator[Place]:
        """Yields the place of an episode as its program finds it."""
        if self.workspaces is None:
            async with self.guard.open_folder() as folder:
                yield Place(folder, folder, self.cwd)
            return
        async with self.workspaces.open(find_row(item)) as place:
            if self.container is not None and self.workspaces.config.from_image:
                image = replace(place, mounts=tuple(mount for mount in place.mounts if mount[0] != place.files))
                copy = StepConfig(command=["cp", "-a", f"{place.cwd}/.", f"{place.seen}/workspace"])
                await self._prepare("from_image", copy, image)
            if (setup := self.workspaces.config.setup) is not None:
                await self._prepare("setup", setup, place)
            await run_in_daemon_thread(place.stamp, "workspace")
            yield place

    async def _prepare(self, name: str, step: StepConfig, place: Place) -> None:
        result = await self._run_step(step, place)
        if result.exit_code:
            tail = extract_tail(result.stderr.decode("utf-8", "replace"))
            raise WorkspaceError(f"workspace.{name} {describe_exit(result.exit_code)}:\n{tail}")

    async def _run_agent(self, item: EvalInputItem, context: EpisodeContext, place: Place) -> Any:
        task, folder, seen = format_task(item.input_obj), place.folder, place.seen
        async with self.accesses.open(context) as access:
            episode = {"{model}": context.endpoint.default, "{base_url}": access.base_url}
            episode |= {"{api_key}": access.api_key, "{environment_url}": access.environment_url or ""}
            values = {**episode, "{project}": str(self.project), "{home}": str(place.seen / "home")}
            if self.config.preset is not None and access.environment_url is not None:
                task += f"\n\n{PLAY}"
            variables = {"TMPDIR": str(folder)} if self.workspaces is None else place.environment()
            variables |= {name: fill_in(value, values) for name, value in self.config.env.items()}
            variables |= build_variables(describe_episode(item, context), access)
            variables |= {INPUT_FILE: str(seen / "input")} if self.config.input == "file" else {}
            variables |= {OUTPUT_FILE: str(seen / "output")} if self.config.output == "file" else {}
            if self.config.input == "file":
                (folder / "input").write_text(task, encoding="utf-8")
            for name, text in self.config.home_files.items():
                (folder / "home" / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / "home" / name).write_text(fill_in(text, values), encoding="utf-8")
            stdin = task.encode() if self.config.input == "stdin" else b""
            if self.workspaces is not None and self.config.cwd is not None:
                place = replace(place, cwd=place.cwd / self.config.cwd)
            command, limit_s = self._fill_in(task, seen, values), read_seconds(self.config.timeout_s, find_row(item))
            try:
                async with asyncio.timeout(limit_s):
                    result = await self.run(command, place, variables, stdin)
            except TimeoutError:
                if self.config.reward is None:
                    raise TimeoutError(f"took more than {limit_s:g} s") from None
                return ""
            self._check_exit(result, access.api_key)
            return self._read_answer(result, folder, context)

    async def _report(self, config: RewardCommandConfig, place: Place, context: EpisodeContext) -> None:
        """Reports the reward of the workspace, or why it is unknown."""
        try:
            report = await self.score(config, place)
            context.reward(report.pop("reward"), **report)
        except (ProgramError, WorkspaceError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError) and config.timeout_reward is not None:
                context.reward(config.timeout_reward)
            else:
                reason = redact_secrets(f"the command of workflow.reward: {error}")
                context.mark({REPORTED_REWARD: {"error": reason}})

    async def score(self, config: RewardCommandConfig, place: Place) -> dict[str, float]:
        """Returns the reward of the workspace, and counts; raises an error where it is unknown."""
        if config.source is not None:
            place = replace(place, mounts=tuple(mount for mount in place.mounts if mount[0].name != "hidden"))
        folders = {seen: place.folder / f"reward-{number}" for number, seen in enumerate(config.mounts)}
        targets = [(config.source, place.files), *((config.mounts[seen], folder) for seen, folder in folders.items())]

        def prepare() -> None:
            place.renew()
            place.restore(config.restore)
            for folder in folders.values():
                folder.mkdir(mode=0o700)
            for template, target in targets:
                if template is not None:
                    source = fill_path(template, place.values, self.project)
                    copy_over(source, target, source)

        await run_in_daemon_thread(prepare, "workspace")
        place = replace(place, mounts=(*place.mounts, *((folder, Path(seen)) for seen, folder in folders.items())))
        result = await self._run_step(config, place)
        return read_reward(config.parse, result, folders.get(VERIFIER, place.folder / REPORT))

    async def _run_step(self, step: StepConfig, place: Place) -> ProgramResult:
        """Runs a command in the workspace that gets nothing from the agent but its files."""
        command = [fill_row(part, place.values) for part in step.command]
        limit_s = read_seconds(step.timeout_s, place.values)
        try:
            async with asyncio.timeout(limit_s):
                return await self.run(command, place, place.environment())
        except TimeoutError:
            raise TimeoutError(f"{command[0]} took more than {limit_s:g} s") from None

    def _fill_in(self, task: str, folder: Path, values: Mapping[str, str]) -> list[str]:
        """Returns the command with the task, or the files, in place of their placeholders."""
        places = {**values, **({OUTPUT_PLACE: str(folder / "output")} if self.config.output == "file" else {})}
        if self.config.input != "stdin":
            places[INPUT_PLACE] = task if self.config.input == "argument" else str(folder / "input")
        filled = [self.program, *(fill_in(part, places) for part in self.config.command[1:])]
        if self.config.input == "argument" and not any(INPUT_PLACE in part for part in self.config.command[1:]):
            filled.append(task)
        return filled

    async def run(
        self, command: Sequence[str], place: Place, variables: Mapping[str, str], stdin: bytes = b""
    ) -> ProgramResult:
        limits = ProgramLimits(self.config.max_memory_mb, self.config.max_processes)
        env = {**inherit_variables(), **variables, **self.guard.environment()}
        run = partial(run_program, stdin=stdin, watch=self.watch)
        if self.container is None:
            return await run(command, cwd=place.cwd, env=env, limits=limits, mounts=place.mounts)
        env |= {name: os.environ[name] for name in (*CLIENT_VARIABLES, "HOME") if name in os.environ}
        name = f"reinforge-{uuid.uuid4().hex}"
        inside = self.container.build_command(command, place, name=name, variables=variables, limits=limits)
        try:
            return await run(inside, cwd=self.cwd, env=env, limits=ProgramLimits())
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
        """Returns the first example without what the workspace needs, or whose task cannot be an argument."""
        for item in items if self.workspaces is not None else ():
            try:
                self._check_row(find_row(item))
            except WorkspaceError as error:
                return [Problem("workflow", f"the example {item.id}: {error}")]
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

    def _check_row(self, row: Mapping[str, Any]) -> None:
        assert self.workspaces is not None  # else nothing is filled in
        reward = self.config.reward
        steps = [step for step in (self.workspaces.config.setup, reward) if step is not None]
        for source in (self.workspaces.config.source, *(() if reward is None else reward.list_sources())):
            if source is not None:
                fill_path(source, row, self.project)
        for limit in (self.config.timeout_s, *(step.timeout_s for step in steps)):
            read_seconds(limit, row)
        images = [] if self.container is None else [self.container.image]
        for text in [*images, *(part for step in steps for part in step.command)]:
            fill_row(text, self.workspaces.add_values(row, Path()))


def find_row(item: EvalInputItem) -> Mapping[str, Any]:
    return item.full_dataset_entry if isinstance(item.full_dataset_entry, Mapping) else {}


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """Returns a text with its placeholders filled in, in one pass: a task may contain a placeholder."""
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], text)


def extract_tail(text: str) -> str:
    """Returns the last lines of a program's messages, without secrets."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return redact_secrets("\n".join(lines[-MAX_LINES:])[-MAX_CHARS:])


def inherit_variables() -> dict[str, str]:
    """Returns the variables of this process that every program gets."""
    kept = {name: value for name, value in os.environ.items() if name in INHERITED or name.startswith("LC_")}
    return {**kept, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


def find_program(command: Sequence[str], cwd: Path, preset: str | None = None) -> str:
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
        elif preset is not None:
            from reinforge.rollout.workflows.presets import find_preset

            fix = str(find_preset(preset)["install"])
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
    name = config.preset or shlex.join(config.command)
    if config.preset is not None and config.reward is None and builder.config.environment is not None:
        from reinforge.rollout.workflows.presets import add_environment

        config = config.model_copy(update=add_environment(config.preset, vars(config)))
    async with (
        open_access(builder, name) as accesses,
        open_agent(config, accesses, builder.project_root, is_run=accesses.gateway is not None) as agent,
    ):
        yield OutsideWorkflow(agent, config.llm, True, config.share_environment_seed, name=name)


@asynccontextmanager
async def open_agent(
    config: CommandWorkflowConfig, accesses: AgentAccess, root: Path, *, is_run: bool
) -> AsyncIterator[CommandAgent]:
    """Yields the agent of a run, or one that is only checked."""
    guard, workspaces = ProgramGuard(), None
    if config.workspace is not None:
        sources = [] if config.reward is None or config.container is not None else config.reward.list_sources()
        source = next(filter(None, sources), "")
        fixed = [*takewhile(lambda part: "{" not in part, Path(source).parts)]
        workspaces = Workspaces(config.workspace, root, guard, root.joinpath(*fixed) if fixed else None)
    cwd = find_folder(config.cwd if workspaces is None else None, root)
    container = find_container(config.container, cwd) if config.container is not None else None
    is_inside = container is not None or (workspaces is not None and "/" in config.command[0])
    written = config.command if workspaces is None else config.command[:1]
    program = written[0] if is_inside else find_program(written, cwd, config.preset)
    async with ProgramWatch().open() as watch, AsyncExitStack() as stack:
        if is_run:
            await stack.enter_async_context(guard.open())
            if workspaces is not None and container is None:
                workspaces.check_mounts([] if config.reward is None else [*config.reward.mounts])
        yield CommandAgent(config, program, cwd, root, container, accesses, watch, guard, workspaces)
