"""Trains a tiny model in environments of others: `python -m tests.clients.environments openenv PYTHON`, or harbor.

A grammar decides what the tiny model calls, and its weights whether that is right.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.clients.coding_agents import SUBMIT, quote
from tests.clients.training import Training
from tests.journal_rows import read_rows

TASKS = Path(__file__).parents[1] / "data" / "harbor"
COMMANDS = {
    "greeting.txt": ["echo (hello|goodbye) > greeting.txt"],
    "number.txt": ["cat number.txt", "echo (42|41) > next.txt"],
    "add.sh": ["sed -i s/-/(+|/)/ add.sh"],
}


def choose_command(request):
    """Returns what the model writes: the commands of the task that is asked for, then what ends the work."""
    text = str(request.messages)
    commands = next(commands for name, commands in COMMANDS.items() if name in text)
    done = sum(message["role"] == "tool" for message in request.messages)
    if done >= len(commands) and SUBMIT not in text:
        return "done"
    command = [*commands, SUBMIT][done]
    call = re.escape(f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>")
    return re.sub(r"\\\((\S+)\\\|(\S+)\\\)", r"(\1|\2)", call)


@dataclass
class EnvironmentTraining(Training):
    """A run of one epoch in an environment."""

    environment: dict | None = None

    def _build_settings(self, model):
        settings = super()._build_settings(model)
        del settings["workflow"], settings["finetuning"]["splits"]
        settings["eval"] = {"general": {"max_concurrency": 2}}  # a program takes seconds to start
        settings["environment"] = {**self.environment, "num_workers": 2}
        settings["trajectory_builders"]["builder"]["num_generations"] = 4
        settings["finetuning"] |= {"num_epochs": 1, "algorithm": {"_type": "grpo"}}
        return settings

    def check(self):
        rows = read_rows(self.folder / "runs" / "r", "SELECT data FROM episodes")
        episodes = [json.loads(data) for (data,) in rows]
        for episode in episodes:
            assert episode["outcome"] == "ok", f"{episode['outcome']}: {episode['reason']}"
        assert len({episode["reward"] for episode in episodes}) > 1, "some are better than others"
        assert max(len(episode["calls"]) for episode in episodes) >= 2


def train(name, choose, environment, folder):
    training = EnvironmentTraining(Path(folder), {}, choose=choose, max_model_len=16384, environment=environment)
    training.run()
    sys.stdout.write(f"  ok: {name} is trained\n")


with tempfile.TemporaryDirectory() as folder:
    kind, *more = sys.argv[1:]
    if kind == "openenv":
        (python,) = map(Path, more)
        subprocess.run([python.with_name("openenv"), "init", "echo_env", "--output-dir", folder], check=True)
        start = [str(python), "-m", "uvicorn", "--app-dir", f"{folder}/echo_env", "--port", "{port}", "server.app:app"]
        block = {"_type": "openenv", "command": start, "size": 12, "max_steps": 2}
        train("openenv's echo server", lambda request: quote("hello") + "( world)?", block, folder)
    else:
        for task in TASKS.iterdir():
            for number in range(4):
                shutil.copytree(task, Path(folder, "tasks", f"{task.name}-{number}"))
        block = {"_type": "harbor", "folder": f"{folder}/tasks", "sandbox": "process"}
        agent = {"agent": more[0]} if more else {}
        train(f"harbor with {more[0] if more else 'bash'}", choose_command, {**block, **agent}, folder)
