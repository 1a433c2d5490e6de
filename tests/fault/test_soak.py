"""A long run needs no more memory, files or journal at its end than after its start: nothing is kept by mistake."""

import json
import os
import statistics
import threading
import time

import psutil
import pytest

from reinforge.trainer.context import RunContext
from tests.fault.sizes import scaled

INTERVAL_S = 0.5
MAX_GROWTH, MAX_WAL_BYTES = 0.05, 64 << 20
STEPS_PER_EPOCH = 2


def watch_resources():
    process, name = psutil.Process(), "resources.jsonl"

    def watch():
        with open(name, "a") as file:
            while True:
                log = "runs/r/run.sqlite-wal"
                row = {
                    "rss": process.memory_info().rss,
                    "files": process.num_fds(),
                    "wal": os.path.getsize(log) if os.path.exists(log) else 0,
                }
                file.write(json.dumps(row) + "\n")
                file.flush()
                time.sleep(INTERVAL_S)

    threading.Thread(target=watch, daemon=True).start()


def leak():
    watch_resources()
    kept, end_stage = [], RunContext.record_episode

    def record_episode(context, record):
        kept.append((bytearray(os.urandom(40_000)), os.dup(0)) if len(kept) < 900 else bytearray(os.urandom(40_000)))
        end_stage(context, record)

    RunContext.record_episode = record_episode


def measure(toy, num_epochs, watched):
    toy.set("finetuning.num_epochs", num_epochs).set("finetuning.deterministic", False)
    toy.set("finetuning.run_configuration.validation_interval", num_epochs)
    toy.set("finetuning.policy.optimizer.learning_rate", 1e-5)  # the replies stay as long as they are
    toy.set("trainers.trainer.save_every", 20)
    child = toy.start(mutation=watched)
    assert child.wait(1800) == 0, child.said
    assert toy.summary["policy_versions"][-1]["version"] == num_epochs
    rows = [json.loads(line) for line in (toy.folder / "resources.jsonl").read_text().splitlines()]
    rows = rows[len(rows) // 10 : -4]  # without the start, and without the last files
    third = len(rows) // 3
    first, last = rows[:third], rows[-third:]
    growth = statistics.median(row["rss"] for row in last) / statistics.median(row["rss"] for row in first) - 1
    files = statistics.median(row["files"] for row in last) - statistics.median(row["files"] for row in first)
    return growth, files, max(row["wal"] for row in rows)


@pytest.mark.fault
@pytest.mark.parametrize("num_steps", [scaled(2000)])
def test_a_long_run_does_not_grow(toy, num_steps):
    growth, files, wal = measure(toy, num_steps // STEPS_PER_EPOCH, watch_resources)
    assert growth < MAX_GROWTH, f"the memory grew by {growth:.1%}"
    assert files <= 0, f"{files} more files are open"
    assert wal < MAX_WAL_BYTES, f"the write-ahead log had {wal:,} bytes"


@pytest.mark.fault
def test_a_run_that_keeps_what_it_need_not_shows(toy):
    """Mutation check."""
    growth, files, _ = measure(toy, 100, leak)
    assert growth > MAX_GROWTH
    assert files > 0
