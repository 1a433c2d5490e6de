"""examples/replace: two models that know nothing of each other, and the command that puts one in place of the other."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "replace"
RUN = [sys.executable, EXAMPLE / "run.py", "--quick", "--delay", "0.02", "--output", "out"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_is_recorded_trained_judged_and_served(tmp_path):
    command = [*RUN, "--jobs", "tool", "--live", "20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (logs,) = (tmp_path / "out" / "logs" / "tool").glob("*.jsonl")
    records = [json.loads(line) for line in logs.read_text().splitlines()]
    assert [each["status"] for each in records] == ["success"] * 400, "streams of tool calls are recorded, too"
    assert all(each["response_cost"] > 0 for each in records)
    rows = dict(line.split("  ", 1) for line in done.stdout.partition("per job\n\n")[2].splitlines()[1:])
    assert rows["verdict"].strip() in ("not worse", "worse", "not decided")
    large, small = map(float, re.findall(r"\d\.\d+", rows["score, large -> small"])[:2])
    assert large > 0.9, "the stand-in is wrong in 2 %"
    assert small > 0.4, "an untrained model calls no tool rightly"
    assert re.search(r"\d+ of 20 local, \d+ right", rows["live trial"])


@pytest.mark.slow
def test_ctrl_c_ends_every_process(tmp_path):
    """A group of its own, which Ctrl-C reaches as a whole in a terminal, and which is empty afterwards."""
    process = subprocess.Popen(
        [*RUN, "--delay", "5"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    log = tmp_path / "out" / "record-tickets.log"
    end = time.monotonic() + 120
    while not (log.exists() and "OPENAI_BASE_URL" in log.read_text()):
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
