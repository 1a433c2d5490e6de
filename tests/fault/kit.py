"""Runs to kill: real processes, forked from a server that has torch loaded, and a toy project for them.

toy = Toy(folder, model)
toy.start(crash_at="batch.sealed:2").wait()      -> -9: killed by SIGKILL at that point
toy.resume().wait()                              -> 0
differences(toy.run, whole.run)                  -> [], or the names of what differs
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil

from reinforge import crash
from reinforge.runs.journal.verify import verify_run
from reinforge.runs.page import page
from reinforge.runs.page.elements import build
from tests.processes import find_survivors
from tests.project import Project

ROOT = Path(__file__).parents[2]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.fault.preload"])
KILLED = -signal.SIGKILL
PATIENCE_S = 120
LIFE_S = 1.2
"""About how long a toy's run takes; random kills fall within it."""
SUMMARY = (
    "baseline", "final", "best", "confirm_base", "confirm_tuned", "improvement", "promoted", "episodes", "tokens",
    "policy_versions", "checkpoint",
)  # fmt: skip

# the reward runs once per episode, so each line of its file is an episode that really ran
TASK = """
import os

async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
    return reply.choices[0].message.content

def vowels(output, expected):
    with open("ran.txt", "a") as file:
        file.write("x\\n")
    return sum(letter in "aeiou" for letter in output) / max(1, len(output))

async def team(item, llm, context):
    said = await agent(item, llm, context)
    asked = [{"role": "user", "content": item.input_obj + said}]
    reply = await context.llm("worker").chat.completions.create(messages=asked, max_tokens=4)
    return said + reply.choices[0].message.content
"""

SHOWN, PREFERRED = {"completion": "aeiou"}, {"chosen": "aeiou", "rejected": "xyz"}
"""What the rows of a toy's files hold besides their prompt."""


class Child:
    """A run, or another command, in its own process and session; `said` is its output."""

    def __init__(self, folder, arguments, crash_at=None, mutation=None, command="finetune"):
        self.output = folder / f"output-{len(list(folder.glob('output-*')))}.txt"
        task = (folder, [command, *arguments], crash_at, mutation, self.output)
        self.process = SERVER.Process(target=_run, args=task, daemon=True)
        start_server()
        self.process.start()

    @property
    def said(self):
        return self.output.read_text()

    def wait(self, seconds=PATIENCE_S):
        """Returns the exit code; if a signal killed it, minus the signal."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"it still runs after {seconds} s: {self.said}"
        return self.process.exitcode

    def wait_for(self, path, seconds=PATIENCE_S):
        """Returns once a file exists."""
        deadline = time.monotonic() + seconds
        while not path.exists():
            assert self.process.is_alive(), self.said
            assert time.monotonic() < deadline, f"{path} does not come"
            time.sleep(0.01)

    def send(self, number, after_s=0.0):
        """Sends a signal, unless the process has ended by then."""
        self.process.join(after_s)
        if self.process.is_alive():
            os.kill(self.process.pid, number)

    def left_behind(self):
        """Returns the processes of its session that survive it; if there are none, no port and no lock is held."""
        left = [pid for pid in psutil.pids() if pid != self.process.pid and _session_of(pid) == self.process.pid]
        return [each.pid for each in find_survivors(left)]


def _session_of(pid):
    try:
        is_over = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return None if is_over else os.getsid(pid)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


def start_server():
    """Starts the fork server if it is not running yet; it finds the modules that this process finds."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _run(folder, arguments, crash_at, mutation, output):
    """Runs in the child, where everything is imported already: calls the command line."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup ignore it
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    assert "tests.fault.preload" in sys.modules, "the server has not loaded torch"
    sys.modules["matplotlib"] = None  # plots and pages have tests of their own, and cost half of a short run
    page.read_content, page.build_page = lambda *arguments: None, lambda content: build("html")
    from reinforge.cli import main

    os.chdir(folder)
    sys.path.insert(0, str(folder))
    crash.arm(crash_at)
    if mutation is not None:
        mutation()
    main(arguments, prog_name="reinforge")


class Toy(Project):
    """A tiny project whose run takes about a second; each run is a process."""

    def __init__(self, folder, model):
        folder.mkdir(exist_ok=True)
        super().__init__(folder, model)
        self.write("task.py", TASK)
        self.rows = self.rows[:32]
        for name, replies in (("shown.jsonl", SHOWN), ("pairs.jsonl", PREFERRED)):
            rows = ({"id": row["id"], "prompt": row["question"], **replies} for row in self.rows)
            self.write(name, "".join(json.dumps(row) + "\n" for row in rows))
        told = ({"prompt": f"tell {number}", **SHOWN} for number in range(12))
        self.write("told.jsonl", "".join(json.dumps(row) + "\n" for row in told))
        self.set("finetuning.algorithm", {"_type": "dithered"})
        self.set("trajectory_builders.builder", {"_type": "group", "num_generations": 4, "examples_per_epoch": 6})
        self.set("trainers.trainer.keep_last", 1)
        self.set("finetuning.deterministic", True)
        self.set("finetuning.num_epochs", 4)
        self.set("finetuning.run_configuration.validation_interval", 2)
        self.set("finetuning.policy.batch.steps_per_job", 2)
        self.set("finetuning.policy.optimizer.learning_rate", 0.01)
        self.set("finetuning.policy.schedule", {"warmup_steps": 0})
        self.set("finetuning.gate", {"margin": -1.0})

    def start(self, *arguments, crash_at=None, mutation=None):
        """Starts the run."""
        self.write_files()
        return Child(self.folder, ["run.yml", "--run_name", "r", *arguments], crash_at, mutation)

    def resume(self, *arguments, crash_at=None, mutation=None):
        """Resumes the run."""
        return Child(self.folder, ["--resume", str(self.run), *arguments], crash_at, mutation)

    def resume_or_start(self, *arguments):
        """Does what a user does after a kill: `--resume`, or the first command again if there is no run yet."""
        if (self.run / "run.sqlite").exists():
            return Child(self.folder, ["run.yml", "--resume", str(self.run), *arguments])
        shutil.rmtree(self.run, ignore_errors=True)
        return self.start(*arguments)

    def end_with_kills(self, rng):
        """Runs to the end through kills at random times, each later than the last; returns the number of kills."""
        child, kills = self.start(), 0
        while True:
            child.send(signal.SIGKILL, rng.uniform(0.05, LIFE_S * (1 + kills / 10)))
            code = child.wait()
            assert code in (0, KILLED), child.said
            if code == 0:
                return kills
            kills += 1
            assert damaged(self.run) == []
            child = self.resume_or_start()

    def end_after(self, *sites, mutation=None):
        """Kills it at each crash point, each time in the process that resumed after the last kill, then lets it end."""
        child = self.start(crash_at=sites[0])
        for site in sites[1:]:
            assert child.wait() == KILLED, child.said
            child = self.resume(crash_at=site)
        assert child.wait() == KILLED, child.said
        assert damaged(self.run) == []
        child = self.resume(mutation=mutation)
        assert child.wait() == 0, child.said
        return self

    @property
    def num_run(self):
        """Number of episodes that really ran, as the reward counts them."""
        ran = self.folder / "ran.txt"
        return len(ran.read_text().splitlines()) if ran.exists() else 0

    def rows_of(self, query):
        """Returns rows of the run's journal."""
        with closing(sqlite3.connect(self.run / "run.sqlite")) as database:
            return database.execute(query).fetchall()


def killed_at(toy, site):
    """Kills a run at one crash point and lets it end; a resumed process may not reach that point again."""
    assert toy.start(crash_at=site).wait() == KILLED
    assert damaged(toy.run) == []
    child = toy.resume_or_start()
    assert child.wait() == 0, child.said


def wait_until(holds, child):
    """Returns once a condition holds at a service, while the run continues."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert child.process.is_alive(), child.said
        assert time.monotonic() < deadline
        time.sleep(0.01)


def killed_while(toy, holds, mutation=None):
    """Kills a run once a condition holds at a service, and lets it end."""
    child = toy.start(mutation=mutation)
    wait_until(holds, child)
    child.send(signal.SIGKILL)
    assert child.wait() == KILLED
    child = toy.resume(mutation=mutation)
    assert child.wait() == 0, child.said


def damaged(run):
    """Returns the names of what `runs verify` calls damaged."""
    if not (run / "run.sqlite").exists():
        return []
    return [Path(finding.what).name for finding in verify_run(run).findings if finding.is_damage]


def facts(run):
    """Returns what must be equal between a stopped and an undisturbed run: name -> value."""
    summary = json.loads((run / "summary.json").read_text())
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    states = {_name(path, last): json.loads(path.read_text()) for path in sorted(last.rglob("state.json"))}
    return {
        "last": last.name,
        **{_name(path, last): _sha256(path) for path in sorted(last.rglob("*.safetensors"))},
        "rng": {name: state["rng"] for name, state in states.items()},
        "num_steps": {name: state["num_steps"] for name, state in states.items()},
        "metrics": (run / "training_metrics.jsonl").read_bytes(),
        "validations": json.loads((run / "validation_history.json").read_text()),
        **{name: summary[name] for name in SUMMARY},
    }


def differences(run, other):
    """Returns the names of what differs between two completed runs."""
    left, right = facts(run), facts(other)
    return [name for name in left if left[name] != right[name]]


def _name(path, checkpoint):
    """Returns `b/optimizer.safetensors` for a file in the training folder of adapter b."""
    return "/".join(part for part in path.relative_to(checkpoint).parts if part != "training")


def _sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
