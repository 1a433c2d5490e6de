"""What 1 to 512 workers would do: a virtual clock, the measured costs of each step, and the router that a run uses.

    python benchmarks/scale_simulation.py [--workers 1,2,8,64,512] [--model 1.7m|135m]
    python benchmarks/scale_simulation.py measure       the costs of this machine, as `Costs` has them

Every worker decodes all its replies at once: a step takes `step_s + sequence_s` for each of them, and a prompt delays
them by `prompt_token_s` for each of its tokens that the worker has not cached. The driver is one interpreter: it spends
`call_s` on each model call and `episode_s` on each episode, one after the other, and `ray_s` on each message between it
and the workers. The journal is a thread of the driver, whose `journal_s` is the interpreter's too, and a disk that
syncs a group of episodes at a time. Messages go through one link of the driver with a latency and a bandwidth.

The policies are keys of the same `EngineRouter`: of the prompt (siblings share a worker: what a run does), of
the episode (only its own turns do), and of the call (every call goes to the least busy worker).
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, refuse_if_busy
from reinforge.scale.engine_group import EngineRouter


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a run spends, on one core of the machine that `measure` ran on.

    Attributes:
        step_s, sequence_s: One decoding step of a worker, and each sequence in it.
        prompt_token_s: One token of a prompt that is not cached.
        call_s, episode_s: The driver's time for one model call, and for the rest of an episode with its reward.
        journal_s: The journal's share of the driver's interpreter for one episode.
        sync_s: One sync of the disk, which a group of episodes shares.
        ray_s: The driver's time for one call of a Ray actor and its answer.
        latency_s: From the driver to a worker or back.
        bytes_per_s: The driver's network.
    """

    step_s: float
    sequence_s: float
    prompt_token_s: float
    call_s: float
    episode_s: float
    journal_s: float
    sync_s: float
    ray_s: float
    latency_s: float = 0.0003
    bytes_per_s: float = 1.25e9


_DRIVER = {"call_s": 7.7e-5, "episode_s": 1.1e-4, "journal_s": 3e-5, "sync_s": 1.5e-3, "ray_s": 3.2e-4}
MODELS = {
    "1.7m": Costs(step_s=1.8e-3, sequence_s=3.8e-5, prompt_token_s=5.9e-5, **_DRIVER),
    "135m": Costs(step_s=0.0, sequence_s=9.5e-3, prompt_token_s=6e-3, **_DRIVER),
}
"""Of models with 1.7 and 135 million parameters: what `measure` printed, in CPU time; 135m decodes the 105 tokens a
second of one core that `sampler.py --size 135m` printed, and computes its prompts at 45 GFLOP/s."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is run.

    Attributes:
        siblings: Episodes per example.
        turns: Model calls per episode.
        prompt, answer, message: Tokens of the first prompt, of each reply, and of what the environment adds.
        in_flight: Episodes in flight per worker.
        rounds: Episodes in all, in multiples of those in flight.
    """

    siblings: int = 8
    turns: int = 3
    prompt: int = 200
    answer: int = 48
    message: int = 24
    in_flight: int = 32
    rounds: int = 6


BYTES_PER_TOKEN = 40
"""Of a reply on its way to the driver: the ids of its prompt and of its tokens, with log-probs and text."""
SEED_SPREAD = 7


@dataclass(slots=True)
class Reply:
    """One reply that a worker samples."""

    episode: int
    turn: int
    key: str
    context: int
    num_tokens: int


class SimulatedWorker:
    """Decodes all replies together; `progress` counts the steps that it has made."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self.progress, self.since_s, self.busy_s = 0.0, 0.0, 0.0
        self.running: list[tuple[float, int, Reply]] = []
        self.cached: dict[str, int] = {}
        self.num_prompt_tokens = 0
        self.number = 0
        self.version = 0

    def advance(self, now_s: float) -> None:
        """Makes the steps until now."""
        if self.running and now_s > self.since_s:
            self.progress += (now_s - self.since_s) / self.step_s
            self.busy_s += now_s - self.since_s
        self.since_s = max(self.since_s, now_s)

    @property
    def step_s(self) -> float:
        return self.costs.step_s + self.costs.sequence_s * len(self.running)

    def add(self, now_s: float, reply: Reply, prompt_key: str) -> None:
        """Begins a reply; its prompt delays the others."""
        self.advance(now_s)
        episode = f"episode {reply.episode}"
        new = reply.context - max(self.cached.get(episode, 0), self.cached.get(prompt_key, 0))
        self.num_prompt_tokens += new
        delay_s = new * self.costs.prompt_token_s
        self.busy_s += delay_s
        self.since_s += delay_s
        self.cached[episode] = reply.context + reply.num_tokens
        if reply.turn == 0:
            self.cached[prompt_key] = reply.context
        self.number += 1
        heapq.heappush(self.running, (self.progress + reply.num_tokens, self.number, reply))

    def next_end_s(self) -> float:
        """Returns when the first reply ends if nothing else arrives."""
        return self.since_s + max(0.0, self.running[0][0] - self.progress) * self.step_s

    def finish(self) -> Reply:
        """Takes out the reply that has ended."""
        return heapq.heappop(self.running)[2]


class Server:
    """One resource that works on one thing after the other."""

    def __init__(self) -> None:
        self.free_s = self.busy_s = 0.0

    def serve(self, now_s: float, seconds: float) -> float:
        """Returns when work that arrives now is done."""
        self.free_s = max(self.free_s, now_s) + seconds
        self.busy_s += seconds
        return self.free_s


@dataclass
class Outcome:
    """What a simulation found; shares are of the whole time."""

    num_workers: int
    seconds: float
    num_episodes: int
    workers: float
    driver: float
    network: float
    disk: float
    prompt_tokens: int
    imbalance: float

    @property
    def rate(self) -> float:
        return self.num_episodes / self.seconds


Key = Callable[[int, int, int], str]
POLICIES: dict[str, Key] = {
    "siblings to one worker": lambda group, episode, turn: f"group {group}",
    "episodes to one worker": lambda group, episode, turn: f"episode {episode}",
    "calls to the least busy": lambda group, episode, turn: f"call {episode} {turn}",
}


class Simulation:
    """One collection with a number of workers.

    Args:
        costs: Seconds of each step.
        load: What is run.
        num_workers: How many workers.
        key: The router's key of a call, by group, episode and turn.
    """

    def __init__(self, costs: Costs, load: Load, num_workers: int, key: Key):
        self.costs, self.load, self.key = costs, load, key
        self.router = EngineRouter(range(num_workers))
        self.workers = [SimulatedWorker(costs) for _ in range(num_workers)]
        self.driver, self.network, self.disk = Server(), Server(), Server()
        self.events: list[tuple[float, int, int, Any]] = []
        self.count = 0
        self.num_done, self.num_started = 0, 0
        self.num_episodes = load.in_flight * num_workers * load.rounds
        self.now_s = 0.0

    def run(self) -> Outcome:
        """Returns what happens until the last episode has ended."""
        for _ in range(min(self.num_episodes, self.load.in_flight * len(self.workers))):
            self._start_episode(0.0)
        while self.events:
            self.now_s, _, kind, what = heapq.heappop(self.events)
            if kind == 0:
                self._arrive(*what)
            elif kind == 1:
                self._end_step(*what)
            else:
                self._receive(what)
        seconds = self.now_s
        busy = [worker.busy_s for worker in self.workers]
        return Outcome(
            len(self.workers),
            seconds,
            self.num_done,
            statistics.fmean(busy) / seconds,
            self.driver.busy_s / seconds,
            self.network.busy_s / seconds,
            self.disk.busy_s / seconds,
            sum(worker.num_prompt_tokens for worker in self.workers),
            max(busy) / statistics.fmean(busy),
        )

    def _push(self, at_s: float, kind: int, what: Any) -> None:
        self.count += 1
        heapq.heappush(self.events, (at_s, self.count, kind, what))

    def _start_episode(self, now_s: float) -> None:
        if self.num_started < self.num_episodes:
            self.num_started += 1
            self._call(now_s, self.num_started - 1, 0)

    def _call(self, now_s: float, episode: int, turn: int) -> None:
        """The driver's half of a model call before it is sent."""
        load, costs, group = self.load, self.costs, episode // self.load.siblings
        context = load.prompt + turn * (load.answer + load.message)
        num_tokens = max(1, load.answer + (hash((episode, turn)) % (2 * SEED_SPREAD + 1)) - SEED_SPREAD)
        key = self.key(group, episode, turn)
        at_s = self.driver.serve(now_s, (costs.call_s + costs.ray_s) / 2)
        at_s = self.network.serve(at_s, 4 * context / costs.bytes_per_s)
        number = self.router.acquire(key)
        assert number is not None
        reply = Reply(episode, turn, key, context, num_tokens)
        self._push(at_s + costs.latency_s, 0, (number, reply, f"group {group}"))

    def _arrive(self, number: int, reply: Reply, prompt_key: str) -> None:
        worker = self.workers[number]
        worker.add(self.now_s, reply, prompt_key)
        self._plan(number)

    def _plan(self, number: int) -> None:
        worker = self.workers[number]
        worker.version += 1
        if worker.running:
            self._push(worker.next_end_s(), 1, (number, worker.version))

    def _end_step(self, number: int, version: int) -> None:
        worker = self.workers[number]
        if version != worker.version:  # something arrived meanwhile
            return
        worker.advance(self.now_s)
        reply = worker.finish()
        self.router.release(number)
        num_bytes = BYTES_PER_TOKEN * reply.num_tokens + 8 * reply.context
        at_s = self.network.serve(self.now_s, num_bytes / self.costs.bytes_per_s)
        self._push(at_s + self.costs.latency_s, 2, reply)
        self._plan(number)

    def _receive(self, reply: Reply) -> None:
        """The driver's half of a model call after its answer, and the end of an episode."""
        costs, load, driver = self.costs, self.load, self.driver
        at_s = driver.serve(self.now_s, (costs.call_s + costs.ray_s) / 2)
        if reply.turn + 1 < load.turns:
            self._call(at_s, reply.episode, reply.turn + 1)
            return
        at_s = driver.serve(at_s, costs.episode_s)
        driver.serve(at_s, costs.journal_s)
        if self.disk.free_s <= at_s:  # what has come during one sync shares the next
            self.disk.serve(at_s, costs.sync_s)
        self.num_done += 1
        self.now_s = max(self.now_s, at_s)
        self._start_episode(at_s)


def simulate(costs: Costs, load: Load, num_workers: int, policy: str) -> Outcome:
    """Returns what a collection would be."""
    return Simulation(costs, load, num_workers, POLICIES[policy]).run()


def print_growth(costs: Costs, load: Load, counts: list[int]) -> None:
    header = f"{'workers':>8} {'episodes/s':>11} {'x one':>7} {'workers':>8} {'driver':>7} {'network':>8} {'disk':>6}"
    print(f"\n{header}   busy\n")
    first = None
    for count in counts:
        found = simulate(costs, load, count, "siblings to one worker")
        first = first or found.rate
        print(
            f"{count:>8} {found.rate:>11.1f} {found.rate / first:>7.1f} {found.workers:>8.0%} {found.driver:>7.0%} "
            f"{found.network:>8.1%} {found.disk:>6.0%}"
        )
    per_episode = load.turns * (costs.call_s + costs.ray_s) + costs.episode_s + costs.journal_s
    print(f"\none driver: {1e3 * per_episode:.2f} ms an episode, so at most {1 / per_episode:,.0f} episodes/s")
    tokens = load.turns * (
        8 * (load.prompt + load.turns * (load.answer + load.message)) + BYTES_PER_TOKEN * load.answer
    )
    print(f"network: {tokens / 1024:.1f} KiB an episode, so at most {costs.bytes_per_s / tokens:,.0f} episodes/s")


def print_policies(costs: Costs, load: Load, counts: list[int]) -> None:
    print(f"\n{'workers':>8} {'policy':<26} {'episodes/s':>11} {'prompt tokens':>14} {'busiest / mean worker':>22}\n")
    for count in counts:
        for policy in POLICIES:
            found = simulate(costs, load, count, policy)
            print(f"{count:>8} {policy:<26} {found.rate:>11.1f} {found.prompt_tokens:>14,} {found.imbalance:>22.2f}")


# Measurements.


def measure(size: str) -> Costs:
    """Returns the costs of this machine."""
    step_s, sequence_s, prompt_token_s = measure_sampler(size)
    call_s, episode_s, journal_s = measure_driver()
    return Costs(step_s, sequence_s, prompt_token_s, call_s, episode_s, journal_s, measure_sync(), measure_ray())


def measure_sampler(size: str) -> tuple[float, float, float]:
    """Returns the seconds of a step, of each sequence in it, and of a token of a prompt, with one thread."""
    import torch

    from benchmarks.sampler import SIZES, random_model
    from reinforge.config.policy import PolicyConfig
    from reinforge.engine import Engine
    from reinforge.types.request import ModelRequest, SamplingParams

    async def sample(engine: Engine, count: int, prompt: int, tokens: int) -> float:
        requests = [
            ModelRequest(
                [],
                SamplingParams(max_tokens=tokens, seed=n),
                prompt=tuple(rng.randrange(4, 300) for _ in range(prompt)),  # none is cached
            )
            for n in range(count)
        ]
        started = time.process_time()  # of one thread: what it takes alone on a core
        await asyncio.gather(*(engine.policy.sample(each) for each in requests))
        return time.process_time() - started

    async def run(folder: str) -> tuple[float, float, float]:
        engine = stack.enter_context(Engine.load(PolicyConfig(model=folder), seed=0, device="cpu"))
        await engine.policy.publish(0)
        await sample(engine, 4, 16, 16)

        async def best(count: int, prompt: int, tokens: int) -> float:
            return min([await sample(engine, count, prompt, tokens) for _ in range(3)])

        few, many, tokens = 1, 32, 48
        steps = {
            count: (await best(count, 8, tokens) - await best(count, 8, 1)) / (tokens - 1) for count in (few, many)
        }
        sequence_s = max(0.0, (steps[many] - steps[few]) / (many - few))
        prompt_token_s = (await best(4, 400, 1) - await best(4, 8, 1)) / (4 * 392)
        return max(1e-6, steps[few] - sequence_s), sequence_s, max(1e-9, prompt_token_s)

    rng = random.Random(0)
    torch.set_num_threads(1)
    with random_model(SIZES[size]) as folder, ExitStack() as stack:
        return asyncio.run(run(folder))


def measure_driver() -> tuple[float, float, float]:
    """Returns the driver's CPU seconds of a model call, of the rest of an episode, and of its journal row."""
    from benchmarks import harness_overhead as harness

    def make_agent(turns: int) -> Any:
        async def agent(item, llm, context):
            messages = [{"role": "user", "content": item.input_obj}]
            for _ in range(turns):
                reply = await llm.chat.completions.create(messages=messages)
                messages = [*messages, reply.choices[0].message, {"role": "user", "content": "and then?"}]
            return reply.choices[0].message.content

        return agent

    def seconds_of(turns: int, writer: Any = None) -> float:
        from unittest import mock

        found = []
        for _ in range(5):
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time()
                if writer is None:
                    asyncio.run(harness.run_round(Path(folder) / "r", make_agent(turns)))
                else:
                    with mock.patch("reinforge.runs.journal.journal.JournalWriter", writer):
                        asyncio.run(harness.run_round(Path(folder) / "r", make_agent(turns)))
                found.append(time.process_time() - started)
        return min(found[1:]) / (harness.EXAMPLES * harness.GENERATIONS)

    from benchmarks.durability import Forgetful

    one, three, bare = seconds_of(1), seconds_of(3), seconds_of(1, Forgetful)
    call_s = (three - one) / 2
    journal_s = max(0.0, one - bare)
    return call_s, max(0.0, one - call_s - journal_s), journal_s


def measure_sync() -> float:
    """Returns the seconds of one sync of 256 KiB to disk."""
    import os

    found = []
    with tempfile.NamedTemporaryFile(dir=".") as file:
        for _ in range(20):
            file.write(b"x" * 2**18)
            started = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def measure_ray() -> float:
    """Returns the driver's CPU seconds of one call of an actor."""
    from reinforge.scale.ray.cluster import RayConnection

    connection = RayConnection(None, 1, {"CPU": 1.0})
    import ray

    @ray.remote
    class Echo:
        async def answer(self, value):
            return value

    async def call(count: int) -> float:
        started = time.process_time()
        await asyncio.gather(*(actor.answer.remote(payload) for _ in range(count)))
        return (time.process_time() - started) / count

    actor, payload = Echo.options(max_concurrency=1000).remote(), {"text": "x" * 1000, "ids": list(range(300))}
    ray.get(actor.answer.remote(payload))
    found = min(asyncio.run(call(500)) for _ in range(3))
    connection.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["simulate", "measure"], default="simulate")
    parser.add_argument("--model", choices=list(MODELS), default="1.7m")
    parser.add_argument("--workers", default="1,2,8,64,512")
    parser.add_argument("--force", action="store_true", help="measure although others use the machine")
    for each in fields(Load):
        parser.add_argument(f"--{each.name}", type=int, default=each.default)
    args = parser.parse_args()
    if args.what == "measure":
        refuse_if_busy()
        print(describe())
        print(measure(args.model))
        return
    load = Load(**{each.name: getattr(args, each.name) for each in fields(Load)})
    counts = [int(each) for each in args.workers.split(",")]
    print(f"{args.model}: {MODELS[args.model]}\n{load}")
    print_growth(MODELS[args.model], load, counts)
    print("\nwithout a limit of the driver:")
    free = replace(MODELS[args.model], call_s=0.0, episode_s=0.0, journal_s=0.0, ray_s=0.0)
    print_policies(free, load, counts)


if __name__ == "__main__":
    main()
