"""A folder of its own for each episode of a program, at the same path in every one, and a command that scores it.

    workspace: {copy: "tasks/{folder}"}          tasks/a in the row {"folder": "a"} is copied
    reward: {command: [pytest, -q], copy: "tests/{folder}"}

    FOLDER/workspace  home  tmp                  in the folder of the episode, on this machine
    /tmp/reinforge-1000/workspace  home  tmp     what its programs see: paths stand in the prompts of coding agents, and
                                                 siblings share their prompt

The reward's command starts when everything that the program has started is dead; its files are copied then.
"""

from __future__ import annotations

import contextlib
import difflib
import heapq
import logging
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any, Literal
from xml.etree import ElementTree

from pydantic import Field, field_validator, model_validator

from reinforge.config.schema import Block
from reinforge.errors import ConfigError, Problem
from reinforge.files import read_regular_file
from reinforge.limits import get_limits
from reinforge.rollout.isolation.processes import describe_exit
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.workflows.program import ProgramGuard, ProgramResult, can_mount, is_folder, remove
from reinforge.rollout.workflows.templates import fill_text, list_placeholders

logger = logging.getLogger(__name__)

UNCHANGED = (".git", "__pycache__", ".pytest_cache", "node_modules")
"""Folders that a diff leaves out."""
MAX_DIFF_CHARS, MAX_DIFF_FILES = 20_000, 200
MAX_FILE_BYTES, MAX_FILE_LINES = 100_000, 2_000
"""A larger file is only named in a diff."""
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
CANNOT_RUN = (126, 127)
"""Exit codes of a shell, and of our supervisor, for a command that cannot be started."""


class WorkspaceError(Exception):
    """A workspace cannot be made, or its reward is unknown; the message says why."""


class StepTimeout(WorkspaceError):
    """A command took longer than it may."""


class StepConfig(Block):
    """A command in the workspace."""

    command: list[str] = Field(
        min_length=1,
        description="The program and its arguments, as a list or as one string; no shell is involved. `{project}` "
        "stands for the project's folder, `{NAME}` for the column NAME of the row.",
    )
    timeout_s: float = Field(
        default=300.0, gt=0, description="Its time limit in seconds; it also counts as time of the episode."
    )

    @field_validator("command", mode="before", json_schema_input_type=list[str] | str)
    @classmethod
    def _split(cls, command: Any) -> Any:
        return shlex.split(command) if isinstance(command, str) else command


class WorkspaceConfig(Block):
    """The folder in which the program works; HOME and TMPDIR beside it belong to the episode, too."""

    source: str | None = Field(
        default=None,
        alias="copy",
        description="The folder that is copied for each episode; `{NAME}` stands for the column NAME of the row. null: "
        "the workspace is empty.",
    )
    path: Path | None = Field(
        default=None,
        description="Where the program sees it, in every episode; null: `workspace` in the folder reinforge-UID of the "
        "system's temporary folder.",
    )
    setup: StepConfig | None = Field(default=None, description="What runs in it before the program.")

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: Path | None) -> Path | None:
        if path is not None and (not path.is_absolute() or ".." in path.parts or len(path.parts) < 2):
            raise ValueError("expected an absolute path, such as /testbed")
        return path


class RewardCommandConfig(StepConfig):
    """What scores the workspace after the program; `eval.evaluators` needs an entry `{_type: reported_reward}`."""

    source: str | None = Field(
        default=None,
        alias="copy",
        description="A folder whose files are copied over the workspace before the command runs, such as tests that "
        "the agent has not seen; `{NAME}` stands for the column NAME of the row.",
    )
    parse: Literal["exit_code", "junit", "last_number"] = Field(
        default="exit_code",
        description="What the reward is: 1.0 for the exit code 0 and else 0.0; the share of the tests that passed, of "
        "the file `{report}`, for which `command` has --junitxml={report}; or the last number of the standard output.",
    )
    restore: list[str] = Field(
        default=["conftest.py", "pytest.ini", ".pytest.ini", "sitecustomize.py", "usercustomize.py", "__pycache__"],
        description="Names, or patterns of paths such as tests/*, of files and folders that the agent must not "
        "prepare: in its workspace they become what they are in `workspace.copy`, or are removed.",
    )
    timeout_reward: float | None = Field(
        default=None, description="The reward if the command exceeds `timeout_s`; null: the reward is missing."
    )

    @model_validator(mode="after")
    def _check_report(self) -> RewardCommandConfig:
        if self.parse == "junit" and not any("{report}" in part for part in self.command):
            raise ValueError("`parse: junit` needs {report} in the command, such as --junitxml={report}")
        return self


def fill_path(template: str, row: Mapping[str, Any], project: Path) -> Path:
    """Returns the folder that a template names in a row.

    Raises:
        WorkspaceError: The row has no such column, or a path in it leads out of the project; there is no such folder.
    """
    for name in list_placeholders(template):
        value = row.get(name)
        if not isinstance(value, str | int):
            raise WorkspaceError(f"{template}: the row has no column {name} with a string")
        if ".." in PurePath(str(value)).parts or PurePath(str(value)).is_absolute():
            raise WorkspaceError(f"{template}: {name} is {str(value)!r}, which leads out of the folder")
    path = project / fill_text(template, row)
    if not path.is_dir():
        raise WorkspaceError(f"{template}: there is no folder {path}")
    return path


@dataclass(frozen=True, slots=True)
class Place:
    """The files of one episode.

    Attributes:
        folder: Where they are on this machine.
        seen: Where its programs see the folder.
        workspace: Where they see the workspace.
    """

    folder: Path
    seen: Path
    workspace: Path
    mounts: tuple[tuple[Path, Path], ...] = ()
    source: Path | None = None
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def files(self) -> Path:
        """The workspace on this machine."""
        return self.folder / "workspace"

    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.seen / "home"), "TMPDIR": str(self.seen / "tmp")}

    def renew(self) -> None:
        """Replaces HOME and TMPDIR, in which a program may have prepared what the next one reads."""
        for name in ("home", "tmp"):
            remove(self.folder / name)
            (self.folder / name).mkdir(mode=0o700)

    def restore(self, patterns: Sequence[str]) -> None:
        """Makes the files of these names what they were in the folder that was copied."""
        make_folder(self.files)
        for root, path in list(find_files(self.files, patterns)):
            remove(root / path)
        if self.source is not None:
            for root, path in find_files(self.source, patterns):
                for parent in reversed(PurePath(path).parents):
                    make_folder(self.files / parent)
                copy_entry(root / path, self.files / path, root)

    def stamp(self) -> None:
        """Notes what is in the workspace before the program runs."""
        self.stamps.update(list_stamps(self.files))

    def describe_changes(self) -> str:
        """Returns the diff of what the program has changed, as far as it is short."""
        after, parts, length = list_stamps(self.files), list[str](), 0
        changed = sorted(path for path in after.keys() | self.stamps.keys() if after.get(path) != self.stamps.get(path))
        for path in changed[:MAX_DIFF_FILES]:
            parts.append(self._diff(path, path in after)[: MAX_DIFF_CHARS - length])
            length += len(parts[-1])
            if length >= MAX_DIFF_CHARS:
                return "".join(parts) + f"\n... ({len(changed)} files changed)\n"
        more = len(changed) - MAX_DIFF_FILES
        return "".join(parts) + (f"... ({more} more files changed)\n" if more > 0 else "")

    def _diff(self, path: str, exists: bool) -> str:
        before = [] if self.source is None else read_lines(self.source / path)
        after = read_lines(self.files / path) if exists else []
        if before is None or after is None:
            return f"{path}: changed\n"
        lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


@dataclass
class Workspaces:
    """Makes the workspaces of a run's episodes.

    Attributes:
        shared: What every episode sees in place of its own folder; None: this machine does not allow that, so an
            episode gets one of a few paths.
    """

    config: WorkspaceConfig
    project: Path
    guard: ProgramGuard
    shared: Path | None = None
    _free: list[int] = field(default_factory=list)
    _num_slots: int = 0

    def find_shared(self, *, is_mounted: bool) -> None:
        """Decides where programs see their workspace.

        Args:
            is_mounted: A container mounts it there.

        Raises:
            ConfigError: `path` cannot be used.
        """
        path, shared = self.config.path, Path(tempfile.gettempdir(), f"reinforge-{os.getuid()}")
        with contextlib.suppress(FileExistsError):
            shared.mkdir(mode=0o700)
        found = shared.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            message = f"{shared} is not a folder of this user, and workspaces are mounted there"
            raise ConfigError(Problem("workspace", message, "remove it, or set TMPDIR"))
        if path is not None and not is_mounted:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(Problem("workspace.path", f"{path}: {error}", "create the folder")) from None
        if is_mounted or can_mount(shared):
            self.shared = shared
        elif path is not None:
            message = f"this machine lets no program see its workspace at {path}: mounts are forbidden"
            raise ConfigError(Problem("workspace.path", message, "leave it out, or run as a user who may mount"))
        else:
            logger.warning(
                "this machine allows no mounts, so workspaces have different paths, and so have the prompts of agents "
                "that contain them; siblings then share less of their prompts"
            )

    @contextlib.asynccontextmanager
    async def open(self, row: Mapping[str, Any]) -> AsyncIterator[Place]:
        """Yields the place of one episode, and removes it.

        Raises:
            WorkspaceError: A folder cannot be copied.
        """
        source = None if self.config.source is None else fill_path(self.config.source, row, self.project)
        slot = -1
        if self.shared is None:
            slot = heapq.heappop(self._free) if self._free else self._num_slots
            self._num_slots = max(self._num_slots, slot + 1)
        try:
            async with self.guard.open_folder("" if slot < 0 else f"slot-{slot}") as folder:
                yield await run_in_daemon_thread(lambda: self._build(folder, source), "workspace")
        finally:
            if slot >= 0:
                heapq.heappush(self._free, slot)

    def _build(self, folder: Path, source: Path | None) -> Place:
        seen = self.shared or folder
        mounts = [] if self.shared is None else [(folder, self.shared)]
        if self.config.path is not None:
            mounts.append((folder / "workspace", self.config.path))
        place = Place(folder, seen, self.config.path or seen / "workspace", tuple(mounts), source)
        place.renew()
        make_folder(place.files)
        if source is not None:
            copy_over(source, place.files)
        return place


def make_folder(path: Path) -> None:
    """Makes sure that there is a folder that can be written to, not a file or a link to another folder."""
    if is_folder(path):
        path.chmod(path.lstat().st_mode | 0o700)
        return
    remove(path)
    path.mkdir(mode=0o700)


def copy_over(source: Path, target: Path, root: Path | None = None) -> None:
    """Copies the files of a folder into another one, where they replace whatever has their names.

    Raises:
        WorkspaceError: A link leads out of the folder, or it has a pipe or a device.
    """
    for entry in sorted(source.iterdir()):
        if is_folder(entry):
            make_folder(target / entry.name)
            copy_over(entry, target / entry.name, root or source)
        else:
            copy_entry(entry, target / entry.name, root or source)


def copy_entry(entry: Path, target: Path, root: Path) -> None:
    mode = entry.lstat().st_mode
    remove(target)
    if stat.S_ISDIR(mode):
        make_folder(target)
        copy_over(entry, target, root)
    elif stat.S_ISLNK(mode):
        named = os.readlink(entry)
        if os.path.isabs(named) or not (entry.parent / named).resolve().is_relative_to(root.resolve()):
            raise WorkspaceError(f"{entry} is a link that leads out of its folder; copy what it names")
        target.symlink_to(named)
    elif stat.S_ISREG(mode):
        shutil.copyfile(entry, target)
        target.chmod(stat.S_IMODE(mode) | 0o600)
    else:
        raise WorkspaceError(f"{entry} is neither a file nor a folder nor a link, so it cannot be copied")


def find_files(root: Path, patterns: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yields the outermost files and folders whose name or path matches, with the path below `root`."""
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = os.path.relpath(os.path.join(folder, name), root)
            if any(fnmatch(name, pattern) or fnmatch(path, pattern) for pattern in patterns):
                if name in names:
                    names.remove(name)
                yield root, path


def list_stamps(root: Path) -> dict[str, tuple[int, int]]:
    """Returns size and time of every file of a workspace that may be in a diff."""
    found = {}
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in UNCHANGED]
        for name in files:
            status = os.lstat(os.path.join(folder, name))
            found[os.path.relpath(os.path.join(folder, name), root)] = (status.st_size, status.st_mtime_ns)
    return found


def read_lines(path: Path) -> list[str] | None:
    """Returns the lines of a file; none where there is no file; None: it is too long, not text, or not a file."""
    try:
        lines = read_regular_file(path, MAX_FILE_BYTES).decode().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError):
        return None
    return lines if len(lines) <= MAX_FILE_LINES else None


def read_reward(parse: str, result: ProgramResult, report: Path) -> dict[str, float]:
    """Returns the reward of a command that has ended, as `reward`, and what else it counted.

    Raises:
        WorkspaceError: Nobody knows the reward.
    """
    text = result.stdout.decode("utf-8", "replace")
    tail = (result.stderr.decode("utf-8", "replace") or text).strip()[-500:]
    if result.exit_code < 0 or result.exit_code in CANNOT_RUN:
        raise WorkspaceError(f"{describe_exit(result.exit_code)}: {tail}")
    if parse == "exit_code":
        return {"reward": float(result.exit_code == 0)}
    if parse == "last_number":
        numbers = NUMBER.findall(text)
        if result.exit_code or not numbers:
            raise WorkspaceError(f"{describe_exit(result.exit_code)} and wrote no number: {tail}")
        return {"reward": float(numbers[-1])}
    try:
        cases = list(
            ElementTree.fromstring(read_regular_file(report, get_limits().program_output_bytes)).iter("testcase")
        )
    except (OSError, ElementTree.ParseError) as error:
        raise WorkspaceError(
            f"{describe_exit(result.exit_code)} and its report cannot be read ({error}): {tail}"
        ) from None
    kinds = [{child.tag for child in case} for case in cases]
    passed = [not kind & {"failure", "error"} for kind in kinds if "skipped" not in kind]
    if not passed:
        raise WorkspaceError(f"{describe_exit(result.exit_code)} and ran no test: {tail}")
    return {"reward": sum(passed) / len(passed), "passed": float(sum(passed)), "tests": float(len(passed))}
