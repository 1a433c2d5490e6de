"""With a local model nothing leaves the machine: no host name is resolved and no connection is opened."""

import subprocess
import sys
import textwrap

import pytest

GUARDED = """
import os, socket, sys

LOCAL = tuple(getattr(socket, name) for name in ("AF_UNIX",) if hasattr(socket, name))

def refuse(event, arguments):
    # connect: (socket, address); getaddrinfo: (host, port, ...); sendto: (socket, address)
    if event in ("socket.connect", "socket.sendto", "socket.bind") and arguments[0].family in LOCAL:
        return
    if event in ("socket.connect", "socket.sendto", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"):
        os.write(2, f"NETWORK: {event} {arguments[1:] if event != 'socket.getaddrinfo' else arguments}\\n".encode())
        os._exit(70)

sys.addaudithook(refuse)
sys.path.insert(0, "")
"""
"""Ends the process at the first use of the network; an audit hook sees C code too, and cannot be removed."""

WITHOUT_A_HINT = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "", "HF_DATASETS_OFFLINE": ""}


def run_guarded(code, folder):
    program = GUARDED + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)


FINETUNE = """
from reinforge.cli import main
main(["finetune", "run.yml", "--run_name", "r"], prog_name="reinforge", standalone_mode=True)
"""


@pytest.mark.slow
def test_a_run_on_a_local_model_uses_no_network(project, monkeypatch):
    for name in WITHOUT_A_HINT:
        monkeypatch.delenv(name, raising=False)
    project.set("finetuning.num_epochs", 1).set("trajectory_builders.builder.examples_per_epoch", 4)
    project.rows = project.rows[:24]
    project.write_files()
    done = run_guarded(FINETUNE, project.folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert project.summary["status"] == "completed"


@pytest.mark.parametrize("name", ["reinforge.cli.finetune", "reinforge.redteam", "reinforge.multiagent.nip"])
def test_importing_uses_no_network(name, tmp_path):
    done = run_guarded(f"import {name}", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("import socket; socket.create_connection(('192.0.2.1', 80))", marks=pytest.mark.slow),
        pytest.param("import socket; socket.getaddrinfo('example.org', 443)", marks=pytest.mark.slow),
        pytest.param("import urllib.request; urllib.request.urlopen('http://192.0.2.1')", marks=pytest.mark.slow),
        "import asyncio; asyncio.run(asyncio.open_connection('192.0.2.1', 80))",
    ],
)
def test_an_agent_that_calls_out_is_noticed(call, project):
    """Mutation check: the guard sees what the run's own process does."""
    project.write(
        "task.py", f"def agent(item, llm, context):\n    {call}\n\ndef vowels(output, expected):\n    return 0.0\n"
    )
    project.write_files()
    done = run_guarded(FINETUNE if "asyncio" not in call else call, project.folder)
    assert done.returncode == 70, done.stderr[-2000:]
    assert "NETWORK: socket." in done.stderr
