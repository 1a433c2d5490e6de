"""`make mutants`: for each guarantee of docs/reliability.md a small change of the source, which its test must notice.

    python -m tests.mutants              all of them, two at a time
    python -m tests.mutants disk lock    those whose guarantee has one of these words in it

Each change is made in a copy of `src`, and its test runs in a process of its own that finds that copy first. A change
whose old text is not in its file exactly once is refused, and so is a guarantee without a change.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

# before the processes begin: this takes each of them longer than its test
import aiohttp
import datasets
import matplotlib
import openai
import peft
import pytest
import torch
import transformers

from tests.core.contract.test_reliability import ROWS
from tests.mutant_table import MUTANTS, Mutant, find_problems

ROOT = Path(__file__).parents[1]
AT_ONCE, TIMEOUT_S = 2, 120
PRELOADED = (aiohttp, datasets, matplotlib, openai, peft, torch, transformers)


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
    arguments = [mutant.test, "-x", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", f"--basetemp={folder}/tmp"]
    arguments += ["-k", mutant.select] if mutant.select else []
    arguments += [] if mutant.is_slow else ["-m", "not slow and not fault"]
    code = 3
    try:
        code = int(pytest.main(arguments))
    finally:
        os._exit(code)


def end(mutant: Mutant, folder: Path, status: int, seconds: float) -> bool:
    """Reports whether the test has noticed its change: only a test that fails has, not one that cannot run."""
    is_noticed = os.waitstatus_to_exitcode(status) == pytest.ExitCode.TESTS_FAILED
    sys.stdout.write(f"{'noticed' if is_noticed else 'MISSED':8} {seconds:5.0f} s  {mutant.guarantee}\n")
    if not is_noticed:
        sys.stdout.write((folder / "output").read_text(errors="replace")[-3000:])
    sys.stdout.flush()
    shutil.rmtree(folder, ignore_errors=True)
    return is_noticed


def main(words: list[str]) -> int:
    if problems := find_problems(ROWS):
        sys.stdout.write("\n".join(problems) + "\n")
        return 2
    waiting = [each for each in MUTANTS if not words or any(word in each.guarantee.lower() for word in words)]
    running: dict[int, tuple[Mutant, Path, float]] = {}
    num_all, num_missed, total_s = len(waiting), 0, 0.0
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            mutant, folder = waiting.pop(0), Path(tempfile.mkdtemp(prefix="mutant-"))
            running[start(mutant, folder)] = (mutant, folder, time.monotonic())
        pid, status = os.wait()
        if pid in running:
            mutant, folder, started_s = running.pop(pid)
            seconds = time.monotonic() - started_s
            total_s, num_missed = total_s + seconds, num_missed + (not end(mutant, folder, status, seconds))
    sys.stdout.write(f"{num_all - num_missed} of {num_all} noticed, {total_s:.0f} s in all\n")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
