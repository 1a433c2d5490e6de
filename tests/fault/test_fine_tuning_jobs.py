"""A server of the fine-tuning API that is killed at any time makes exactly one job, and one model, of each request.

The client is the official one with its own retries. The server is killed with SIGKILL while it stores the file, creates
the job, validates, trains and publishes, and started again at the same address.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from reinforge.protocols.openai.server.records import FileRecord, JobState
from reinforge.protocols.openai.server.store import JobStore
from tests.fault import job_server
from tests.fault.sizes import scaled
from tests.protocols.fine_tuning import supervised_rows, to_jsonl

NUM_KILLS = scaled(500)
SITES = (
    "add_file:before",
    "add_file:after",
    "create_job:before",
    "create_job:after",
    "transition queued:before",
    "transition queued:after",
    "transition running:before",
    "transition running:after",
    "transition succeeded:before",
    "transition succeeded:after",
)


@pytest.fixture
def serve(finished_run):
    return partial(job_server.serve, finished_run)


def train(client, number):
    """Returns a job that has ended; polls every 20 ms."""
    file = client.files.create(
        file=(f"{number}.jsonl", to_jsonl(supervised_rows(8, f"a{number}"))), purpose="fine-tune"
    )
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file.id, metadata={"n": str(number)}, seed=number)
    while (job := client.fine_tuning.jobs.retrieve(job.id)).status not in ("succeeded", "failed", "cancelled"):
        time.sleep(0.02)
    return job


def assert_once(servers, jobs):
    store = JobStore(servers.folder / "jobs.sqlite")
    found, _ = store.list_jobs(None, 10_000)
    assert sorted(job.id for job in found) == sorted(job.id for job in jobs)
    assert {job.state for job in found} == {JobState.SUCCEEDED}
    files: list[FileRecord] = store.list_files(None, 10_000)[0]
    inputs = sorted(file.filename for file in files if file.purpose == "fine-tune")
    assert inputs == sorted(f"{job.metadata['n']}.jsonl" for job in found)
    assert len(files) == 2 * len(jobs), "and one file of results each"
    folders = {path.name for path in (servers.folder / "models").iterdir()}
    assert folders == {job.id for job in found}
    names = {model.name for model in store.list_models()}
    for job in found:
        assert {job.fine_tuned_model, *(f"{job.fine_tuned_model}:ckpt-step-{step}" for step in (2, 4))} <= names
        assert [each.step for each in store.list_checkpoints(job.id, None, 9)[0]] == [4, 2]
        messages = [event.message for event in store.list_events(job.id, None, 100_000)[0]]
        ends = [each for each in messages if each.startswith("The job has successfully completed")]
        assert len(ends) == 1
        assert sum(each.startswith("Step") for each in messages) == 2
    assert len(names) == 3 * len(jobs)
    contents = {path.name for path in (servers.folder / "files").iterdir()}
    assert contents >= {file.id for file in files}
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
def test_a_server_that_dies_at_one_point_goes_on(servers, site):
    with servers.restarted_after(site), servers.client() as client:
        job = train(client, 1)
    assert job.status == "succeeded"
    assert_once(servers, [job])


@pytest.mark.fault
def test_without_the_memory_of_requests_a_retry_makes_a_second_job(servers):
    """Mutation check: the server forgets which requests it has seen, and the lost response costs a job."""
    with servers.restarted_after("forget create_job:after", then="forget"), servers.client() as client:
        job = train(client, 1)
    with pytest.raises(AssertionError):
        assert_once(servers, [job])
    store = JobStore(servers.folder / "jobs.sqlite")
    assert len(store.list_jobs(None, 9)[0]) == 2
    store.close()


STUBBORN = """
import signal, subprocess, sys, time
from reinforge.protocols.openai.server import process
process.STOP_S = 0.2
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
process._watch_server()
"""


@pytest.mark.slow
def test_a_run_that_does_not_stop_when_the_server_is_gone_leaves_no_process():
    """It ignores SIGTERM, and what it has started leads a group of its own."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdin=pipe, stdout=pipe, text=True) as job:
        child = int(job.stdout.readline())
        job.stdin.close()
        assert job.wait(30) == 128 + signal.SIGTERM
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        for _ in range(100):
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return  # dead; whoever has adopted it has not looked yet
            os.kill(child, 0)
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        pytest.fail("the process that it had started is still there")


@pytest.mark.parametrize(
    "num_kills",
    [
        pytest.param(12, marks=pytest.mark.slow),
        pytest.param(NUM_KILLS, marks=[pytest.mark.fault, pytest.mark.timeout(3600)], id=f"{NUM_KILLS} kills"),
    ],
)
def test_kills_at_random_times_over_submit_train_and_publish(servers, num_kills):
    """A server lives for a random part of one and a half undisturbed jobs, then it is killed."""
    jobs = []
    servers.start()
    with servers.client() as client:
        began = time.monotonic()
        jobs.append(train(client, 0))
        job_s = time.monotonic() - began
        with servers.killed_at_random(num_kills, 1.5 * job_s) as over:
            for number in itertools.count(1):
                jobs.append(train(client, number))
                if over.is_set():
                    break
    assert [job.error for job in jobs if job.status != "succeeded"] == []
    assert_once(servers, jobs)
