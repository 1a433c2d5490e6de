"""Effective training time under faults: the same training with processes killed at random times, and without.

    python benchmarks/faults.py                           the demo's task, shortened: one process, and two Ray workers
    python benchmarks/faults.py --workers 2 --every 20    two Ray workers, a fault every 20 s on average
    python benchmarks/faults.py --workers 2 --servers 2   two Ray workers that train, and two vLLM servers that sample
    python examples/cluster/two_nodes.py python benchmarks/faults.py --workers 2     on a cluster that outlives the run

effective time = wall seconds of the undisturbed run / wall seconds of the disturbed one, each from the first command to
the exit of the last, so with every start, all work that is done again, and the verdict. Both train the same epochs from
the same seed, one after the other in changing order; a row sums up the rounds.

Faults come in seeded gaps between 0.5 and 1.5 times `--every`, also while a run recovers. Each hits one of these,
with equal chances: the driver (kill -9), its disk (no file of the driver can grow any more, so the run must stop by
itself), each worker and each vLLM server (kill -9). The run continues by itself (`--restarts`). With servers
(`make .venv-vllm/.installed`), epochs overlap with jobs, and replies in flight continue with new weights. `--file`
names another configuration, whose `trainer_adapters` has one entry, `here`.

sampled again: tokens of replies that the run had received and that are in no recorded episode, so they were sampled
once more. trained again: jobs that ran more than once; each has at most `steps_per_job` optimizer steps. In one process
the runs are deterministic and the weights at the end must be equal; with workers, a job that runs on fewer of them
sums gradients in another order, so weights differ by rounding, which training amplifies.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, refuse_if_busy
from reinforge.evaluation.statistics import format_interval
from reinforge.runs.journal.reader import JournalReader
from reinforge.tasks.tic_tac_toe import DEMO

VLLM_PYTHON = Path(".venv-vllm/bin/python").absolute()
RESTARTS, POLL_S = 100, 0.05
WORKER = "ray::EngineWorker"
"""How the title of a worker's process begins."""
COUNTING = """
import contextlib, os, sys
from reinforge.rollout.models.policy_llm import PolicyLLM
received, sample = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND), PolicyLLM.sample
async def sample_and_count(llm, request):
    reply = await sample(llm, request)
    with contextlib.suppress(OSError):  # the disk is full
        os.write(received, b"%d\\n" % reply.num_completion_tokens)
    return reply
PolicyLLM.sample = sample_and_count
from reinforge.cli import main
main(prog_name="reinforge")
"""
"""`reinforge`, which writes down the tokens of each reply that it receives."""


@dataclass
class Run:
    """One training, perhaps of several processes; times are seconds since the Unix epoch."""

    folder: Path
    seconds: float = 0.0
    starts: list[float] = field(default_factory=list)  # of each process of the driver
    faults: list[tuple[float, str]] = field(default_factory=list)
    num_received: int = 0  # tokens
    load: float = 0.0  # of the machine at its end

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def num_again(self) -> int:
        """Tokens that were sampled more than once."""
        return self.num_received - self.summary["tokens"]["completion"]

    @property
    def num_jobs_again(self) -> int:
        submitted = sum(row.stage == "SUBMIT" for row in JournalReader(self.folder).stages())
        return submitted - self.summary["num_jobs"] + len(self._read_log("the job is undone and runs again"))

    def describe_verdict(self) -> str:
        change = self.summary["improvement"]
        if change is None:
            return str(self.summary["reason"])
        return format_interval(change["mean_difference"], change["ci_low"], change["ci_high"], signed=True)

    def _read_log(self, text: str) -> list[float]:
        """Returns when the run logged a message."""
        lines = (self.folder / "run.log").read_text().splitlines()
        times = (line[:23] for line in lines if text in line and re.match(r"\d{4}-\d\d-\d\d ", line))
        return [datetime.strptime(each, "%Y-%m-%d %H:%M:%S,%f").timestamp() for each in times]

    def measure_recovery(self) -> dict[str, list[float]]:
        """Returns the seconds of each part of the recoveries that no other fault interrupted."""
        begun = [each.started_s for each in JournalReader(self.folder).sessions()]
        resumed, died, joined = map(self._read_log, ("resuming after", " died; ", " joined; there are "))
        parts: dict[str, list[float]] = {
            "until the driver has stopped (disk)": [],
            "start: Python, imports, file, data": [],
            "load: Ray, workers, model, weights": [],
            "until a lost worker is noticed": [],
            "until its replacement joins": [],
        }
        stop, start, load, notice, join = parts.values()
        for (at, kind), (following, _) in zip(self.faults, [*self.faults[1:], (math.inf, "")], strict=False):
            if kind == "worker":
                seen = next((each for each in died if each > at), math.inf)
                back = next((each for each in joined if each > seen), math.inf)
                if back < following:
                    notice.append(seen - at)
                    join.append(back - seen)
            if kind in ("worker", "server"):  # a server costs its replies, and no epoch waits for the next one
                continue
            spawned = next((each for each in self.starts if each > at), math.inf)
            session = next((each for each in begun if each > spawned), math.inf)
            ready = next((each for each in resumed if each > session), math.inf)
            if ready < following:
                stop += [spawned - at] if kind == "disk" else []
                start.append(session - spawned)
                load.append(ready - session)
        return parts


def list_workers(waiting: int) -> list[psutil.Process]:
    """Returns the processes of the run's workers: below the waiting process, or on the nodes of RAY_ADDRESS."""
    address, candidates, found = os.environ.get("RAY_ADDRESS"), list[psutil.Process](), []
    with contextlib.suppress(psutil.NoSuchProcess):  # the driver has just ended
        candidates = list(psutil.process_iter()) if address else psutil.Process(waiting).children(recursive=True)
    for process in candidates:
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("ray::") and " ".join(process.cmdline()).startswith(WORKER):
                found += [process] if not address or process.environ().get("RAY_ADDRESS") == address else []
    return sorted(found, key=lambda each: each.pid)


def list_servers(driver: int) -> list[psutil.Process]:
    """Returns the vLLM servers that the run has started, without the processes that watch them."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(driver).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                found += [process] if "--uds" in command and not any("supervise.py" in part for part in command) else []
    return sorted(found, key=lambda each: each.pid)


class Striker:
    """Starts a run that continues by itself, and strikes it until it has ended."""

    def __init__(self, run: Run, file: Path, overrides: dict[str, object], every_s: float, rng: random.Random):
        self.run, self.file, self.every_s, self.rng = run, file, every_s, rng
        self._options = [part for path, value in overrides.items() for part in ("-o", path, str(value))]
        self._received, self._log = (run.folder.with_suffix(name) for name in (".received", ".log"))
        self._drivers = list[int]()

    def start(self) -> subprocess.Popen:
        folder = self.run.folder
        place = ["--run_name", folder.name, "-o", "finetuning.output_dir", str(folder.parent)]
        arguments = [str(self.file), *place, *self._options, "--restarts", str(RESTARTS)]
        command = [sys.executable, "-c", COUNTING, str(self._received), "finetune", *arguments]
        with self._log.open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def find_driver(self, waiting: int) -> int | None:
        """Returns the process of the run, which the waiting one has forked, and notes when a new one began.

        The waiting process may have another child, which holds a Ray cluster.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(waiting)
            for child in parent.children():
                if child.status() != psutil.STATUS_ZOMBIE and child.cmdline() == parent.cmdline():
                    if child.pid not in self._drivers:
                        self._drivers.append(child.pid)
                        self.run.starts.append(child.create_time())
                    return child.pid
        return None

    def strike(self, waiting: int, driver: int) -> None:
        """Makes one fault happen."""
        workers, servers = list_workers(waiting), list_servers(driver)
        kinds = ["driver", "disk", *["worker"] * len(workers), *["server"] * len(servers)]
        number = int(self.rng.random() * len(kinds))
        self.run.faults.append((time.time(), kinds[number]))
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if kinds[number] == "driver":
                psutil.Process(driver).kill()
            elif kinds[number] == "disk":
                resource.prlimit(driver, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            else:
                [*workers, *servers][number - 2].kill()

    def run_to_end(self) -> Run:
        """Returns the run, once it is complete."""
        run, started = self.run, time.time()
        process, due = self.start(), self._schedule(started)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(POLL_S)
                break
            driver = self.find_driver(process.pid)
            if driver is not None and time.time() >= due:
                self.strike(process.pid, driver)
                due = self._schedule(due)
        if code != 0:
            raise SystemExit(f"{self._log.read_text()}\nthe run ended with exit code {code}")
        run.seconds, run.load = time.time() - started, os.getloadavg()[1]
        run.num_received = sum(map(int, self._received.read_text().split()))
        return run

    def _schedule(self, after: float) -> float:
        return after + self.every_s * self.rng.uniform(0.5, 1.5) if self.every_s else math.inf


def choose_overrides(args: argparse.Namespace, workers: int) -> dict[str, object]:
    """Returns what changes in the file."""
    adapter: dict[str, object] = {"_type": "local"}
    if workers:
        adapter = {"_type": "ray", "num_workers": workers, "address": os.environ.get("RAY_ADDRESS")}
    servers = args.servers if workers else 0
    changed: dict[str, object] = {
        "finetuning.num_epochs": args.epochs,
        "finetuning.run_configuration.validation_interval": args.epochs,
        "finetuning.deterministic": not servers,
    }
    if servers:
        launch = {"python": str(VLLM_PYTHON), "replicas": servers, "arguments": {"enforce_eager": True}}
        adapter["sampler"] = {"_type": "vllm", "launch": launch}
        changed |= {"finetuning.limits.max_staleness": 1, "finetuning.limits.in_flight": "keep"}
    return {**changed, "trainer_adapters.here": json.dumps(adapter)}


def measure_distance(run: Run, other: Run) -> float:
    """Returns the largest difference between the weights at the end of two runs."""
    from safetensors.torch import load_file

    folders = [sorted((each.folder / "checkpoints").glob("step-*"))[-1] for each in (run, other)]
    paths = [next(folder.glob("*model.safetensors")) for folder in folders]
    ours, theirs = map(load_file, paths)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def run_round(place: Path, args: argparse.Namespace, workers: int, number: int) -> Iterator[tuple[float, Run, Run]]:
    """Yields `--every`, the disturbed run and the undisturbed run of one round."""
    rates = [0.0, *args.every]
    done: dict[float, Run] = {}
    for every in rates if number % 2 == 0 else rates[::-1]:
        run = Run(place / f"workers-{workers}-every-{every:g}-round-{number}")
        rng = random.Random(f"{args.seed} {workers} {every:g} {number}")
        done[every] = Striker(run, args.file, choose_overrides(args, workers), every, rng).run_to_end()
        kinds = Counter(kind for _, kind in run.faults)
        told = f"{run.seconds:.0f} s, {dict(kinds) or 'no faults'}, load {run.load:.1f}, {run.describe_verdict()}"
        print(f"  {run.folder.name}: {told}", flush=True)
    yield from ((every, done[every], done[0.0]) for every in args.every)


def print_rows(rows: dict[tuple[int, float], list[tuple[Run, Run]]]) -> None:
    print(
        f"{'workers':>7} {'every':>6} {'driver/disk/worker/server':>26} {'undisturbed':>12} {'disturbed':>10} "
        f"{'effective':>9} {'a fault':>8} {'sampled again':>14} {'trained again':>14} {'weights':>9}"
    )
    for (workers, every), pairs in rows.items():
        kinds = Counter(kind for run, _ in pairs for _, kind in run.faults)
        disturbed, undisturbed = (sum(each[side].seconds for each in pairs) for side in (0, 1))
        tokens = sum(run.num_received for run, _ in pairs)
        again = sum(run.num_again for run, _ in pairs) / tokens
        jobs, trained = (sum(each) for each in zip(*((r.num_jobs_again, r.summary["num_jobs"]) for r, _ in pairs)))  # noqa: B905
        distance = max(measure_distance(*pair) for pair in pairs)
        counts = "/".join(str(kinds[kind]) for kind in ("driver", "disk", "worker", "server"))
        cost = (disturbed - undisturbed) / max(1, sum(kinds.values()))
        print(
            f"{workers or 'none':>7} {every:>4g} s {counts:>26} {undisturbed:>10.0f} s {disturbed:>8.0f} s "
            f"{undisturbed / disturbed:>9.1%} {cost:>6.1f} s {again:>14.2%} {f'{jobs} of {trained}':>14} "
            f"{f'{distance:.1e}' if distance else 'equal':>9}"
        )


def print_recovery(rows: dict[tuple[int, float], list[tuple[Run, Run]]]) -> None:
    for workers in dict.fromkeys(workers for workers, _ in rows):
        parts: dict[str, list[float]] = {}
        for run in (run for (count, _), pairs in rows.items() if count == workers for run, _ in pairs):
            for name, seconds in run.measure_recovery().items():
                parts.setdefault(name, []).extend(seconds)
        print(f"recovery, {f'{workers} workers' if workers else 'one process'}: seconds, min / median / max")
        for name, seconds in parts.items():
            if seconds:
                low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
                print(f"  {name:<36} {low:5.1f} / {middle:5.1f} / {high:5.1f}   ({len(seconds)})")


def parse_list(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=parse_list, default=[0, 2], help="Ray workers; 0: one process without Ray")
    parser.add_argument("--every", type=parse_list, default=[60, 20], help="mean seconds between two faults")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--servers", type=int, default=0, help="vLLM servers that sample for the workers")
    parser.add_argument("--file", type=Path, default=DEMO, help="what is trained")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("--force", action="store_true", help="measure although other load is on the machine")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    rows: dict[tuple[int, float], list[tuple[Run, Run]]] = {}
    with tempfile.TemporaryDirectory() as name:
        place = args.keep or Path(name)
        place.mkdir(parents=True, exist_ok=True)
        for number in range(args.rounds):
            for workers in args.workers:
                for every, run, undisturbed in run_round(place, args, workers, number):
                    rows.setdefault((workers, every), []).append((run, undisturbed))
        print(f"{args.epochs} epochs of {args.file}, {args.rounds} rounds, faults of seed {args.seed}")
        print_rows(rows)
        print_recovery(rows)


if __name__ == "__main__":
    main()
