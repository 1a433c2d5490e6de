"""Everything that the journal acknowledged is in it, each row once, however the process dies."""

import os
import random
import select
import shutil
import signal
import sqlite3
import time

import pytest

from reinforge.files import to_json
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import JournalReader
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from tests.doubles import examples
from tests.journal_rows import read_rows

PER_EPOCH = 8


def write_forever(folder, acknowledge):
    """Records epochs, each with episodes, a stage and a job; acknowledges every epoch that is on disk."""
    journal, item = RunJournal(folder), examples(1)[0]
    for epoch in range(1_000_000):
        for number in range(PER_EPOCH):
            journal.record_episode(EpisodeRecord(EpisodeKey("collect", epoch, "0", number), item, reward=0.5))
        key = f"r/{epoch}"
        ref = TrainingJobRef(run_id="r", backend="local", metadata={"epoch": epoch})
        journal.record_job_intent(key, epoch, "r")
        journal.record_job_submission(key, ref)
        journal.record_job(ref, TrainingJobStatus(run_id="r", backend="local", status="completed"), key)
        journal.record_stage(epoch, "AWAIT", {})
        acknowledge(epoch)


def killed_writer(folder, after_s):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            write_forever(folder, lambda epoch: os.write(writer, epoch.to_bytes(4, "big")))
        finally:
            os._exit(1)
    os.close(writer)
    assert select.select([reader], [], [], 30)[0], "nothing was acknowledged"
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    return [int.from_bytes(data[at : at + 4], "big") for at in range(0, len(data) - len(data) % 4, 4)]


def check(folder, acknowledged):
    """Checks the journal as the killed writer left it, and that another owner continues it."""
    assert acknowledged == [*range(len(acknowledged))]
    database = sqlite3.connect(f"file:{folder / 'run.sqlite'}?mode=ro", uri=True)
    assert database.execute("PRAGMA quick_check").fetchall() == [("ok",)]
    database.close()
    journal = RunJournal.open(folder)
    last = len(acknowledged) - 1
    stages = [epoch for (epoch,) in read_rows(journal.folder, "SELECT epoch FROM stages ORDER BY id")]
    assert stages == [*range(len(stages))], "each once, none left out"
    assert len(stages) > last, "an acknowledged stage is not there"
    jobs = {job.job_key: job.status for job in journal.jobs()}
    assert jobs.keys() >= {f"r/{epoch}" for epoch in range(len(stages))}
    assert all(jobs[f"r/{epoch}"].status == "completed" for epoch in range(len(stages)))
    episodes = read_rows(journal.folder, "SELECT epoch, generation FROM episodes ORDER BY epoch, generation")
    assert episodes == [divmod(number, PER_EPOCH) for number in range(len(episodes))], "a prefix of what was recorded"
    assert len(episodes) >= len(stages) * PER_EPOCH
    journal.record_stage(len(stages), "AWAIT", {})
    assert read_rows(journal.folder, "SELECT count(*) FROM stages") == [(len(stages) + 1,)]
    journal.close()


def kill_often(tmp_path, times):
    rng = random.Random(times)
    num_acknowledged = 0
    for number in range(times):
        folder = tmp_path / str(number)
        acknowledged = killed_writer(folder, rng.uniform(0, 0.1))
        check(folder, acknowledged)
        num_acknowledged += len(acknowledged)
    assert num_acknowledged > times, "the writer was killed before it did anything"


def test_a_writer_killed_at_any_time_leaves_everything_that_it_acknowledged(tmp_path):
    kill_often(tmp_path, 5)


@pytest.mark.fault
def test_200_writers_killed_at_any_time_leave_everything_that_they_acknowledged(tmp_path):
    kill_often(tmp_path, 200)


def test_a_journal_whose_process_was_killed_while_it_created_the_file_can_be_read(tmp_path):
    """Before the write-ahead log is on, SQLite keeps a rollback journal, which only a writer may use."""
    for name in ("alive", "dead"):
        (tmp_path / name).mkdir()
    database = sqlite3.connect(tmp_path / "alive" / "run.sqlite", isolation_level=None)
    database.execute("PRAGMA cache_size = 1")
    database.execute("CREATE TABLE other (value)")
    database.execute("BEGIN IMMEDIATE")
    database.executemany("INSERT INTO other VALUES (?)", [("x" * 3000,)] * 200)
    for path in (tmp_path / "alive").iterdir():
        shutil.copy(path, tmp_path / "dead")
    database.close()
    assert (tmp_path / "dead" / "run.sqlite-journal").stat().st_size > 0
    assert JournalReader(tmp_path / "dead").facts() == {}
    journal = RunJournal.open(tmp_path / "dead")
    assert read_rows(journal.folder, "SELECT count(*) FROM other") == [(0,)]
    journal.close()


def record_without_waiting(journal, epoch, stage, data):
    journal._writer.put(lambda db: time.sleep(1))  # a disk that is slower than the kill
    journal._insert("stages", epoch=epoch, stage=stage, at_s=time.time(), data=to_json(data))


def test_rows_that_are_acknowledged_before_they_are_on_disk_are_missing(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(RunJournal, "record_stage", record_without_waiting)
    with pytest.raises(AssertionError, match="an acknowledged stage is not there"):
        kill_often(tmp_path, 15)
