"""First tokens of a served model while it is trained on its chats, against those while it is not.

    python benchmarks/learning.py [--rounds 3] [--rate 8]

A server with `--learn` keeps 600 rated chats of the bundled help desk. Streams begin at a fixed rate, whatever the ones
before take, first without a training, then during a whole `learn run` that `POST /v1/learn/run` starts on the same
machine. Each round prints the 50th and 99th percentile of the time to the first piece of text, and their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import aiohttp
import httpx
import psutil

from benchmarks.machine import describe, refuse_if_busy
from benchmarks.proxy import find_port, percentile, run_beside, show
from reinforge.serving.version_folder import VersionFolder
from reinforge.tasks.help_desk.grammar import SYSTEM, Manners, count_kept_rules, write_chat
from reinforge.tasks.help_desk.starter import CarelessDeskRecipe, generate_careless_chats, make_tokenizer
from reinforge.tasks.starters import ensure_built

NUM_CHATS, USERS = 600, 100
QUIET_S = 30.0
LEARN = "train:\n  config: project/run.yml\n"


def write_question(rng: random.Random) -> str:
    return write_chat(rng, Manners()).question


def make_body(question: str, user: str) -> dict[str, object]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"model": "support", "messages": messages, "user": user, "max_tokens": 40}


def rate_chats(url: str) -> None:
    rng = random.Random(0)
    questions = [write_question(rng) for _ in range(NUM_CHATS)]
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(8) as threads:

        def chat(number: int) -> None:
            body = make_body(questions[number], f"user {number % USERS}")
            answer = client.post("/chat/completions", json=body).raise_for_status().json()
            is_good = count_kept_rules(questions[number], answer["choices"][0]["message"]["content"]) == 3
            client.post("/feedback", json={"id": answer["id"], "label": is_good}).raise_for_status()

        list(threads.map(chat, range(NUM_CHATS)))


async def measure(url: str, rate: float, process: int | None) -> list[float]:
    """Returns seconds to the first text, of streams that begin until a process has ended; None: for `QUIET_S`."""
    rng, found, begun = random.Random(1), list[float](), time.perf_counter()

    async def chat() -> None:
        sent = time.perf_counter()
        body = {**make_body(write_question(rng), "judge"), "stream": True}
        async with session.post(f"{url}/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if b'"content":"' in line.replace(b": ", b":") and b'"content":""' not in line.replace(b": ", b":"):
                    found.append(time.perf_counter() - sent)
                    break

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as tasks:
        number = 0
        while time.perf_counter() - begun < QUIET_S if process is None else psutil.pid_exists(process):
            tasks.create_task(chat())
            number += 1
            await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
    return found


def main() -> None:
    """Prints the figures of each round, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=8.0, help="streams that begin in a second")
    parser.add_argument("--force", action="store_true", help="on a busy machine, too")
    options = parser.parse_args()
    model = ensure_built("help_desk", CarelessDeskRecipe(), make_tokenizer, generate_careless_chats)
    refuse_if_busy()
    print(describe())
    with tempfile.TemporaryDirectory() as name:
        folder, port, command = Path(name), find_port(), [sys.executable, "-m", "reinforge"]
        for arguments in (("init", "project", "--template", "logs"), ("versions", "support", "--add", str(model))):
            subprocess.run([*command, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (folder / "learn.yml").write_text(LEARN)
        versions = VersionFolder(folder / ".reinforge" / "versions" / "support")
        serve = ["serve", str(versions.folder), "--learn", str(folder / "learn.yml"), "--port", str(port)]
        data_dir = ["--data_dir", str(folder / "data")]
        with run_beside([*command, *serve, *data_dir], port) as base:
            compare(f"{base}/v1", versions, options)


def compare(url: str, versions: VersionFolder, options: argparse.Namespace) -> None:
    rate_chats(url)
    ratios: dict[str, list[float]] = {"p50": [], "p99": []}
    for number in range(options.rounds):
        quiet = asyncio.run(measure(url, options.rate, None))
        process = httpx.post(f"{url}/learn/run").raise_for_status().json()["process"]
        busy = asyncio.run(measure(url, options.rate, process))
        if versions.read().candidate is not None:
            versions.stop_candidate()
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            before, during = percentile(quiet, share), percentile(busy, share)
            ratios[name].append(during / before)
            print(f"round {number}: {name} {before:.0f} ms, {during:.0f} ms while training ({len(busy)} streams)")
    print(", ".join(f"{name} {show(each, 2)} times" for name, each in ratios.items()))


if __name__ == "__main__":
    main()
