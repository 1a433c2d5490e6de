"""`make mutants`: for each guarantee of docs/reliability.md a small change of the source, which its test must notice.

    python -m tests.mutants              all of them, two at a time
    python -m tests.mutants disk lock    those whose guarantee has one of these words in it

Each change is made in a copy of `src`, and its test runs in a process of its own that finds that copy first. A change
whose old text is not in its file exactly once is refused, and so is a guarantee without a change.
"""

import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from multiprocessing import forkserver, util
from pathlib import Path

import pytest

from tests.core.contract.test_reliability import ROWS
from tests.mutant_table import MUTANTS, Mutant, find_problems

ROOT = Path(__file__).parents[1]
AT_ONCE, TIMEOUT_S = 2, 120
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two tests share the cores
PRELOADED = ("aiohttp", "datasets", "matplotlib", "openai", "peft", "torch", "transformers")
"""What takes a process longer to import than its test: imported once, before the processes begin."""


def start_as_copy(path: object, arguments: list[str], files: Iterable[int]) -> int:
    """Starts a process as a copy of this one, in which torch is imported, with these files; returns its pid."""
    if pid := os.fork():
        return pid
    try:
        for lower, upper in pairwise(sorted({2, *files, 4096})):
            os.closerange(lower + 1, upper)
        exec(arguments[-1])
    finally:
        os._exit(1)


def start(mutant: Mutant, folder: Path) -> int:
    """Makes the change in a copy of the source and runs the test on it in a new process; returns its pid."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.egg-info"))
    changed = source / "reinforge" / mutant.file
    changed.write_text(changed.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
    if pid := os.fork():
        return pid
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    os.environ["PYTHONPATH"] = str(source)
    sys.path.insert(0, str(source))
    text = (ROOT / mutant.test.partition("::")[0]).read_text(encoding="utf-8")
    if "toy" in text or "servers" in text:
        start_anew, util.spawnv_passfds = util.spawnv_passfds, start_as_copy
        forkserver.set_forkserver_preload(["tests.fault.preload"])
        forkserver.ensure_running()  # the fork server of the test's runs
        util.spawnv_passfds = start_anew
    arguments = [mutant.test, "-x", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", f"--basetemp={folder}/tmp"]
    arguments += ["-k", mutant.select] if mutant.select else []
    arguments += [] if mutant.is_slow else ["-m", "not slow and not fault"]
    code = 3
    try:
        code = int(pytest.main(arguments))
    finally:
        os._exit(code)


def end(mutant: Mutant, folder: Path, status: int, seconds: float) -> bool:
    """Reports whether the test has noticed its change: only a test that fails has, not one that cannot run or hangs."""
    said = (folder / "output").read_text(errors="replace")
    is_noticed = os.waitstatus_to_exitcode(status) == pytest.ExitCode.TESTS_FAILED and "from pytest-timeout" not in said
    sys.stdout.write(f"{'noticed' if is_noticed else 'MISSED':8} {seconds:5.0f} s  {mutant.guarantee}\n")
    if not is_noticed:
        sys.stdout.write(said[-3000:])
    sys.stdout.flush()
    shutil.rmtree(folder, ignore_errors=True)
    return is_noticed


def main(words: list[str]) -> int:
    if problems := find_problems(ROWS):
        sys.stdout.write("\n".join(problems) + "\n")
        return 2
    for name in PRELOADED:
        importlib.import_module(name)
    waiting = [each for each in MUTANTS if not words or any(word in each.guarantee.lower() for word in words)]
    running: dict[int, tuple[Mutant, Path, float]] = {}
    num_all, num_missed, begun_s = len(waiting), 0, time.monotonic()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            mutant, folder = waiting.pop(0), Path(tempfile.mkdtemp(prefix="mutant-"))
            running[start(mutant, folder)] = (mutant, folder, time.monotonic())
        pid, status = os.wait()
        if pid in running:
            mutant, folder, started_s = running.pop(pid)
            num_missed += not end(mutant, folder, status, time.monotonic() - started_s)
    sys.stdout.write(f"{num_all - num_missed} of {num_all} noticed, {time.monotonic() - begun_s:.0f} s in all\n")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
