"""A help desk that learns from its users' thumbs while it serves them; see README.md.

python run.py            3,000 chats of 300 users, at most 20 minutes
python run.py --quick    fewer chats and weaker evidence, at most 3 minutes
"""

import argparse
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import httpx
from tastes import find_remedy, find_taste
from users import AT_A_TIME, TIMEOUT_S, ask, write_question

from reinforge.evaluation.statistics import compute_mean_interval, compute_paired_difference, format_interval
from reinforge.serving.version_folder import Cause, VersionFolder
from reinforge.tasks.help_desk.grammar import Manners
from reinforge.tasks.help_desk.starter import CarelessDeskRecipe, generate_careless_chats, make_tokenizer
from reinforge.tasks.starters import ensure_built
from reinforge.types.seeding import stable_random

HERE = Path(__file__).parent
FILES = ("desk.yml", "agent.py", "reward.py", "tastes.py")
NAME = "support"
ROUND, ROUND_S = 25, 2  # chats, and how long they take at least
TRAINING_ROUND_S = 20  # while the model is trained: users come as at night
SHOWN = 300  # chats of the mean in the timeline
START_S, STOP_S = 180, 30
MANNERS = Manners(names_another_item=0.45, brushes_off=0.35, promises_money=0.3)
"""How often the first version was taught to break each rule."""


@dataclass(frozen=True)
class Settings:
    """What --quick changes: how much evidence a training, a verdict and a promotion need."""

    chats: int = 3000
    minutes: float = 20
    rated: int = 200
    share: float = 0.5
    replay: float = 0.2
    min_users: int = 100
    confidence: float = 0.97
    max_conversations: int = 800
    held_out: int = 400

    def write(self, folder, *more):
        more = "".join(f"  {line}\n" for line in more)
        (folder / "learn.yml").write_text(
            f"record: {{days: 30}}\n"
            f"train:\n  config: desk.yml\n  when: {{rated: {self.rated}}}\n"
            f"  share: {self.share}\n  replay: {self.replay}\n{more}"
            f"compare: {{min_users: {self.min_users}, confidence: {self.confidence}, "
            f"max_conversations: {self.max_conversations}}}\n"
        )


QUICK = Settings(chats=600, minutes=2, rated=120, min_users=30, confidence=0.8, held_out=100)


def run(folder, *arguments):
    command = [sys.executable, "-m", "reinforge", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"`reinforge {' '.join(map(str, arguments))}` failed:\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def start(folder, *command, **settings):
    """Yields a process, which ends with the block."""
    with subprocess.Popen([sys.executable, *map(str, command)], cwd=folder, **settings) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


class Server:
    """`reinforge serve` with its log."""

    def __init__(self, process, log):
        self.process, self.log = process, log
        end = time.monotonic() + START_S
        while not (found := re.search(r"OPENAI_BASE_URL=(\S+)", log.read_text())):
            if time.monotonic() > end or process.poll() is not None:
                sys.exit(f"the server does not start:\n{log.read_text()}")
            time.sleep(0.1)
        self.url = found[1]

    def count_trainings(self):
        return self.log.read_text().count(f"{NAME} is trained on its chats")

    def is_training(self):
        return self.count_trainings() > self.log.read_text().count(f"the training of {NAME} ")


class Timeline:
    """Prints how the scores move, and what happened to the versions."""

    def __init__(self, versions, begun):
        self.versions, self.begun, self.scores, self.num_events = versions, begun, deque(maxlen=SHOWN), 0

    def add(self, chats):
        self.scores.extend(chat["score"] for chat in chats)

    @property
    def mean(self):
        return sum(self.scores) / len(self.scores)

    def print(self, num_chats, what=""):
        minutes = (time.monotonic() - self.begun) / 60
        promoted = self.versions.read().promoted
        print(
            f"{minutes:5.1f} min  {num_chats:5,} chats  score {self.mean:.2f}  version {promoted}  {what}", flush=True
        )

    def print_events(self, num_chats):
        events = self.versions.read_log()
        for event in events[self.num_events :]:
            self.print(num_chats, f"{event.action} {event.version}: {event.reason}")
        self.num_events = len(events)


def play(server, timeline, folder, options, settings):
    """Lets the users chat; returns the number of chats."""
    command = [HERE / "users.py", "--url", server.url, "--model", NAME, "--seed", options.seed]
    command += ["--opposite", options.opposite, *["--heavy"] * options.heavy]
    command += [] if options.change is None else ["--change", options.change]
    end, number = timeline.begun + settings.minutes * 60, 0
    with start(folder, *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as users:
        while number < settings.chats and time.monotonic() < end:
            begun, count = time.monotonic(), min(ROUND, settings.chats - number)
            print(count, file=users.stdin, flush=True)
            chats = [json.loads(line) for line in iter(lambda: users.stdout.readline().strip(), "")]
            if len(chats) < count:
                sys.exit("the users have exited")
            timeline.add(chats)
            if options.change is not None and number < options.change <= number + count:
                notice_change(folder, settings, timeline.versions)
                timeline.print(number + count, "the taste of the users changes")
            number += count
            timeline.print_events(number)
            if number % SHOWN == 0:
                timeline.print(number)
            pause_s = TRAINING_ROUND_S if server.is_training() else ROUND_S
            time.sleep(max(0.0, begun + pause_s - time.monotonic()))
    return number


def notice_change(folder, settings, versions):
    """The shop's new check, what it does not want to train on any more, and a candidate that learned it."""
    if versions.read().candidate is not None:
        versions.stop_candidate(Cause("the taste of the users has changed", "the shop"))
    settings.write(folder, f"since: {datetime.now(UTC):%Y-%m-%d %H:%M:%S}")
    file = folder / "reward.py"
    file.write_text(file.read_text().replace('WHEN = "before"', 'WHEN = "after"'))


def score_held_out(client, version, when, options, num_chats):
    """Returns `{chat: score}` of a version for users and questions that it has never met, the same for each version."""

    def score(number):
        rng = stable_random(options.seed, "held out", number)
        place, question = rng.random(), write_question(rng)
        _, reply, *_ = ask(client, f"{NAME}@{version}", question)
        return str(number), float(find_remedy(question, reply) in find_taste(place, when))

    with ThreadPoolExecutor(AT_A_TIME) as threads:
        return dict(threads.map(score, range(num_chats)))


def judge(server, versions, options, settings):
    """Returns the score of each promoted version, and what each promotion changed, on the same held-out chats."""
    order = [1, *(event.version for event in versions.read_log() if event.action == "promote")]
    whens = ("before",) if options.change is None else ("before", "after")
    judged = {}
    for when in whens:
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
            scores = {each: score_held_out(client, each, when, options, settings.held_out) for each in set(order)}
        means = {each: compute_mean_interval(list(scores[each].values())) for each in scores}
        steps = [compute_paired_difference(scores[a], scores[b]) for a, b in pairwise(order)]
        judged[when] = {
            "scores": {
                each: dict(zip(("mean", "ci_low", "ci_high"), mean, strict=True)) for each, mean in means.items()
            },
            "improvement": asdict(compute_paired_difference(scores[1], scores[order[-1]])),
            "steps": [asdict(step) for step in steps],
            "num_harmful": sum(step.ci_high is not None and step.ci_high < 0 for step in steps),
        }
    return {"promoted": order[1:], "held_out": judged}


def print_result(result):
    print(
        f"\n{result['num_promotions']} promotions, {result['num_trainings']} trainings, {result['minutes']:.1f} minutes"
    )
    for when, judged in result["held_out"].items():
        print(f"\nheld-out chats, the taste {when} a change" if len(result["held_out"]) > 1 else "\nheld-out chats")
        for version, mean in judged["scores"].items():
            print(f"  version {version}    {format_interval(*mean.values())}")
        change = judged["improvement"]
        shown = format_interval(change["mean_difference"], change["ci_low"], change["ci_high"], signed=True)
        print(f"  improvement  {shown}, 95 % interval over {change['num_pairs']} chats")


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short version with weaker evidence")
    parser.add_argument("--chats", type=int, help=f"default: {Settings.chats:,}")
    parser.add_argument("--minutes", type=float, help=f"cap of the time for them; default: {Settings.minutes}")
    parser.add_argument(
        "--opposite", type=float, default=0.0, help="share of users who vote the opposite of what they think"
    )
    parser.add_argument("--heavy", action="store_true", help="5 %% of the users send 60 %% of the feedback")
    parser.add_argument("--change", type=int, metavar="N", help="the taste of the users changes after N chats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("learning-example"), help="folder, which must not exist")
    options = parser.parse_args()
    if options.output.exists():
        parser.error(f"{options.output} exists already; delete it, or choose another folder with --output")
    return options


def main():
    options = read_options()
    settings = QUICK if options.quick else Settings()
    given = {name: value for name in ("chats", "minutes") if (value := getattr(options, name)) is not None}
    settings = Settings(**{**asdict(settings), **given})
    options.output.mkdir(parents=True)
    folder, begun = options.output.resolve(), time.monotonic()
    for name in FILES:
        shutil.copy(HERE / name, folder)
    settings.write(folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    recipe = CarelessDeskRecipe(manners=MANNERS)
    model = ensure_built("help_desk", recipe, make_tokenizer, generate_careless_chats)
    run(folder, "versions", NAME, "--add", model)
    versions, log = VersionFolder(folder / ".reinforge" / "versions" / NAME), folder / "server.log"
    command = ["-m", "reinforge", "serve", versions.folder, "--learn", "learn.yml", "--port", 0]
    with log.open("w") as file, start(folder, *command, stdout=file, stderr=subprocess.STDOUT) as process:
        server, timeline = Server(process, log), Timeline(versions, begun)
        num_chats = play(server, timeline, folder, options, settings)
        result = {"num_chats": num_chats, "last_score": timeline.mean, "num_trainings": server.count_trainings()}
        result |= judge(server, versions, options, settings)
    result |= {"num_promotions": len(result["promoted"]), "minutes": (time.monotonic() - begun) / 60}
    result["log"] = [asdict(event) for event in versions.read_log()]
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    print_result(result)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
