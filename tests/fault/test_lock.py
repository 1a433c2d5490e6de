"""One process owns a run folder, the others are told which; the lock is free the moment its owner dies."""

import os
import signal
import socket
import time

import filelock
import pytest

from reinforge.errors import ConfigError, StorageError
from reinforge.runs.journal.journal import RunJournal

RACERS = 4


class Racer:
    """A process that tries to own a folder on command, reports the result, and stays until it is killed."""

    def __init__(self, take):
        (there, self.go), (self.said, say) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.go)
            os.read(there, 1)
            try:
                owned = take()
                os.write(say, b"mine")
            except (StorageError, ConfigError) as error:
                owned = None
                os.write(say, str(error).encode())
            except BaseException as error:
                os.write(say, f"unexpected: {error!r}".encode())
                raise
            os.read(there, 1)
            del owned
            os._exit(0)
        os.close(there)
        os.close(say)

    def result(self):
        return os.read(self.said, 10_000).decode()

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.go)
        os.close(self.said)


def race(take):
    """Lets processes race; returns the winner and the messages of the others. All are still alive."""
    racers = [Racer(take) for _ in range(RACERS)]
    for racer in racers:
        os.write(racer.go, b"g")
    results = [racer.result() for racer in racers]
    winners = [racer for racer, said in zip(racers, results, strict=True) if said == "mine"]
    if len(winners) != 1:
        for racer in racers:
            racer.kill()
    assert len(winners) == 1, f"{len(winners)} of {RACERS} own the folder: {results}"
    return winners[0], racers, [said for said in results if said != "mine"]


def race_often(tmp_path, times):
    folder = tmp_path / "r"
    RunJournal(folder).close()
    for _ in range(times):
        winner, racers, refused = race(lambda: RunJournal.open(folder))
        owner = f"the run folder {folder} is in use by process {winner.pid} on {socket.gethostname()}"
        assert refused == [owner] * (RACERS - 1)
        with pytest.raises(StorageError, match="is in use by"):
            RunJournal.open(folder)
        for racer in racers:
            racer.kill()  # the folder is free, though it still names the dead owner
    started = time.monotonic()
    RunJournal.open(folder).close()
    assert time.monotonic() - started < 20


def test_one_of_four_gets_the_folder_and_after_its_death_another(tmp_path):
    race_often(tmp_path, 2)


@pytest.mark.fault
def test_one_of_four_gets_the_folder_50_times(tmp_path):
    race_often(tmp_path, 50)


@pytest.mark.slow
def test_one_of_four_creates_the_folder(tmp_path):
    """The others find a folder that already exists, or is just being created."""
    for number in range(2):
        _, racers, refused = race(lambda number=number: RunJournal(tmp_path / str(number)))
        assert all("already exists" in said or "FileExistsError" in said for said in refused), refused
        for racer in racers:
            racer.kill()


class NoLock:
    """A lock that anybody gets."""

    def __init__(self, path, **options):
        self.path = path

    def acquire(self, timeout):
        del timeout

    def release(self):
        pass


class FileThatExists(NoLock):
    """A lock that is held for as long as its file exists, so that the death of its owner does not free it."""

    def acquire(self, timeout):
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            raise filelock.Timeout(str(self.path)) from None

    def release(self):
        os.unlink(self.path)


def test_without_the_lock_two_processes_own_a_folder(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(filelock, "FileLock", NoLock)
    racers = [Racer(lambda: RunJournal.open(tmp_path / "r")) for _ in range(2)]
    RunJournal(tmp_path / "r").close()
    for racer in racers:  # one after the other: the second opens what the first still owns
        os.write(racer.go, b"g")
        assert racer.result() == "mine"
    for racer in racers:
        racer.kill()


@pytest.mark.fault
def test_a_lock_that_outlives_its_owner_keeps_the_folder_closed(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(filelock, "FileLock", FileThatExists)
    with pytest.raises(AssertionError, match=f"0 of {RACERS} own the folder"):
        race_often(tmp_path, 2)
