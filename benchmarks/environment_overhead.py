"""What an episode of an environment costs beside the model: reasoning-gym here against the bare package.

    python benchmarks/environment_overhead.py

10,000 episodes of `spell_backward`: the bare package makes each item and scores an answer; here an episode is opened,
reset, stepped and closed in a process of its own kind, 64 at a time, with one worker and with two. Prints milliseconds
an episode, and the difference. Needs the package reasoning-gym.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, refuse_if_busy
from reinforge.config.loader import build_config
from reinforge.environments.host import EnvironmentHost, open_host
from reinforge.environments.reasoning_gym import ReasoningGym, ReasoningGymConfig
from reinforge.rollout.isolation.worker_protocol import dump_item

TASK, EPISODES, CONCURRENCY, ROUNDS = "spell_backward", 10_000, 64, 5


def time_bare() -> float:
    dataset = ReasoningGym(ReasoningGymConfig(name=TASK, size=EPISODES)).datasets[TASK]
    started = time.perf_counter()
    for index in range(EPISODES):
        entry = dataset[index]
        dataset.score_answer("answer", entry)
    return (time.perf_counter() - started) / EPISODES * 1000


async def time_here(num_workers: int) -> float:
    block = {"_type": "reasoning_gym", "name": TASK, "size": EPISODES, "num_workers": num_workers}
    loaded = build_config({"environment": block})
    async with open_host(loaded.config.environment, "reasoning_gym", Path.cwd()) as host:
        items = [dump_item(item) for item in await host.load()]
        await play(host, items[:CONCURRENCY])  # the workers have started
        waiting = iter((items * (EPISODES // len(items) + 1))[:EPISODES])
        started = time.perf_counter()
        await asyncio.gather(*(play(host, waiting) for _ in range(CONCURRENCY)))
        return (time.perf_counter() - started) / EPISODES * 1000


async def play(host: EnvironmentHost, items) -> None:
    for item in items:
        environment = host.open()
        await environment.reset(item, 0)
        await environment.step({"text": "answer", "tool_calls": []})
        environment.close()


def main() -> None:
    print(describe())
    refuse_if_busy()
    found = {"bare": [], "one worker": [], "two workers": []}
    for _ in range(ROUNDS):
        found["bare"].append(time_bare())
        found["one worker"].append(asyncio.run(time_here(1)))
        found["two workers"].append(asyncio.run(time_here(2)))
    bare = statistics.median(found["bare"])
    for name, times in found.items():
        spread = f"[{min(times):.3f}, {max(times):.3f}]"
        print(f"{name:<12} {statistics.median(times):.3f} ms {spread}, {statistics.median(times) - bare:+.3f} ms")


if __name__ == "__main__":
    main()
