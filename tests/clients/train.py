"""Trains agents in the environment of their packages, a folder: `python -m tests.clients.train FOLDER AGENT...`.

AGENT is a module of `tests/clients/agents`; `page:AGENT` is its snippet in `docs/capture.md`. A file, such as
`litellm.py`, is a program, which finds the model by its environment alone.
"""

import contextlib
import importlib
import io
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.capture_page import load_snippet
from tests.clients.__main__ import QUIET
from tests.clients.training import WAYS, Training, build_workflow, choose_pattern

AGENTS = Path(__file__).with_name("agents")

SAMPLES = {"autogen_team.py": 2}
"""Samples that each episode of a program makes, where its calls are those of several conversations."""


def train(name: str, folder: Path, packages: Path) -> None:
    """Trains and checks one agent."""
    if kind := Path(name).suffix:
        command, cwd = [sys.executable, "-m", f"tests.clients.agents.{Path(name).stem}"], Path.cwd()
        if kind == ".mjs":
            shutil.copy(AGENTS / name, packages / name)  # npm's packages are found from where it is
            node = shutil.which("node", path=f"{packages / 'node_modules/.bin'}{os.pathsep}{os.environ['PATH']}")
            command, cwd = [str(node), name], packages
        env = {key: os.environ[key] for key in QUIET}
        settings = {"_type": "command", "command": command, "cwd": str(cwd), "env": env}
        ways = ("gateway", "gateway, streamed")
        return Training(folder, settings, ways, num_samples=SAMPLES.get(name)).run()
    is_snippet, name = name.startswith("page:"), name.removeprefix("page:")
    agent = importlib.import_module(f"tests.clients.agents.{name}")
    function = load_snippet(name, folder).agent if is_snippet else build_workflow(agent.answer)
    ways = ("page",) if is_snippet else getattr(agent, "WAYS", WAYS)
    settings = {"_type": "python", "function": function}
    return Training(folder, settings, ways, getattr(agent, "choose", choose_pattern)).run()


packages, *names = sys.argv[1:]
for name in names:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # frameworks talk a lot
        train(name, Path(folder), Path(packages).absolute())
    sys.stdout.write(f"  ok: {name}: exactly the sampled tokens are trained ({time.monotonic() - started:.0f} s)\n")
    sys.stdout.flush()
