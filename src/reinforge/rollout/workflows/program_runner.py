"""Runs a program of any language once, within limits, and kills everything that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from reinforge.limits import get_limits
from reinforge.rollout.isolation import processes
from reinforge.rollout.isolation.processes import (
    RunningProcess,
    kill_group,
    kill_marked,
    list_processes,
)
from reinforge.rollout.isolation.threads import run_in_daemon_thread

CLOSE_S = 0.5  # seconds for which what a program has left behind may still write to its pipes
WATCH_S = 0.25  # seconds between two looks at the memory and the processes of every program
MARK = "REINFORGE_PROCESS_ID"
"""The variable by which a program's processes are recognized, also those that leave its group."""
SUPERVISOR = Path(__file__).with_name("supervisor.py")
END_S = 3.0  # seconds that a supervisor gets to kill what its program has started, before its group is killed


class ProgramError(Exception):
    """A program could not be started, failed, or gave no answer that can be used; the message says how."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """What one run of a program may use."""

    max_memory_mb: int | None = None  # MiB of memory, of each process and of all together; None: no limit
    max_processes: int | None = None

    def find_excess(self, processes: Sequence[RunningProcess]) -> str | None:
        if self.max_processes is not None and len(processes) > self.max_processes:
            return f"it had {len(processes)} processes, more than max_processes ({self.max_processes})"
        used = sum(process.resident_bytes for process in processes) >> 20
        if self.max_memory_mb is not None and used > self.max_memory_mb:
            return f"it used {used} MiB of memory, more than max_memory_mb ({self.max_memory_mb})"
        return None


@dataclass(frozen=True, slots=True)
class ProgramResult:
    exit_code: int  # negative: the signal that killed it
    stdout: bytes
    stderr: bytes  # its end


class ProgramOutput(asyncio.SubprocessProtocol):
    """Collects what a program writes.

    Attributes:
        exited: Set when the program has exited.
        closed: Set when nothing can write to its pipes any more either.
        excess: The limit that it exceeded, for which it was killed; None: none.
    """

    def __init__(self) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self.excess: str | None = None
        self.pid = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.pid = transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keeps the first bytes of the standard output and the last ones of the standard error."""
        if fd == 2:
            self.stderr += data
            del self.stderr[: -get_limits().error_bytes]
        elif len(self.stdout) + len(data) <= (most := get_limits().program_output_bytes):
            self.stdout += data
        else:
            self.kill(f"it wrote more than {most >> 20} MiB to its standard output")

    def kill(self, excess: str) -> None:
        """Ends the program because of a limit, with all that it has started."""
        if self.excess is None and not self.exited.is_set():
            self.excess = excess
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


@dataclass
class ProgramWatch:
    """Looks at the running programs every `WATCH_S` seconds and kills those that exceed their limits."""

    _programs: dict[ProgramOutput, ProgramLimits] = field(default_factory=dict)
    _added: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[ProgramWatch]:
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait({task})

    @contextlib.contextmanager
    def watching(self, output: ProgramOutput, limits: ProgramLimits) -> Iterator[None]:
        self._programs[output] = limits
        self._added.set()
        try:
            yield
        finally:
            del self._programs[output]

    async def _run(self) -> None:
        while True:
            if not self._programs:
                self._added.clear()
                await self._added.wait()
            leaders = {output.pid for output in self._programs}
            found = await run_in_daemon_thread(partial(find_processes_of, leaders), "program-watch")
            for output, limits in list(self._programs.items()):
                if (excess := limits.find_excess(found.get(output.pid, []))) is not None:
                    output.kill(excess)
            await asyncio.sleep(WATCH_S)


def find_processes_of(
    leaders: Collection[int], processes: Mapping[int, RunningProcess] | None = None
) -> dict[int, list[RunningProcess]]:
    """Returns the processes of each program: those of its supervisor's group, without it, and their descendants.

    Example: leaders {5}, processes 5 (group 5), 6 (parent 5, group 6), 7 (parent 1, group 5), 8 (parent 1, group 8)
        -> {5: [6, 7]}
    """
    processes, found = list_processes() if processes is None else processes, defaultdict(list)
    for pid, process in processes.items():
        if pid in leaders:
            continue
        above, seen = pid, set[int]()
        while above in processes and above not in seen:
            seen.add(above)
            if processes[above].group in leaders:
                found[processes[above].group].append(process)
                break
            above = processes[above].parent
    return dict(found)


async def run_program(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdin: bytes = b"",
    limits: ProgramLimits,
    watch: ProgramWatch,
    mounts: Sequence[tuple[Path, Path]] = (),
) -> ProgramResult:
    """Runs a program to its end; kills everything that it has started then, and when the caller is cancelled.

    Args:
        mounts: Folders, and the places at which the program alone sees them; `cwd` may be inside one.
    """
    mark = uuid.uuid4().hex
    command = build_command(command, cwd, limits.max_memory_mb or 0, mounts)
    loop = asyncio.get_running_loop()
    try:
        transport, output = await loop.subprocess_exec(
            ProgramOutput, *command, cwd=None if mounts else cwd, env={**env, MARK: mark}, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise ProgramError(f"{command[0]} cannot be started: {error}") from None
    try:
        with watch.watching(output, limits):
            _write(transport, stdin)
            await output.exited.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(output.closed.wait(), CLOSE_S)
    finally:
        try:
            await asyncio.shield(end_program(transport, output, mark))
        finally:
            transport.close()
    if output.excess is not None:
        raise ProgramError(f"was killed: {output.excess}")
    code = transport.get_returncode()
    assert code is not None  # it has exited
    return ProgramResult(code, bytes(output.stdout), bytes(output.stderr))


def build_command(
    command: Sequence[str], cwd: Path, max_memory_mb: int = 0, mounts: Sequence[tuple[Path, Path]] = ()
) -> list[str]:
    supervisor = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(max_memory_mb << 20)]
    return [*supervisor, str(cwd), str(len(mounts)), *(str(path) for mount in mounts for path in mount), *command]


def can_mount(place: Path | str) -> bool:
    """Returns whether this machine lets programs see a folder at a place, which is created if there is none."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError):  # then it is not a place of mounts
        Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
    command = build_command(["true"], Path("/"), 0, [(Path(place), Path(place))])
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _write(transport: asyncio.SubprocessTransport, stdin: bytes) -> None:
    pipe = transport.get_pipe_transport(0)
    assert isinstance(pipe, asyncio.WriteTransport)
    pipe.write(stdin)
    with contextlib.suppress(OSError, NotImplementedError):
        pipe.write_eof()


async def end_program(transport: asyncio.SubprocessTransport, output: ProgramOutput, mark: str) -> None:
    """Ends a program that still runs, and what its supervisor has not found or could not kill."""
    with contextlib.suppress(TimeoutError, ProcessLookupError):
        if not output.exited.is_set():
            transport.terminate()
            await asyncio.wait_for(output.exited.wait(), END_S)
    runs = not output.exited.is_set()

    def kill() -> None:
        if runs:
            kill_group(output.pid)
        kill_marked(f"{MARK}={mark}")

    await run_in_daemon_thread(kill, "program-end")


RUN_MARK = "REINFORGE_RUN_PROCESS_ID"  # the variable by which all programs of a run are recognized
GUARD = (
    "import runpy, shutil, sys; file, mark, folder = sys.argv[1:]; sys.stdin.buffer.read(); "
    "runpy.run_path(file)['kill_marked'](mark); shutil.rmtree(folder, ignore_errors=True)"
)
"""The guard: it imports nothing but the standard library, so that it is small and starts in milliseconds."""


class ProgramGuard:
    """Kills what is left of a run's programs when the run itself is killed (`kill -9`, out of memory).

    A small process of its own waits on a pipe that only the run holds open: it reads its end when the run ends, however
    that ends, then kills the programs that carry the run's mark, and removes their folders.
    """

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self.folder: Path | None = None
        self.pid = 0
        self._slots: set[int] = set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[ProgramGuard]:
        self.folder = Path(tempfile.mkdtemp(prefix="reinforge-"))
        arguments = [str(processes.__file__), f"{RUN_MARK}={self._mark}", str(self.folder)]
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        self.pid = guard.pid
        try:
            yield self
        finally:
            await asyncio.shield(run_in_daemon_thread(lambda: self._end(guard), "program-guard"))

    def _end(self, guard: subprocess.Popen[bytes]) -> None:
        guard.communicate()  # closes the pipe
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        return {RUN_MARK: self._mark}

    @contextlib.asynccontextmanager
    async def open_folder(self) -> AsyncIterator[Path]:
        """Yields a folder of one episode, which only this user can read, and removes it.

        Its name is free again then, so that few paths occur.
        """
        slot = next(number for number in itertools.count() if number not in self._slots)
        self._slots.add(slot)
        folder = Path(self.folder or tempfile.gettempdir(), str(slot))
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            await asyncio.shield(run_in_daemon_thread(lambda: self._free(slot, folder), "scratch"))

    def _free(self, slot: int, folder: Path) -> None:
        with contextlib.suppress(OSError):  # files of another user; the number stays taken
            remove(folder)
            self._slots.discard(slot)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, also one that cannot be written to; does nothing where there is none."""
    if not is_folder(path):
        path.unlink(missing_ok=True)
        return
    path.chmod(0o700)
    for root, names, _ in os.walk(path):
        for folder in filter(is_folder, (Path(root, name) for name in names)):
            folder.chmod(0o700)
    shutil.rmtree(path)


def is_folder(path: Path) -> bool:
    """Returns True for a folder itself, and False for a link to one."""
    return path.is_dir() and not path.is_symlink()
