"""Runs graders in Python, each call in a separate process with few rights. They are off by default.

The process has an empty environment, limits of time, memory, processes and file sizes, a hook that refuses sockets and
programs and, where the kernel allows it, its own network namespace. When it ends, everything that it has started is
killed. Where the kernel has Landlock (Linux 5.13), it can read Python's own files and the system's libraries, write to
its own folder, run no program, and (6.12) send no signals; elsewhere it may do to files what the user of this process
may, and `open_python_graders` says so. Either way, allow it only for code that you would run yourself.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from reinforge.bounded import dump_json, load_json
from reinforge.evaluation.answers import UnusableOutputError
from reinforge.evaluation.evaluators.base import describe_refusal, to_score
from reinforge.protocols.openai.graders.templates import GradedSample
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.workflows.program_runner import ProgramError, ProgramLimits, ProgramWatch, run_program

logger = logging.getLogger(__name__)

TIMEOUT_S = 20.0
MAX_MEMORY_MB = 512
MAX_PROCESSES = 1
MAX_FILE_BYTES = 1 << 24
MAX_AT_ONCE = 4  # graders that run at a time; further ones wait
SHOWN = 2000

PROGRAM = """
import json, os, resource, sys
seconds, size, abi = map(int, sys.argv[1:])
for limit, value in (("CPU", seconds), ("FSIZE", size), ("NOFILE", 64), ("CORE", 0)):
    number = getattr(resource, "RLIMIT_" + limit)
    resource.setrlimit(number, (value, value))
try:
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER | CLONE_NEWNET
except Exception:  # not every kernel lets a user do this; the hook below refuses sockets anyway
    pass
def restrict():
    import struct
    def call(*arguments):
        if (found := libc.syscall(*arguments)) < 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses Landlock's rules")
        return found
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1  # all kinds of access that this version knows
    handled = [files, 3, 3][:1 + (abi > 3) + (abi > 5)]  # files, TCP, signals and sockets of other processes
    rules = struct.pack(f"={len(handled)}Q", *handled)
    rules = call(444, rules, ctypes.c_size_t(len(rules)), 0)
    readable = [*sys.path, sys.base_prefix + "/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    for path, allowed in [(".", files & ~1), *((each, 12) for each in readable if os.path.isdir(each))]:
        folder = os.open(path, os.O_PATH)  # 1: run a program, 12: read files and list folders
        call(445, rules, 1, struct.pack("=Qi", allowed, folder), 0)
        os.close(folder)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call(446, rules, 0)
def refuse(event, arguments):
    if event.startswith("socket.") or event in ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system",
                                                "subprocess.Popen", "os.kill", "ctypes.dlopen", "ctypes.dlsym"):
        raise PermissionError("a grader may not use " + event)
import math, re, string, datetime, collections, itertools, difflib, statistics
given = json.load(sys.stdin)
answer, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
namespace = {"__name__": "grader"}
if abi:
    restrict()
import _posixsubprocess
_posixsubprocess.fork_exec = lambda *_: refuse("os.fork", ())  # has no event of its own
sys.modules.pop("ctypes", None)  # importing it again is refused
sys.addaudithook(refuse)
exec(compile(given["source"], "grader.py", "exec"), namespace)
if not callable(namespace.get("grade")):
    raise NameError("the source defines no function grade(sample, item)")
result = namespace["grade"](given["sample"], given["item"])
if isinstance(result, bool) or not isinstance(result, (int, float)):
    raise TypeError("grade returned " + type(result).__name__ + ", not a number")
answer.write(json.dumps(float(result)))
answer.flush()
os._exit(0)
"""
"""The process: it limits itself, then runs the source. Its standard output is the score alone."""


LANDLOCK_CREATE_RULESET, VERSION = 444, 1


def find_landlock() -> int:
    """Returns the version of Landlock that the kernel has; 0: it has none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, VERSION)))


class PythonFailed(Exception):
    """A grader in Python gave no score; the message says why."""


class PythonGraders:
    def __init__(self, watch: ProgramWatch, timeout_s: float = TIMEOUT_S):
        self._watch, self.timeout_s = watch, timeout_s
        self._slots, self._landlock = asyncio.Semaphore(MAX_AT_ONCE), find_landlock()
        if not self._landlock:
            logger.warning(
                "this system has no Landlock: graders in Python can read and write what the user of this process can"
            )

    async def grade(self, source: str, item: Mapping[str, Any], sample: GradedSample) -> float:
        """Returns what `grade(sample, item)` of the source returns; a `PythonFailed` if that is not a number."""
        given = {"source": source, "item": dict(item), "sample": build_sample(sample)}
        try:
            stdin = dump_json(given, default=str).encode()
        except ValueError as error:
            raise UnusableOutputError(f"the answer cannot be written as JSON: {error}") from None
        async with self._slots:
            text = await self._run(stdin)
        try:
            found = load_json(text)
        except ValueError:
            raise PythonFailed(f"the grader wrote {text[:80]!r} instead of a number") from None
        if (score := to_score(found)) is None:
            raise PythonFailed(f"the grader returned {describe_refusal(found)}")
        return score

    async def _run(self, stdin: bytes) -> str:
        folder = Path(await run_in_daemon_thread(lambda: tempfile.mkdtemp(prefix="reinforge-grader-"), "grader"))
        numbers = int(self.timeout_s) + 1, MAX_FILE_BYTES, self._landlock
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, *map(str, numbers)]
        try:
            async with asyncio.timeout(self.timeout_s):
                result = await run_program(
                    command,
                    cwd=folder,
                    env={"HOME": str(folder), "TMPDIR": str(folder)},
                    stdin=stdin,
                    limits=ProgramLimits(MAX_MEMORY_MB, MAX_PROCESSES),
                    watch=self._watch,
                )
        except TimeoutError:
            raise PythonFailed(f"the grader took longer than {self.timeout_s:g} s and was killed") from None
        except ProgramError as error:
            raise PythonFailed(f"the grader {error}") from None
        finally:
            await run_in_daemon_thread(lambda: shutil.rmtree(folder, ignore_errors=True), "grader")
        if result.exit_code != 0:
            end = result.stderr.decode("utf-8", "replace").strip()[-SHOWN:]
            raise PythonFailed(f"the grader failed (exit code {result.exit_code}): {end or 'it wrote nothing'}")
        return result.stdout.decode("utf-8", "replace")


def build_sample(sample: GradedSample) -> dict[str, Any]:
    """Returns an answer as `grade` gets it; `output_json` is None if the text is not JSON."""
    try:
        parsed = sample.find("output_json")
    except UnusableOutputError:
        parsed = None
    return {"output_text": sample.output_text, "output_json": parsed, "output_tools": list(sample.output_tools)}


@asynccontextmanager
async def open_python_graders(timeout_s: float = TIMEOUT_S) -> AsyncIterator[PythonGraders]:
    """Yields what runs graders in Python, and watches their limits until the end of the block."""
    async with ProgramWatch().open() as watch:
        yield PythonGraders(watch, timeout_s)
