"""docs/from-logs.md, walked by somebody with 300 chats of their own: its commands lead to a verdict and a page.

The chats are sampled here, and so are the thumbs. Thumbs that point anywhere teach nothing, and the verdict says so.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reinforge.tasks.help_desk.grammar import Manners, count_kept_rules, write_chat

PAGE = Path(__file__).parents[2] / "docs" / "from-logs.md"
NUM_CHATS, MAX_MINUTES, MAX_PAGE_BYTES = 300, 30, 2_000_000
BROKEN = (
    '{"id": "chat-9000", "messages": [{"role": "user", "content": "cut off',
    '{"id": "chat-9001", "note": "no chat"}',
)


def blocks():
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [text.splitlines() for language, text in found if not language]


def write_own_logs(path, rate, seed=11):
    """Writes 300 chats as a help desk's export might have them, and two lines that cannot be read.

    Args:
        path: The file.
        rate: Returns whether a customer likes a reply, given a random generator, the question and the reply.
        seed: Seed of the chats.
    """
    rng, lines = random.Random(seed), list(BROKEN)
    for number in range(NUM_CHATS):
        chat = write_chat(rng, Manners())
        row = {"conversation_id": f"c{number}", "created_at": f"2026-10-{1 + number % 28:02}T08:00:00Z"}
        row["messages"] = [{**message, "name": None} for message in chat.messages]
        if rng.random() < 0.8:
            row["rating"] = int(rate(rng, chat.question, chat.reply))
        lines.append(json.dumps(row))
    rng.shuffle(lines)
    path.write_text("\n".join(lines) + "\n")


def like_good_replies(rng, question, reply):
    """One customer in ten presses the wrong thumb."""
    return (count_kept_rules(question, reply) == 3) != (rng.random() < 0.1)


def like_anything(rng, question, reply):
    return rng.random() < 0.5


class Walk:
    """Runs commands as a shell does, in a folder that `cd` changes; offline."""

    def __init__(self, folder):
        self.folder, self.output = folder, {}
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": tools, "HF_HUB_OFFLINE": "1"}

    def run(self, command):
        if command.startswith("cd "):
            self.folder = self.folder / command.removeprefix("cd ")
            return
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        self.output[command] = done.stdout + done.stderr

    def summary(self, run):
        return json.loads((self.folder / ".reinforge" / "runs" / run / "summary.json").read_text())


def test_every_command_of_the_page_is_one_of_reinforge():
    """Fast: the commands that the slow test executes are found on the page, in order."""
    commands = [command.split()[:2] for block in blocks() for command in block]
    assert [part for _, part in commands] == [
        "init", "support", "data", "data", "preflight", "finetune", "report", "finetune", "runs"
    ]  # fmt: skip
    assert {first for first, _ in commands} == {"reinforge", "cd"}


@pytest.mark.slow
@pytest.mark.timeout(60 * MAX_MINUTES)
def test_somebody_with_300_chats_and_thumbs_gets_a_verdict_and_a_page(tmp_path):
    walk, started = Walk(tmp_path), time.monotonic()
    (first, *others) = blocks()
    for command in first:
        walk.run(command)
        if command.startswith("cd "):
            write_own_logs(walk.folder / "logs.jsonl", like_good_replies)
    imported = walk.output[next(command for command in first if " import " in command)]
    assert "could not be read" in imported or "unread" in imported, imported
    preflight = walk.output["reinforge preflight run.yml"]
    for expected in ("base ", "time ", "verdict ", "recommendation: KTO"):
        assert expected in preflight
    for command in (command for block in others for command in block):
        walk.run(command)
    assert time.monotonic() - started < 60 * MAX_MINUTES
    for name in ("thumbs", "good_only"):
        summary = walk.summary(name)
        assert summary["promoted"], summary["improvement"]
        assert summary["improvement"]["ci_low"] > 0
    page = (walk.folder / "thumbs.html").read_text()
    assert len(page) < MAX_PAGE_BYTES
    assert "improved the agent" in page
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page), "the page asks nobody for anything"
    assert "example" in walk.output["reinforge runs compare thumbs good_only"]


@pytest.mark.fault
@pytest.mark.timeout(60 * MAX_MINUTES)
def test_thumbs_that_point_anywhere_lead_to_no_promotion(tmp_path):
    walk = Walk(tmp_path)
    for command in blocks()[0]:
        walk.run(command)
        if command.startswith("cd "):
            write_own_logs(walk.folder / "logs.jsonl", like_anything)
    summary = walk.summary("thumbs")
    assert not summary["promoted"]
    improvement = summary["improvement"]  # None: no checkpoint was better than the base model on `select`
    assert improvement is None or improvement["ci_low"] <= 0
