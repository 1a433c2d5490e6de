"""Trains agents in the environment of their packages: `python -m tests.clients.train AGENT...`.

AGENT is a file of `tests/clients/agents`: one with its ending is a program, whose environment alone names the model.
`page:AGENT` is its snippet in `docs/capture.md`.
"""

import contextlib
import importlib
import io
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.capture_page import load_snippet
from tests.clients.__main__ import QUIET
from tests.clients.training import WAYS, Training, build_workflow, choose_pattern

AGENTS = Path(__file__).with_name("agents")
NODE = Path(".clients/node")
"""Where npm has installed its packages, so where a program finds them."""

SAMPLES = {"autogen_team.py": 2}
"""Samples that each episode of a program makes, where its calls are those of several conversations."""


def train(name: str, folder: Path) -> None:
    """Trains and checks one agent."""
    if name.endswith((".mjs", ".py")):
        command, cwd = [sys.executable, "-m", f"tests.clients.agents.{Path(name).stem}"], Path.cwd()
        if name.endswith(".mjs"):
            shutil.copy(AGENTS / name, NODE / name)
            command, cwd = ["node", name], NODE.absolute()
        settings = {"_type": "command", "command": command, "cwd": str(cwd), "env": QUIET}
        ways = ("gateway", "gateway, streamed")
        return Training(folder, settings, ways, num_samples=SAMPLES.get(name)).run()
    is_snippet, name = name.startswith("page:"), name.removeprefix("page:")
    agent = importlib.import_module(f"tests.clients.agents.{name}")
    function = load_snippet(name, folder).agent if is_snippet else build_workflow(agent.answer)
    ways = ("page",) if is_snippet else getattr(agent, "WAYS", WAYS)
    settings = {"_type": "python", "function": function}
    return Training(folder, settings, ways, getattr(agent, "choose", choose_pattern)).run()


for name in sys.argv[1:]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # frameworks talk a lot
        train(name, Path(folder))
    sys.stdout.write(f"  ok: {name}: exactly the sampled tokens are trained ({time.monotonic() - started:.0f} s)\n")
    sys.stdout.flush()
