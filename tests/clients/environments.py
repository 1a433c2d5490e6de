"""Trains a tiny model in environments of others: `python -m tests.clients.environments KIND [PYTHON]`.

KIND is openenv, harbor, or verifiers with either of its interfaces; PYTHON is the interpreter that has the package.

A grammar decides what the tiny model calls, and its weights whether that is right.
"""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
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


MODULES = {
    "backward": """
import verifiers as vf

def load_environment():
    return vf.ReasoningGymEnv(gym="spell_backward", num_train_examples=12, num_eval_examples=1)
""",
    "guesses": """
import verifiers as vf
from datasets import Dataset

def count_hits(completion, answer):
    return sum(message["content"] == answer for message in completion if message["role"] == "assistant") / 2

class Guesses(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [vf.UserMessage(content="Once more.")]

def load_environment():
    rows = [{"question": f"Guess yes or no ({number}).", "answer": "yes"} for number in range(12)]
    return Guesses(max_turns=2, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[count_hits]))
""",
    "words": """
import verifiers.v1 as vf

class WordTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def is_right(self, trace):
        return float(trace.last_reply == "yes")

class Words(vf.Taskset[WordTask]):
    def load(self):
        for number in range(12):
            yield WordTask(vf.TaskData(prompt=f"Yes or no ({number})?", system_prompt="Be short."), self.config.task)

__all__ = ["Words"]
""",
}
"""Modules of verifiers: single turn and two turns, before 0.2, and a taskset of 0.4; its `openenv` is the package's."""


def spell(request):
    """Returns the pattern of the right answer and of a wrong one."""
    word = re.findall(r"\w+", request.messages[-1]["content"])[-1]
    return f"<answer>({word[::-1]}|{word})</answer>"


@dataclass
class EnvironmentTraining(Training):
    """A run of one epoch in an environment."""

    environment: dict | None = None
    num_calls: int = 2
    max_concurrency: int = 2

    def _build_settings(self, model):
        settings = super()._build_settings(model)
        del settings["workflow"], settings["finetuning"]["splits"]
        settings["eval"] = {"general": {"max_concurrency": self.max_concurrency}}  # a program takes seconds to start
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
        assert max(len(episode["calls"]) for episode in episodes) >= self.num_calls


def train(name, choose, environment, folder, **expected):
    training = EnvironmentTraining(
        Path(folder), {}, choose=choose, max_model_len=16384, environment=environment, **expected
    )
    training.run()
    sys.stdout.write(f"  ok: {name} is trained\n")


def build_echo_server(python, folder):
    """Returns the command of the server that OpenEnv makes, at `{port}`."""
    subprocess.run([python.with_name("openenv"), "init", "echo_env", "--output-dir", folder], check=True)
    return [str(python), "-m", "uvicorn", "--app-dir", f"{folder}/echo_env", "--port", "{port}", "server.app:app"]


@contextlib.contextmanager
def serve(command):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [part.replace("{port}", str(port)) for part in command]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def train_classic(block, folder):
    """Trains in the package's own environment of reasoning-gym, and in a game of two turns."""
    for name, choose, num_calls in (("backward", spell, 1), ("guesses", lambda _: "(yes|no)", 2)):
        train(f"verifiers {name}", choose, {**block, "name": name}, f"{folder}/{name}", num_calls=num_calls)


def train_tasks(block, folder, python):
    """Trains in a taskset of a single turn, and in the package's own taskset of OpenEnv."""
    train("verifiers words", lambda _: "(yes|no)", {**block, "name": "words"}, f"{folder}/words", num_calls=1)
    with serve(build_echo_server(python, folder)) as url:
        arguments = {"taskset": {"base_url": url, "resets": [{"seed": seed} for seed in range(12)]}}
        block = {**block, "name": "openenv", "arguments": {**arguments, "player": {"max_turns": 2}}}
        train(
            "verifiers openenv", lambda _: quote("hello") + "( world)?", block, f"{folder}/openenv", max_concurrency=1
        )


with tempfile.TemporaryDirectory() as folder:
    kind, *more = sys.argv[1:]
    if kind.startswith("verifiers"):
        (python,) = map(Path, more)
        for name, text in MODULES.items():
            Path(folder, f"{name}.py").write_text(text)
        block = {"_type": "verifiers", "python": str(python)}
        with contextlib.chdir(folder):
            train_classic(block, folder) if kind == "verifiers-classic" else train_tasks(block, folder, python)
    elif kind == "openenv":
        (python,) = map(Path, more)
        start = build_echo_server(python, folder)
        block = {"_type": "openenv", "command": start, "size": 12, "max_steps": 2}
        train("openenv's echo server", lambda request: quote("hello") + "( world)?", block, folder)
    else:
        for task in TASKS.iterdir():
            for number in range(4):
                shutil.copytree(task, Path(folder, "tasks", f"{task.name}-{number}"))
        block = {"_type": "harbor", "folder": f"{folder}/tasks", "sandbox": "process"}
        agent = {"agent": more[0]} if more else {}
        train(f"harbor with {more[0] if more else 'bash'}", choose_command, {**block, **agent}, folder)
