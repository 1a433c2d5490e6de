"""Runs a program in its own process group, and kills the whole group with the run, however the run exits.

    python supervise.py FOLDER LOG PROGRAM ARGUMENTS...

The run holds the other end of standard input: it reads its end when the run ends or is killed. The program then gets
SIGTERM, so that it can take down what outlives it (shared memory), and after `GRACE_S` its group is killed, and FOLDER
is removed. The group is also killed if the program itself exits: an engine of vLLM keeps running without its server.
Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

GRACE_S = 8.0
CANNOT_START = 127
run_has_ended = threading.Event()


def main(folder: str, log: str, *command: str) -> int:
    with open(log, "ab") as output:
        try:
            program = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            output.write(f"{error}\n".encode())
            return CANNOT_START
    threading.Thread(target=end_with_run, args=(program,), daemon=True).start()
    code = program.wait()
    kill_group(program.pid)
    if run_has_ended.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def end_with_run(program: subprocess.Popen[bytes]) -> None:
    """Waits for the end of the run, then ends the program and its group."""
    while os.read(0, 1 << 12):  # not by sys.stdin, whose lock this thread would hold at exit
        pass
    run_has_ended.set()
    program.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(GRACE_S)
    kill_group(program.pid)


def kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
