"""A folder of its own for each episode of a program, at the same path in every one, and a command that scores it.

    FOLDER/workspace  home  tmp                  in the episode's own folder, on this machine
    /tmp/reinforge-1000/workspace  home  tmp     what its programs see: paths stand in the prompts of coding agents, and
                                                 siblings share their prompt

The reward's command starts when everything that the program has started is dead; its files are copied then.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal
from xml.etree import ElementTree

from pydantic import BeforeValidator, Field, model_validator

from reinforge.bounded import load_json
from reinforge.config.schema import Block
from reinforge.errors import ConfigError, Problem
from reinforge.files import read_regular_file
from reinforge.limits import get_limits
from reinforge.rollout.isolation.processes import describe_exit
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.workflows.program_runner import ProgramGuard, ProgramResult, can_mount, is_folder, remove
from reinforge.rollout.workflows.templates import fill_text, list_placeholders

logger = logging.getLogger(__name__)

UNCHANGED = (".git", "__pycache__", ".pytest_cache", "node_modules")  # folders that a diff leaves out
REPORT, VERIFIER = "tmp/report.xml", "/logs/verifier"
MAX_DIFF_CHARS, MAX_DIFF_FILES = 20_000, 50
MAX_FILE_BYTES, MAX_FILE_LINES = 100_000, 2_000  # a larger file is only named in a diff
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
CANNOT_RUN = (126, 127)  # exit codes of a shell, and of our supervisor, for a command that cannot be started


class WorkspaceError(Exception):
    """A workspace cannot be made, or its reward is unknown; the message says why."""


def split_command(command: Any) -> Any:
    return shlex.split(command) if isinstance(command, str) else command


CommandLine = Annotated[list[str], BeforeValidator(split_command, json_schema_input_type=list[str] | str)]


Seconds = Annotated[float, Field(gt=0)] | Annotated[str, Field(pattern=r"^\{\w+\}$")]
"""A time limit, or `{NAME}` for the column NAME of the row."""


class StepConfig(Block):
    """A command in the workspace."""

    command: CommandLine = Field(
        min_length=1,
        description="The program and its arguments, as a list or as one string; no shell is involved. `{project}` "
        "stands for the project's folder, `{NAME}` for the column NAME of the row.",
    )
    timeout_s: Seconds = Field(
        default=300.0,
        description="Its time limit in seconds, within the episode's; `{NAME}`: the column NAME of the row.",
    )


class WorkspaceConfig(Block):
    """The folder in which the program works; HOME and TMPDIR beside it belong to the episode, too."""

    source: str | None = Field(
        default=None,
        alias="copy",
        description="The folder that is copied for each episode; `{NAME}` stands for the column NAME of the row. null: "
        "the workspace is empty.",
    )
    path: str | None = Field(
        default=None,
        pattern="^/[^/]",
        description="Where the program sees it, in every episode; null: `workspace` in the folder reinforge-UID of the "
        "system's temporary folder.",
    )
    from_image: bool = Field(
        default=False, description="Begin with what the image of the `container` has at `path`, in place of `copy`."
    )
    setup: StepConfig | None = Field(default=None, description="What runs in it before the program.")


class RewardCommandConfig(StepConfig):
    """What scores the workspace after the program; `eval.evaluators` needs an entry `{_type: reported_reward}`."""

    source: str | None = Field(
        default=None,
        alias="copy",
        description="A folder whose files are copied over the workspace before the command runs, such as tests that "
        "the agent has not seen; `{NAME}` stands for the column NAME of the row.",
    )
    mounts: dict[Annotated[str, Field(pattern="^/[^/]")], str | None] = Field(
        default={},
        description="Places that only the command sees, such as /tests, with the folder that is copied there, in which "
        "`{NAME}` stands for the column NAME of the row; null: an empty folder.",
    )
    parse: Literal["exit_code", "junit", "last_number", "reward_file"] = Field(
        default="exit_code",
        description="What the reward is: 1.0 for the exit code 0 and else 0.0; the share of the tests that passed, of "
        "the file `{report}`, for which `command` has --junitxml={report}; the last number of the standard output; or "
        "what the file reward.json or reward.txt of /logs/verifier says, a place of `mounts`, and without one the exit "
        "code.",
    )
    restore: list[str] = Field(
        default=["conftest.py", "pytest.ini", ".pytest.ini", "sitecustomize.py", "usercustomize.py", "__pycache__"],
        description="Names, or patterns of paths such as tests/*, of files and folders that the agent must not "
        "prepare: in its workspace they become what they are in `workspace.copy`, or are removed.",
    )
    timeout_reward: float | None = Field(default=None, description="The reward after `timeout_s`; null: it is missing.")

    @model_validator(mode="after")
    def _check_report(self) -> RewardCommandConfig:
        if self.parse == "junit" and not any("{report}" in part for part in self.command):
            raise ValueError("`parse: junit` needs {report} in the command, such as --junitxml={report}")
        if (self.parse == "reward_file") != (VERIFIER in self.mounts):
            raise ValueError(f"`parse: reward_file` needs {VERIFIER} in `mounts`, and nothing else does")
        return self

    def list_sources(self) -> list[str | None]:
        return [self.source, *self.mounts.values()]


def fill_row(template: str, row: Mapping[str, Any]) -> str:
    """Returns a template with the columns of a row; raises a `WorkspaceError` if it has not all of them."""
    for name in list_placeholders(template):
        if not isinstance(row.get(name), str | int):
            raise WorkspaceError(f"{template}: the row has no column {name} with a string")
    return fill_text(template, row)


def read_seconds(limit: float | str | None, row: Mapping[str, Any]) -> float | None:
    """Returns a time limit, which may be that of a row; raises a `WorkspaceError` if the row has none."""
    if not isinstance(limit, str):
        return limit
    if not isinstance(seconds := row.get(limit[1:-1]), int | float) or seconds <= 0:
        raise WorkspaceError(f"timeout_s: the row has no column {limit[1:-1]} with a number of seconds")
    return seconds


def fill_path(template: str, row: Mapping[str, Any], project: Path) -> Path:
    """Returns the folder that a template names in a row, or raises a `WorkspaceError`."""
    path = project / fill_row(template, row)
    for name in list_placeholders(template):
        if ".." in PurePath(str(row[name])).parts or PurePath(str(row[name])).is_absolute():
            raise WorkspaceError(f"{template}: {name} is {str(row[name])!r}, which leads out of the folder")
    if not path.is_dir():
        raise WorkspaceError(f"{template}: there is no folder {path}")
    return path


@dataclass(frozen=True, slots=True)
class Place:
    """The files of one episode.

    Attributes:
        folder: Where they are on this machine.
        seen: Where its programs see the folder.
        cwd: Where they start.
        values: What placeholders stand for: the columns of the row, and more.
    """

    folder: Path
    seen: Path
    cwd: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    source: Path | None = None
    mounts: tuple[tuple[Path, Path], ...] = ()
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def files(self) -> Path:
        """The workspace on this machine."""
        return self.folder / "workspace"

    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.seen / "home"), "TMPDIR": str(self.seen / "tmp")}

    def make(self) -> None:
        self.renew()
        make_folder(self.folder / "hidden")
        make_folder(self.files)
        if self.source is not None:
            copy_over(self.source, self.files, self.source)

    def renew(self) -> None:
        """Replaces HOME and TMPDIR, in which a program may have prepared what the next one reads."""
        for name in ("home", "tmp"):
            remove(self.folder / name)
            (self.folder / name).mkdir(mode=0o700)

    def restore(self, patterns: Sequence[str]) -> None:
        """Makes the files of these names what they were in the folder that was copied."""
        make_folder(self.files)
        for path in list(find_files(self.files, patterns)):
            remove(self.files / path)
        if (source := self.source) is None:
            return
        for path in find_files(source, patterns):
            for parent in reversed(path.parents):
                make_folder(self.files / parent)
            copy_over(source / path, self.files / path, source)

    def stamp(self) -> None:
        """Notes what is in the workspace before the program runs."""
        self.stamps.update(list_stamps(self.files))

    def describe_changes(self) -> str:
        """Returns the diff of what the program has changed, as far as it is short."""
        make_folder(self.files)  # a program may have replaced it with a link
        after = list_stamps(self.files)
        changed = sorted(path for path in after.keys() | self.stamps.keys() if after.get(path) != self.stamps.get(path))
        text = "".join(self._diff(path, path in after) for path in changed[:MAX_DIFF_FILES])
        is_whole = len(text) <= MAX_DIFF_CHARS and len(changed) <= MAX_DIFF_FILES
        return text if is_whole else f"{text[:MAX_DIFF_CHARS]}\n... ({len(changed)} files changed)\n"

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
        hidden: The folder of the reward's files, which programs must neither see nor change; None: there is none.
        shared: What every episode sees in place of its own folder; None: this machine does not allow that, so an
            episode gets one of a few paths.
    """

    config: WorkspaceConfig
    project: Path
    guard: ProgramGuard
    hidden: Path | None
    shared: Path | None = field(default_factory=lambda: Path(tempfile.gettempdir(), f"reinforge-{os.getuid()}"))

    def check_mounts(self, places: Sequence[str] = ()) -> None:
        """Gives up `shared` where mounts are forbidden, and raises a `ConfigError` if that gives up `path`, too.

        Args:
            places: What else the reward's command must see.
        """
        fixed = [place for place in (self.config.path, *places) if place is not None]
        refused = [place for place in (*fixed, str(self.shared)) if not can_mount(place)]
        if not refused:
            return
        if fixed:
            message = f"this machine lets no program see its workspace at {refused[0]}"
            raise ConfigError(Problem("workspace.path", message, "leave it out, or create the folder and allow mounts"))
        self.shared = None
        logger.warning(
            "this machine allows no mounts, so workspaces have different paths, and so have the prompts of agents that "
            "contain them; siblings then share less of their prompts, and programs can see the files of the reward"
        )

    @contextlib.asynccontextmanager
    async def open(self, row: Mapping[str, Any]) -> AsyncIterator[Place]:
        """Yields the place of one episode, and removes it; raises a `WorkspaceError` if a folder cannot be copied."""
        source = None if self.config.source is None else fill_path(self.config.source, row, self.project)
        async with self.guard.open_folder() as folder:
            seen = self.shared or folder
            path = None if self.config.path is None else Path(self.config.path)
            places = {folder: self.shared, folder / "workspace": path, folder / "hidden": self.hidden}
            mounts = tuple((real, place) for real, place in places.items() if place is not None)
            place = Place(folder, seen, path or seen / "workspace", self.add_values(row, seen), source)
            place = replace(place, mounts=mounts if self.shared is not None else ())
            await run_in_daemon_thread(place.make, "workspace")
            yield place

    def add_values(self, row: Mapping[str, Any], seen: Path) -> dict[str, Any]:
        return {**row, "project": str(self.project), "report": str(seen / REPORT)}


def make_folder(path: Path) -> None:
    """Makes sure that there is a folder that can be written to, not a file or a link to another folder."""
    if is_folder(path):
        path.chmod(path.lstat().st_mode | 0o700)
        return
    remove(path)
    path.mkdir(mode=0o700)


def copy_over(source: Path, target: Path, root: Path) -> None:
    """Copies a file, a link or what is in a folder, and replaces whatever has its name; `root` is what is copied.

    Raises:
        WorkspaceError: A link leads out of `root`, or there is a pipe or a device.
    """
    mode = source.lstat().st_mode
    if stat.S_ISDIR(mode):
        make_folder(target)
        for entry in source.iterdir():
            copy_over(entry, target / entry.name, root)
        return
    remove(target)
    if stat.S_ISLNK(mode):
        named = os.readlink(source)
        if os.path.isabs(named) or not (source.parent / named).resolve().is_relative_to(root.resolve()):
            raise WorkspaceError(f"{source} is a link that leads out of its folder; copy what it names")
        target.symlink_to(named)
    elif stat.S_ISREG(mode):
        shutil.copyfile(source, target)
        target.chmod(stat.S_IMODE(mode) | 0o600)
    else:
        raise WorkspaceError(f"{source} is neither a file nor a folder nor a link, so it cannot be copied")


def find_files(root: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yields the paths below `root` of files and folders, of which the name or that path matches."""
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(folder, name).relative_to(root)
            if any(fnmatch(name, pattern) or fnmatch(str(path), pattern) for pattern in patterns):
                names[:] = [each for each in names if each != name]
                yield path


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
    """Returns the reward of a command that has ended, and counts; raises a `WorkspaceError` if it is unknown.

    Args:
        report: The file of `{report}`; of `parse: reward_file`, the folder with the reward's file.
    """
    text, ended = result.stdout.decode("utf-8", "replace"), describe_exit(result.exit_code)
    tail = (result.stderr.decode("utf-8", "replace") or text).strip()[-500:]
    if result.exit_code < 0 or result.exit_code in CANNOT_RUN:
        raise WorkspaceError(f"{ended}: {tail}")
    if parse == "reward_file":
        found = read_reward_file(report) or {"reward": float(result.exit_code == 0)}
        return {**found, "solved": float(found["reward"] >= 1.0)}
    if parse == "exit_code":
        return {"reward": float(result.exit_code == 0)}
    if parse == "last_number":
        numbers = NUMBER.findall(text)
        if result.exit_code or not numbers:
            raise WorkspaceError(f"{ended} and wrote no number: {tail}")
        return {"reward": float(numbers[-1])}
    try:
        root = ElementTree.fromstring(read_regular_file(report, get_limits().program_output_bytes))
    except (OSError, ElementTree.ParseError) as error:
        raise WorkspaceError(f"{ended} and its report cannot be read ({error}): {tail}") from None
    kinds = [{child.tag for child in case} for case in root.iter("testcase")]
    passed = [not kind & {"failure", "error"} for kind in kinds if "skipped" not in kind]
    if not passed:
        raise WorkspaceError(f"{ended} and ran no test: {tail}")
    return {"reward": sum(passed) / len(passed), "passed": float(sum(passed)), "tests": float(len(passed))}


def read_reward_file(folder: Path) -> dict[str, float]:
    """Returns the numbers of reward.json, or the one of reward.txt; {}: there is neither."""
    for path in (folder / "reward.json", folder / "reward.txt"):
        try:
            data = read_regular_file(path, MAX_FILE_BYTES)
            value = load_json(data) if path.suffix == ".json" else float(data)
            numbers = value if isinstance(value, dict) else {"reward": value}
            reward = numbers["reward"] if len(numbers) > 1 else next(iter(numbers.values()))
            return {name: float(number) for name, number in {**numbers, "reward": reward}.items()}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError, StopIteration) as error:
            raise WorkspaceError(f"{path.name} has no number `reward`: {error}") from None
    return {}
