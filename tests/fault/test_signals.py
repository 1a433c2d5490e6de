"""SIGINT, SIGTERM, SIGHUP and SIGUSR1 stop a run within 10 s, with nothing left behind; resumed, it ends the same.

What agents and evaluators do to hold it up is in `test_hostile_agents.py`.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.fault import mutations
from tests.fault.kit import differences, wait_until
from tests.fault.test_kill_anywhere import SPARSE

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
FURTHER = {signal.SIGHUP: 129, signal.SIGUSR1: 138}
"""The terminal is closed; Slurm is about to end the job."""


def stop(toy, number, num_episodes, **options):
    """Returns the process of a run that was sent a signal after so many episodes, and its exit code."""
    child = toy.start(**options)
    child.wait_for(toy.run / "config.yml")
    wait_until(lambda: toy.num_run >= num_episodes, child)
    child.send(number)
    return child, child.wait(seconds=10)


@pytest.mark.parametrize(
    ("number", "count"),
    [
        *(pytest.param(number, 1, marks=pytest.mark.slow) for number in CODES),
        *(pytest.param(number, 15, marks=pytest.mark.fault) for number in CODES),
    ],
)
def test_a_signal_stops_the_run_and_resumed_it_reaches_the_same_end(make_toy, whole, number, count):
    rng = random.Random(int(number))
    for _ in range(count):
        toy = make_toy()
        child, code = stop(toy, number, rng.randrange(whole.num_run * 3 // 4))
        assert (code, child.left_behind()) == (CODES[number], []), child.said
        assert toy.summary["status"] == "stopped"
        assert f"resume with: reinforge finetune --resume {toy.run.relative_to(toy.folder)}" in child.said
        assert toy.resume().wait() == 0
        assert differences(toy.run, whole.run) == []


@pytest.mark.fault
def test_a_signal_between_two_checkpoints_writes_one(make_toy, finished):
    """The finished epochs are not trained again."""
    toy = make_toy(SPARSE)
    child = toy.start(mutation=mutations.stop_in_the_second_epoch)
    assert child.wait() == CODES[signal.SIGTERM]
    assert toy.rows_of("SELECT max(epoch) FROM snapshots") == [(0,)]
    assert toy.resume().wait() == 0
    assert differences(toy.run, finished(SPARSE).run) == []


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_further_signals_write_a_checkpoint_too(make_toy, finished, number):
    toy = make_toy(SPARSE)
    child = toy.start(mutation=mutations.STOPS_IN_THE_SECOND_EPOCH[number])
    assert (child.wait(), child.left_behind()) == (FURTHER[number], []), child.said
    assert f"stopped by {number.name}" in child.said
    assert toy.rows_of("SELECT max(epoch) FROM snapshots") == [(0,)]
    assert toy.resume().wait() == 0
    assert differences(toy.run, finished(SPARSE).run) == []


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_that_is_not_handled_leaves_no_checkpoint(make_toy, number):
    """Mutation check."""
    toy = make_toy(SPARSE)
    child = toy.start(mutation=mutations.HANDLE_TWO_SIGNALS[number])
    assert child.wait() == -number
    assert toy.rows_of("SELECT max(epoch) FROM snapshots") == [(-1,)]


@pytest.mark.slow
def test_a_run_under_nohup_ignores_the_end_of_its_terminal(make_toy):
    toy = make_toy(SPARSE)
    assert toy.start(mutation=mutations.hang_up_under_nohup).wait() == 0
    assert toy.summary["status"] == "completed"


@pytest.mark.fault
def test_a_stop_without_a_checkpoint_makes_a_difference(make_toy):
    """Mutation check."""
    toy = make_toy(SPARSE)
    toy.start(mutation=mutations.stop_in_the_second_epoch_and_commit_nothing).wait()
    assert toy.rows_of("SELECT max(epoch) FROM snapshots") == [(-1,)]


@pytest.mark.parametrize(
    "hang",
    [
        mutations.hang_at_the_end,
        *(
            pytest.param(hang, marks=pytest.mark.slow)
            for hang in (mutations.hang_at_a_stop, mutations.hang_in_the_cleanup)
        ),
    ],
)
def test_a_second_signal_ends_a_stop_that_hangs(toy, whole, hang):
    child = toy.start(mutation=hang)
    child.wait_for(toy.run / "config.yml")
    child.send(signal.SIGTERM, 0.3)
    child.send(signal.SIGTERM, 0.7)
    assert (child.wait(seconds=10), child.left_behind()) == (143, [])
    assert f"resume with: reinforge finetune --resume {toy.run.relative_to(toy.folder)}" in child.said
    assert toy.resume().wait() == 0
    assert differences(toy.run, whole.run) == []


@pytest.mark.slow
def test_the_same_signal_from_two_sides_is_one(toy, whole):
    """Such as that of a batch system to all processes of a job, passed on by the one that has started the run."""
    child = toy.start()
    wait_until(lambda: toy.num_run > 0, child)
    child.send(signal.SIGTERM)
    child.send(signal.SIGTERM)
    assert child.wait(seconds=10) == 143
    assert "a second signal" not in child.said
    assert toy.resume().wait() == 0
    assert differences(toy.run, whole.run) == []


@pytest.mark.fault
def test_a_run_without_handlers_makes_a_difference(toy):
    """Mutation check."""
    _, code = stop(toy, signal.SIGTERM, 1, mutation=mutations.handle_no_signals)
    assert code == -signal.SIGTERM
    assert not (toy.run / "summary.json").exists()


@pytest.mark.fault
def test_a_process_that_is_left_behind_is_found(toy):
    """Mutation check."""
    child, _ = stop(toy, signal.SIGTERM, 0, mutation=mutations.leave_a_child_behind)
    (left,) = child.left_behind()
    os.kill(left, signal.SIGKILL)


@pytest.mark.fault
@pytest.mark.parametrize("number", CODES)
def test_a_signal_while_the_program_starts(toy, number):
    """The real program, before a run handles signals: the same exit codes, and nothing to clean up."""
    toy.set("finetuning.algorithm", {"_type": "grpo"})
    toy.write_files()
    command = [sys.executable, "-m", "reinforge", "finetune", "run.yml", "--run_name"]
    for i in range(5):
        process = subprocess.Popen(
            [*command, f"r{i}"],
            cwd=toy.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        time.sleep(0.1 + 0.6 * i)
        process.send_signal(number)
        _, said = process.communicate(timeout=10)
        python_itself = b"KeyboardInterrupt" in said and b"reinforge/" not in said  # before the first line of reinforge
        assert process.returncode in (CODES[number], -number) or python_itself, said
