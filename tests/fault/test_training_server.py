"""A server that is killed while it trains: its training goes on alone, none starts beside it, no chat is new twice."""

import contextlib
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from reinforge.learning.store import STORE
from reinforge.learning.training import LOG
from reinforge.serving.version_folder import VersionFolder
from reinforge.tasks import projects
from tests.serving.serving import says

RUN = (Path(projects.__file__).parent / "logs" / "run.yml.tmpl").read_text()
WAITS = "import pathlib, time\nwhile not pathlib.Path(__file__).with_name('go').exists(): time.sleep(0.05)\n"
NO_LOCKS = """
import contextlib, filelock
filelock.FileLock = lambda *arguments, **settings: contextlib.nullcontext()
"""
WAIT_S = 120


@pytest.fixture
def folder(tmp_path):
    """A project whose run waits for the file `go` when it imports its reward, and then fails: there is no agent."""
    (tmp_path / "run.yml").write_text(RUN)
    (tmp_path / "reward.py").write_text(WAITS)
    (tmp_path / "learn.yml").write_text("train: {config: run.yml, when: {rated: 2}}\n")
    for name in ("data", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    VersionFolder(tmp_path / "support").add(tmp_path / "model", {})
    return tmp_path


class Server:
    def __init__(self, folder):
        self.folder, self.said = folder, folder / "said.txt"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}/v1", timeout=60)

    def __enter__(self):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), *filter(None, sys.path)])}
        command = [sys.executable, "-m", "tests.fault.training_server", str(self.folder), str(self.port)]
        with open(self.said, "ab") as output:
            self.process = subprocess.Popen(command, stderr=output, env=environment)
        wait_until(self.answers)
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()

    def answers(self):
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/models").status_code == 200

    def rate(self, count):
        for number in range(count):
            body = {"model": "m", "messages": says(f"{time.monotonic()} {number}")}
            id_ = self.client.post("/chat/completions", json=body).json()["id"]
            assert self.client.post("/feedback", json={"id": id_, "thumb": "up"}).status_code == 200

    def list_trainings(self):
        return [int(pid) for pid in re.findall(r"is trained on its chats: process (\d+)", self.said.read_text())]


def wait_until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def count_starts(folder):
    """Returns how many trainings have taken chats, and how many chats each of them was the first to take."""
    with contextlib.closing(sqlite3.connect(folder / "data" / STORE)) as db:
        starts = [version for (version,) in db.execute("SELECT version FROM starts ORDER BY seq")]
        query = "SELECT chat FROM trainings WHERE version = ?"
        chats = [{chat for (chat,) in db.execute(query, (version,))} for version in starts]
    return [len(each.difference(*chats[:number])) for number, each in enumerate(chats)]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def kill_while_training(folder):
    """Returns the process of a training whose server was killed."""
    with Server(folder) as server:
        server.rate(2)
        wait_until(lambda: count_starts(folder) == [2])
        [pid] = server.list_trainings()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    assert is_alive(pid)
    return pid


@pytest.mark.fault
@pytest.mark.slow
def test_a_training_outlives_its_server_and_none_starts_beside_it(folder):
    pid = kill_while_training(folder)
    try:
        with Server(folder) as server:
            server.rate(2)
            time.sleep(3)
            found = server.client.post("/learn/run")
            assert (found.status_code, found.json()["error"]["code"]) == (409, "training_not_started")
            assert (count_starts(folder), server.list_trainings()) == ([2], [pid])
            assert VersionFolder(folder / "support").read().promoted == 1
            (folder / "go").touch()
            wait_until(lambda: not is_alive(pid))
            wait_until(lambda: "exited with code" in server.said.read_text())
            time.sleep(1)
            assert count_starts(folder) == [2, 2], "the new ratings, once"
            assert len(server.list_trainings()) == 2
            server.rate(1)
            assert "error:" in (folder / "data" / LOG).read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.fault
@pytest.mark.slow
def test_without_its_lock_a_second_training_starts_beside_the_first(folder):
    """Mutation: no process locks anything."""
    (folder / "sitecustomize.py").write_text(NO_LOCKS)
    pid = kill_while_training(folder)
    try:
        with Server(folder) as server:
            server.rate(2)
            wait_until(lambda: count_starts(folder) == [2, 2])
            assert is_alive(pid)
            pid_2 = server.list_trainings()[1]
    finally:
        (folder / "go").touch()
        wait_until(lambda: not is_alive(pid))
    wait_until(lambda: not is_alive(pid_2))
