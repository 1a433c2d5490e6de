"""What grows with the size of a run: the journal of a million episodes, and ten thousand episodes that wait.

    python benchmarks/scale.py journal [--episodes 1000000] [--chars 1000] [--folder FOLDER]
    python benchmarks/scale.py waiting [--episodes 10000]

journal   A short real run (the demo) is stopped; the same run then gets a million more episodes of its first epochs,
          and the stages and snapshots of the 1,500 epochs that they would have been. Measured: `runs show`, and
          `--resume` up to its first new episode, each as a process of its own, for the run before and after. FOLDER
          keeps the run for later calls.
waiting   Episodes whose model does not answer, all in flight at once, in the event loop of a run: memory for each, as
          Python's allocator counts it, and of the process. "An agent alone" is a task that asks the same model without
          a run: its frames, its wait and its messages, which an episode has too.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import gc
import json
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil

from benchmarks.machine import describe, refuse_if_busy

EPISODES_PER_EPOCH = 640
ROUNDS = 3
COMMAND = [sys.executable, "-m", "reinforge"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["journal", "waiting"])
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--chars", type=int, default=1000, help="characters of each episode's JSON")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--force", action="store_true", help="run although others use the machine")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    if args.what == "waiting":
        measure_waiting(args.episodes or 10_000)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure_journal(args.folder or Path(folder), args.episodes or 1_000_000, args.chars)


# The journal.


def measure_journal(folder: Path, num_episodes: int, chars: int) -> None:
    small, large = folder / "small", folder / "large"
    if not small.exists():
        from reinforge.tasks.tic_tac_toe import DEMO

        options = ["--run_name", "small", "-o", "finetuning.output_dir", str(folder), "--max_tokens", "6000"]
        done = subprocess.run([*COMMAND, "finetune", str(DEMO), *options], capture_output=True, text=True)
        assert done.returncode == 5, done.stdout + done.stderr
    if not large.exists():
        shutil.copytree(small, large)
        started = time.perf_counter()
        inflate(large / "run.sqlite", num_episodes, chars)
        print(f"wrote the large journal in {time.perf_counter() - started:.0f} s")
    for run in (small, large):
        size = (run / "run.sqlite").stat().st_size / 2**20
        print(f"{run.name}: {count_rows(run):,} episodes, {size:,.0f} MiB")
        for what, measure in (("runs show", measure_show), ("--resume ", measure_resume)):
            found = [measure(run) for _ in range(ROUNDS)]
            seconds, cpu_s = (min(each) for each in zip(*found, strict=True))
            print(f"  {what}  {seconds:.2f} s, {cpu_s:.2f} s of CPU, with the start of Python", flush=True)


def count_rows(run: Path) -> int:
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as db:
        return int(db.execute("SELECT count(*) FROM episodes").fetchone()[0])


def measure_command(arguments: list[str], code: int = 0) -> tuple[float, float]:
    """Returns the seconds of one command and those of its CPU."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == code, done.stdout + done.stderr
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure_show(run: Path) -> tuple[float, float]:
    """Returns the seconds of `runs show`."""
    return measure_command(["runs", "show", str(run)])


def measure_resume(run: Path) -> tuple[float, float]:
    """Returns the seconds until a resumed run has finished one more episode; the run is a copy."""
    with tempfile.TemporaryDirectory(dir=run.parent) as folder:
        copy = Path(folder) / run.name
        subprocess.run(["cp", "-r", "--reflink=auto", str(run), str(copy)], check=True)
        return measure_command(
            ["finetune", "--resume", str(copy), "--project_root", str(find_project()), "--max_tokens", "1"], code=5
        )


def find_project() -> Path:
    """Returns the folder of the demo's code."""
    from reinforge.tasks.tic_tac_toe import DEMO

    return Path(DEMO).parent


def inflate(database: Path, num_episodes: int, chars: int) -> None:
    """Adds episodes to a journal, and the rows of the epochs that they would have been."""
    from reinforge.runs.journal.packing import EpisodePacker, unpack_episode
    from reinforge.runs.journal.schema import insert_row

    num_epochs = num_episodes // EPISODES_PER_EPOCH
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN")
        [[model]] = db.execute("SELECT data FROM episodes WHERE phase = 'collect' LIMIT 1").fetchall()
        data = EpisodePacker(pad(unpack_episode(model), chars)).compress()
        stages = db.execute("SELECT stage, at_s, data FROM stages LIMIT 6").fetchall()
        [[state]] = db.execute("SELECT data FROM snapshots ORDER BY epoch DESC LIMIT 1").fetchall()
        first = db.execute("SELECT coalesce(min(epoch), 0) FROM snapshots").fetchone()[0]
        for epoch in range(num_epochs):  # before the first epoch of the real run, which resumes behind them
            past = first - 1 - num_epochs + epoch
            for number in range(EPISODES_PER_EPOCH):
                example, generation = divmod(number, 8)
                key = f"collect/{past}/0/{example}/{generation}"
                row = {"key": key, "phase": "collect", "epoch": past, "round": 0, "example_id": str(example)}
                insert_row(
                    db,
                    "episodes",
                    **row,
                    generation=generation,
                    attempt=0,
                    outcome="ok",
                    reward=0.5,
                    scores="{}",
                    data=data,
                )
            for stage, at_s, text in stages:
                insert_row(db, "stages", epoch=past, stage=stage, at_s=at_s, data=text)
            insert_row(db, "snapshots", epoch=past, version=0, checkpoint=None, at_s=0.0, data=state)
        db.execute("COMMIT")


def pad(episode: dict[str, Any], chars: int) -> dict[str, Any]:
    """Returns an episode that takes about that many bytes when it is packed."""
    text = json.dumps(episode)
    if len(text) > chars:
        episode["calls"] = []
        text = json.dumps(episode)
    episode["output"] = base64.b85encode(random.Random(0).randbytes(max(0, chars - len(text)))).decode()
    return episode


# Waiting episodes.


class Silent:
    """A model that does not answer until it is told to."""

    is_policy, model_name = True, "silent"

    def __init__(self) -> None:
        self.answered, self.num_waiting = asyncio.Event(), 0

    async def sample(self, request):
        from reinforge.types.request import ModelReply

        self.num_waiting += 1
        await self.answered.wait()
        return ModelReply({"role": "assistant", "content": "a"}, "stop", None)


async def ask(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
    return reply.choices[0].message.content


async def ask_alone(model: Silent) -> Any:
    return await model.sample([{"role": "user", "content": "question"}])


async def score(record):
    record.reward = 1.0


async def run_alone(model: Silent, count: int) -> None:
    await asyncio.gather(*[asyncio.create_task(ask_alone(model)) for _ in range(count)])


async def run_episodes(model: Silent, count: int, concurrency: int) -> None:
    from reinforge.config.schema import LimitsConfig, OutcomesConfig, SamplingConfig
    from reinforge.rollout.runner import EpisodeRunner
    from reinforge.rollout.workflow import bind_workflow
    from reinforge.types.episode import EpisodeKey
    from reinforge.types.evaluation import EvalInputItem

    settings = {"sampling": SamplingConfig(), "limits": LimitsConfig(), "outcomes": OutcomesConfig(retries=0)}
    runner = EpisodeRunner(bind_workflow(ask), {"agent": model}, **settings, run_seed=0, max_concurrency=concurrency)
    item = EvalInputItem(id="0", input_obj="question", expected_output_obj="a", full_dataset_entry={})
    episodes = [(EpisodeKey("collect", 0, "0", number), item) for number in range(count)]
    await runner.run(episodes, score, lambda record: None)


async def measure_flight(run: Callable[[Silent], Coroutine[Any, Any, None]], num_waiting: int) -> tuple[float, float]:
    """Returns the bytes that are added until so many wait for the model: of Python's allocator, and of the process."""
    model = Silent()
    gc.collect()
    before, resident = tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss
    work = asyncio.create_task(run(model))
    while model.num_waiting < num_waiting:
        await asyncio.sleep(0.01)
    gc.collect()
    after, now = tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss
    model.answered.set()
    await work
    return after - before, now - resident


def measure_waiting(num_episodes: int) -> None:
    from reinforge.rollout.isolation.containment import create_loop

    loop = create_loop()

    def measure(run: Callable[[Silent], Coroutine[Any, Any, None]], num_waiting: int) -> float:
        """Prints and returns the bytes of each, of Python's allocator."""
        _, resident = loop.run_until_complete(measure_flight(run, num_waiting))
        tracemalloc.start()
        traced, _ = loop.run_until_complete(measure_flight(run, num_waiting))
        tracemalloc.stop()
        print(f"{traced / num_episodes:,.0f} bytes each, {resident / num_episodes:,.0f} of the process")
        return traced / num_episodes

    loop.run_until_complete(measure_flight(lambda model: run_episodes(model, 100, 100), 100))
    print(f"{num_episodes:,} agents alone that wait for the model: ", end="")
    alone = measure(lambda model: run_alone(model, num_episodes), num_episodes)
    print(f"{num_episodes:,} episodes that wait for the model: ", end="")
    flight = measure(lambda model: run_episodes(model, num_episodes, num_episodes), num_episodes)
    print(f"    beyond the agent alone: {flight - alone:,.0f} bytes each")
    print(f"{num_episodes:,} episodes that queue behind 64: ", end="")
    measure(lambda model: run_episodes(model, num_episodes, 64), 64)
    loop.close()


if __name__ == "__main__":
    main()
