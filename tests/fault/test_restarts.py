"""`finetune --restarts N`: a run whose process is killed, or whose environment fails, continues by itself."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from reinforge.engine.packages import is_installed
from reinforge.errors import StorageError
from tests.fault import mutations
from tests.fault.kit import KILLED, differences

DIES_AGAIN = "batch.sealed:2"
"""In its second epoch, and in each process that resumes it, in the second one from there."""


def left_after(child, seconds):
    """Returns what is left of a killed command after some seconds, or as soon as nothing is."""
    deadline = time.monotonic() + seconds
    while (left := child.left_behind()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_a_run_that_is_killed_again_and_again_ends_as_an_undisturbed_one(toy, whole):
    child = toy.start("--restarts", "1", crash_at=DIES_AGAIN)
    assert child.wait() == 0, child.said
    assert child.said.count("the run was killed by SIGKILL; it continues\n") == 3
    assert differences(toy.run, whole.run) == []
    assert child.left_behind() == []


@pytest.mark.slow
def test_without_restarts_it_stays_dead(toy):
    """Mutation check."""
    assert toy.start(crash_at=DIES_AGAIN).wait() == KILLED
    assert not (toy.run / "summary.json").exists()


@pytest.mark.slow
def test_a_run_that_makes_no_progress_is_given_up_and_can_still_be_resumed(toy, whole):
    child = toy.start("--restarts", "2", crash_at="rollout.before_journal:1")
    assert child.wait() == 128 + signal.SIGKILL
    assert "it continues in 1 s, attempt 2 of 2 without progress" in child.said
    assert "the run was killed by SIGKILL, 3 times without progress; it is not continued" in child.said
    assert toy.resume_or_start().wait() == 0
    assert differences(toy.run, whole.run) == []


@pytest.mark.slow
def test_a_run_whose_environment_fails_is_tried_again(toy, whole):
    child = toy.start("--restarts", "1", mutation=mutations.fail_once_with(StorageError("no room")))
    assert child.wait() == 0, child.said
    assert "the run failed because of its environment; it continues" in child.said
    assert differences(toy.run, whole.run) == []


@pytest.mark.slow
def test_a_run_that_a_library_stops_is_tried_again(toy, whole):
    child = toy.start("--restarts", "1", mutation=mutations.stop_once)
    assert child.wait() == 0, child.said
    assert "the run was stopped by a library, with exit code 1; it continues" in child.said
    assert differences(toy.run, whole.run) == []


@pytest.mark.fault
def test_a_process_that_does_not_say_that_it_leaves_would_be_taken_for_a_failed_one(toy):
    """Mutation check."""
    assert toy.start("--restarts", "1", mutation=mutations.stop_once_unnoticed).wait() == 1


@pytest.mark.slow
def test_any_other_failure_is_final(toy):
    child = toy.start("--restarts", "3", mutation=mutations.fail_once_with(ValueError("a bug")))
    assert child.wait() == 1
    assert "it continues" not in child.said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_waiting_process_stops_the_run(toy, whole, number):
    child = toy.start("--restarts", "3")
    child.wait_for(toy.run / "config.yml")
    child.send(number, 0.3)
    assert (child.wait(seconds=10), child.left_behind()) == (128 + number, []), child.said
    assert toy.summary["status"] == "stopped"
    assert toy.resume().wait() == 0
    assert differences(toy.run, whole.run) == []


@pytest.mark.fault
def test_a_signal_that_is_not_forwarded_stops_nothing(toy):
    """Mutation check."""
    child = toy.start("--restarts", "3", mutation=mutations.forward_no_signals)
    child.wait_for(toy.run / "config.yml")
    child.send(signal.SIGTERM, 0.3)
    assert child.wait() == 0, child.said


@pytest.mark.slow
def test_the_run_stops_if_the_waiting_process_is_killed(toy):
    child = toy.start("--restarts", "3")
    child.wait_for(toy.run / "config.yml")
    child.send(signal.SIGKILL, 0.3)
    assert child.wait() == KILLED
    assert left_after(child, 10) == []
    assert toy.summary["status"] == "stopped"


@pytest.mark.fault
def test_a_run_that_does_not_follow_the_waiting_process_outlives_it(toy):
    """Mutation check."""
    child = toy.start("--restarts", "3", mutation=mutations.follow_no_parent)
    child.wait_for(toy.run / "config.yml")
    child.send(signal.SIGKILL, 0.0)
    assert child.wait() == KILLED
    for pid in left_after(child, 0.3):
        os.kill(pid, signal.SIGKILL)
    assert not (toy.run / "summary.json").exists() or toy.summary["status"] != "stopped"


def find_raylets(processes):
    """A raylet's child has its name too, until it becomes the program that it was started for."""
    raylets = {each.pid: each for each in processes if each.name() == "raylet"}
    return {each for each in raylets.values() if each.ppid() not in raylets}


def run_with_ray(make_toy, mutation=None):
    """Runs with a Ray worker, killed three times; returns the child and the raylets that were seen."""
    toy, seen = make_toy({"trainer_adapters.adapter": {"_type": "ray", "num_workers": 1}}), set()
    child = toy.start("--restarts", "1", crash_at=DIES_AGAIN, mutation=mutation)
    waiting = psutil.Process(child.process.pid)
    while child.process.is_alive():
        with contextlib.suppress(psutil.NoSuchProcess):
            seen |= find_raylets(waiting.children(recursive=True))
        child.process.join(0.05)
    assert child.wait() == 0, child.said
    assert child.said.count("it continues") == 3
    return child, seen


needs_ray = pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`")


@needs_ray
@pytest.mark.slow
def test_a_run_with_ray_workers_finds_its_cluster_again_and_takes_it_along(make_toy):
    child, seen = run_with_ray(make_toy)
    assert len(seen) == 1
    psutil.wait_procs(seen, timeout=15)
    assert [each for each in seen if each.is_running()] == []
    assert left_after(child, 10) == []


@needs_ray
@pytest.mark.slow
def test_a_run_continues_on_another_cluster_if_its_own_is_gone(make_toy):
    """Ray ends the process, with exit code 1."""
    toy = make_toy({"trainer_adapters.adapter": {"_type": "ray", "num_workers": 1}, "finetuning.num_epochs": 200})
    child = toy.start("--restarts", "1")
    child.wait_for(toy.run / "training_metrics.jsonl")
    holder = next(
        each for each in psutil.Process(child.process.pid).children() if "held_cluster" in str(each.cmdline())
    )
    holder.kill()
    assert child.wait(600) == 0, child.said  # 200 epochs, and the start of another cluster
    assert "the run was stopped by a library, with exit code 1; it continues" in child.said


@needs_ray
@pytest.mark.fault
def test_without_the_held_cluster_each_process_starts_its_own(make_toy):
    """Mutation check."""
    _, seen = run_with_ray(make_toy, mutations.hold_no_cluster)
    assert len(seen) > 1


def test_under_torchrun_it_is_refused(project, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    result = project.finetune("--restarts", "3", code=2)
    assert "start torchrun again with --resume" in result.output
    assert not project.run.exists()
