"""Trains a tiny model in environments of others: `python -m tests.clients.environments KIND [MORE]`.

KIND is openenv, harbor, verifiers with either of its interfaces, or a package of games or tasks. MORE is the
interpreter that has the package, or the agent of Harbor. A grammar decides what the tiny model writes, and its weights
whether that is right.
"""

import asyncio
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

from reinforge.types.seeding import stable_random
from tests.clients.coding_agents import SUBMIT, quote
from tests.clients.training import Training
from tests.environments.playing import play, transcript
from tests.journal_rows import read_rows

TASKS = Path(__file__).parents[1] / "data" / "harbor"
COMMANDS = {
    "greeting.txt": ["echo (hello|goodbye) > greeting.txt"],
    "number.txt": ["cat number.txt", "echo (42|41) > next.txt"],
    "add.sh": ["sed -i s/-/(+|/)/ add.sh"],
}
WAYS = {"south": (1, 0), "north": (-1, 0), "east": (0, 2), "west": (0, -2)}
REPLAYED = ("TicTacToe-v0", "Nim-v0", "KuhnPoker-v0", "ConnectFour-v0", "GuessTheNumber-v0", "Countdown-v0")


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


def walk_along_the_cliff(request):
    """Walks to the goal of CliffWalking; how long it stays at the start is up to the weights."""
    rows = request.messages[-1]["content"].split("\n\n")[-1].splitlines()
    [(row, column)] = [(row, line.index("P")) for row, line in enumerate(rows) if "P" in line]
    if column == len(rows[0]) - 1:
        return "down"
    return "(up|left)" if row == len(rows) - 1 else "right"


def drive(request):
    """Drives the taxi as what it is shown says; which way its first move is, is up to the weights."""
    text = request.messages[-1]["content"].split("\n\n")[-1]
    *board, says = text.splitlines()
    where, goal = re.search(r"passenger is (?:at|in) (\w|the taxi) and wants to go to (\w)", says).groups()
    here = re.search(r"You are at (\w)", says)
    wanted = goal if where == "the taxi" else where
    if here and here[1] == wanted:
        return "dropoff" if where == "the taxi" else "pickup"
    if len(request.messages) == 1:
        return f"({'|'.join(WAYS)})"
    [start] = [(row, line.index("P", 1)) for row, line in enumerate(board) if "P" in line]
    paths, seen = [[start]], {start}
    for path in paths:
        row, column = path[-1]
        if board[row][column] == wanted:
            break
        for down, right in WAYS.values():
            place = (row + down, column + right)
            is_wall = "|" in board[row][column + right // 2] or board[place[0]][place[1]] in "+-"
            if place not in seen and not is_wall:
                seen.add(place)
                paths.append([*path, place])
    (row, column), (next_row, next_column) = path[:2]
    return next(name for name, way in WAYS.items() if way == (next_row - row, next_column - column))


def answer(request):
    """Returns the right answer or a wrong one, of two datasets of reasoning-gym."""
    question = request.messages[-1]["content"]
    if (word := re.search(r"backward \(example: sun -> nus\): (\w+)", question)) is not None:
        return f"({word[1][::-1]}|nus)"
    total = sum(int(sign + number) for sign, number in re.findall(r"(-?) ?(\d+)", question.replace("+ -", "- ")))
    return f"({total}|{total + 1})"


@dataclass
class Played:
    """An environment that is trained in: what the model writes, and the rewards that its episodes may have."""

    choose: object
    lowest: float
    highest: float
    settings: dict


GUESS = r"\[([1-9]|1[0-9]|20)\]"
GAMES = {
    "textarena": {
        "TicTacToe-v0": Played(lambda request: r"\[[0-8]\]", -1, 1, {}),
        "GuessTheNumber-v0": Played(lambda request: GUESS, 0, 1, {}),
    },
    "gymnasium": {
        "FrozenLake-v1": Played(lambda request: "(down|right)", 0, 1, {"arguments": {"is_slippery": False}}),
        "Taxi-v4": Played(drive, 1, 17, {}),
        "Blackjack-v1": Played(lambda request: "(stick|hit)", -1, 1, {}),
        "CliffWalking-v1": Played(walk_along_the_cliff, -40, -13, {}),
    },
    "reasoning_gym": {
        "spell_backward": Played(answer, 0, 1, {}),
        "chain_sum": Played(answer, 0, 1, {"size": 60, "levels": 3}),
    },
}


@dataclass
class EnvironmentTraining(Training):
    """A run of one epoch in an environment.

    Attributes:
        environment: Its block of the configuration.
        lowest: The lowest reward that an episode may have; None: any.
        highest: The highest one.
    """

    environment: dict | None = None
    max_concurrency: int = 2
    lowest: float = float("-inf")
    highest: float = float("inf")

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
            assert self.lowest <= episode["reward"] <= self.highest, episode["reward"]
        assert len({episode["reward"] for episode in episodes}) > 1, "some are better than others"
        self.num_calls = max(len(episode["calls"]) for episode in episodes)


def train(name, choose, environment, folder, *, min_calls=2, **expected):
    training = EnvironmentTraining(Path(folder), {}, choose=choose, environment=environment, **expected)
    training.run()
    assert training.num_calls >= min_calls
    sys.stdout.write(f"  ok: {name} is trained; up to {training.num_calls} replies an episode\n")


def reply(request):
    """Returns a move in a form that the game shows, the same for the same conversation."""
    rng = stable_random(0, "move", str(request.messages))
    form = rng.choice(re.findall(r"\[(?!Player)[a-z ]*\d[\d ]*\]", str(request.messages)) or ["[check]"])
    return re.sub(r"\d", lambda _: rng.choice("0123"), form) if rng.random() < 0.5 else form


async def replay(folder):
    """Plays 64 games at a time, twice: equal seeds give equal games, also in another number of processes."""
    for name in REPLAYED:
        game = {"_type": "textarena", "name": name, "size": 32}
        first, again = [
            await play(folder, {**game, "num_workers": count}, reply, generations=2, concurrency=64) for count in (2, 1)
        ]
        assert all(record.outcome.value == "ok" for record in first), {record.reason for record in first}
        assert list(map(transcript, first)) == list(map(transcript, again)), name
        is_fixed = name == "Countdown-v0"  # whatever its seed
        assert is_fixed or len({str(transcript(record)) for record in first}) > 8, f"{name}: the games are alike"
    sys.stdout.write(f"  ok: 64 games at a time replay bit for bit: {', '.join(REPLAYED)}\n")


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
        train(f"verifiers {name}", choose, {**block, "name": name}, f"{folder}/{name}", min_calls=num_calls)


def train_tasks(block, folder, python):
    """Trains in a taskset of a single turn, and in the package's own taskset of OpenEnv."""
    train("verifiers words", lambda _: "(yes|no)", {**block, "name": "words"}, f"{folder}/words", min_calls=1)
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
    elif kind == "harbor":
        for task in TASKS.iterdir():
            for number in range(4):
                shutil.copytree(task, Path(folder, "tasks", f"{task.name}-{number}"))
        block = {"_type": "harbor", "folder": f"{folder}/tasks", "sandbox": "process"}
        agent = {"agent": more[0]} if more else {}
        train(f"harbor with {more[0] if more else 'bash'}", choose_command, {**block, **agent}, folder)
    else:
        if kind == "textarena":
            asyncio.run(replay(Path(folder)))
        for name, played in GAMES[kind].items():
            block = {"_type": kind, "name": name, "size": 12, **played.settings}
            rewards = {"lowest": played.lowest, "highest": played.highest}
            least = 1 if kind == "reasoning_gym" else 2
            train(f"{kind}:{name}", played.choose, block, Path(folder, name), min_calls=least, **rewards)
