"""Pages of `reinforge view` for a run of 100,000 episodes: how long the server takes for each.

    python benchmarks/view.py [--episodes N] [--chars N] [--folder FOLDER]

It writes a journal with that many episodes, each with a reply of `--chars` characters, and asks for pages over HTTP as
a browser does. `--folder` keeps the journal, to be looked at with `reinforge view --output_dir FOLDER`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp

from reinforge.runs.journal.journal import RunJournal
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams
from reinforge.types.trajectory import Outcome
from reinforge.view.server import ViewServer

SIBLINGS, EXAMPLES = 8, 125
NUM_PAGES = 200
WORDS = ("the", "model", "answers", "with", "words", "that", "look", "like", "a", "reply", "of", "an", "agent")


def write_run(folder: Path, num_episodes: int, num_chars: int) -> None:
    """Writes a run with that many episodes."""
    dice = random.Random(0)
    journal = RunJournal(folder)
    journal.start_session()
    journal.set_facts(status="completed", reason="")
    for number in range(num_episodes):
        place, generation = divmod(number, SIBLINGS)
        epoch, example = divmod(place, EXAMPLES)
        journal.record_episode(
            build_episode(EpisodeKey("collect", epoch, f"example-{example:05d}", generation), dice, num_chars)
        )
    journal.end_session("completed")
    journal.flush()
    journal.close()


def build_episode(key: EpisodeKey, dice: random.Random, num_chars: int) -> EpisodeRecord:
    """Returns an episode with one call and a reply of that many characters."""
    text = " ".join(dice.choices(WORDS, k=num_chars // 5))[:num_chars]
    reply = ModelReply({"role": "assistant", "content": text}, "stop", None, 20, num_chars // 4)
    request = ModelRequest([{"role": "user", "content": f"What is {key.example_id}?"}], SamplingParams())
    call = ModelCall(f"call-{key}", "agent", "model", request, reply, (), 0.0, 1.0)
    outcome = Outcome.OK if dice.random() < 0.97 else Outcome.TIMEOUT
    reward = round(dice.random(), 3) if outcome is Outcome.OK else None
    item = EvalInputItem(
        id=key.example_id, input_obj="", expected_output_obj=None, output_obj=text, full_dataset_entry={}
    )
    scores = {"reward": EvalOutputItem(id=key.example_id, score=reward, reasoning=None)}
    return EpisodeRecord(key, item, outcome=outcome, calls=[call], scores=scores, reward=reward, wall_s=1.0)


async def measure(output_dir: Path, num_episodes: int) -> None:
    """Prints the time of each kind of page."""
    async with (
        ViewServer(output_dir) as server,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        base = server.address.partition("?")[0].rstrip("/")
        await (await session.get(server.address)).read()

        async def ask(path: str) -> float:
            started = time.perf_counter()
            answer = await session.get(base + path)
            body = await answer.read()
            if answer.status != 200:
                raise SystemExit(f"{path}: {answer.status} {body[:300]!r}")
            return (time.perf_counter() - started) * 1000

        print(f"list of episodes, first time {await ask('/runs/big/episodes'):8.1f} ms")
        print(f"list of episodes, again      {await ask('/runs/big/episodes'):8.1f} ms")
        offsets = random.Random(1).sample(range(max(1, num_episodes - 100)), min(NUM_PAGES, max(1, num_episodes - 100)))
        times = [await ask(f"/runs/big/rows?offset={offset}&limit=100") for offset in offsets]
        print(f"100 rows anywhere            {statistics.median(times):8.1f} ms, slowest {max(times):.1f} ms")
        for order in ("worst", "above"):
            path = f"/runs/big/rows?order={order}&offset=50000&limit=100"
            print(f"100 rows, order {order:<12} {await ask(path):8.1f} ms, again {await ask(path):.1f} ms")
        print(f"filter by example            {await ask('/runs/big/rows?example=00077&limit=100'):8.1f} ms")
        print(f"one episode                  {await ask('/runs/big/episode?key=collect/0/0/example-00007/2'):8.1f} ms")
        print(f"page of the run              {await ask('/runs/big'):8.1f} ms, again {await ask('/runs/big'):.1f} ms")
        print(f"list of runs                 {await ask('/'):8.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--chars", type=int, default=2000)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        output_dir = arguments.folder or Path(temporary)
        if not (output_dir / "big").exists():
            started = time.perf_counter()
            write_run(output_dir / "big", arguments.episodes, arguments.chars)
            size = (output_dir / "big" / "run.sqlite").stat().st_size
            print(
                f"{arguments.episodes:,} episodes, {size / 2**20:,.0f} MiB, written in "
                f"{time.perf_counter() - started:.0f} s"
            )
        asyncio.run(measure(output_dir, arguments.episodes))


if __name__ == "__main__":
    main()
