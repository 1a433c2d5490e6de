"""An environment of a project: guess the sum of two dice; some tasks do what environments should not do."""

import asyncio
import os
import random
import subprocess
import sys
import time

from reinforge import Environment, EnvironmentSource, Observation, PolicyFailure, StepResult
from reinforge.types.evaluation import EvalInputItem

TOOL = {"type": "function", "function": {"name": "roll", "parameters": {"type": "object", "properties": {}}}}


class Dice(EnvironmentSource):
    def __init__(self, kinds=("plain",), count=1):
        self.kinds, self.count = kinds, count

    def load(self):
        named = [(kind, i) for kind in self.kinds for i in range(self.count)]
        rows = [{"id": f"{kind}-{i}", "kind": kind, "question": f"q{i}"} for kind, i in named]
        return list(map(EvalInputItem.from_row, rows))

    def create(self):
        return DiceGame()


class DiceGame(Environment):
    """Each step rolls a die with the global generator; the reward is 1 if the reply names the number."""

    async def reset(self, item, seed):
        self.kind, self.rolls = item.full_dataset_entry["kind"], []
        self.tools = [TOOL] if self.kind == "tool" else []
        if self.kind in ("child", "child_fails"):
            self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        if self.kind in ("fails_at_reset", "child_fails"):
            raise OSError("no board")
        return Observation([{"role": "user", "content": f"{item.input_obj}: roll"}], self.tools)

    async def close(self):
        if self.kind == "child_fails":
            self.child.kill()
            self.child.wait()

    async def step(self, reply):
        self.rolls.append(random.randint(1, 6))
        if self.kind == "prints":
            sys.stdout.write("a package prints\n")
            sys.stdout.flush()
        if self.kind == "raises":
            raise RuntimeError("the board broke")
        if self.kind == "hangs":
            time.sleep(600)
        if self.kind == "waits":
            await asyncio.sleep(600)
        if self.kind == "exits":
            os._exit(7)
        if self.kind == "leaves":
            sys.exit("the game is over")
        if self.kind == "floods":
            self.flood = bytearray(3 << 30)
        if self.kind == "illegal":
            raise PolicyFailure("illegal move", output=reply.text)
        await asyncio.sleep(0)
        reward = float("nan") if self.kind == "nan" else float(reply.text == "six" or len(reply.tool_calls))
        said = Observation([{"role": "user", "content": f"rolled {self.rolls}"}], self.tools)
        done = self.kind != "endless" and len(self.rolls) == 3
        return StepResult(said, reward, done, {"last": self.rolls[-1], "name": "die"})
