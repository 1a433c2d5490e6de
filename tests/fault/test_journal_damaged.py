"""A journal with a changed bit is told as damaged and rebuilt from what is whole; nothing wrong passes as sound."""

import json
import random
import shutil
import sqlite3
import sys

import pytest
import yaml
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.runs.journal import schema
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import REPAIR_NOTES, DamagedJournal, JournalReader
from reinforge.runs.journal.repair import check_journal, repair_journal
from reinforge.runs.journal.schema import compute_checksum
from reinforge.runs.rows import EpochMetrics, EpochSnapshot, ValidationRow
from reinforge.runs.run_folder import read_overview
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from tests.doubles import examples
from tests.fault.kit import KILLED, Child
from tests.journal_rows import read_rows
from tests.project import Project

TABLES = ("run", "sessions", "stages", "jobs", "episodes", "policy_versions", "metrics", "validations", "snapshots")
EPOCHS = 3


def state_of(epoch):
    trainer = None if epoch < 0 else {"row": {"epoch": epoch}, "prompts": {"": ["why?"] * 30}}
    return {"epoch": epoch, "version": epoch + 1, "adopt": epoch >= 0, "trainer": trainer, "counters": {}}


def write_journal(folder):
    """Records a small run with rows in every table; returns the bytes of its one file."""
    journal, item = RunJournal(folder), examples(1)[0]
    journal.set_facts(run_id="r", status="stopped", project_root="/somewhere", reason="a limit")
    journal.start_session()
    journal.record_validation(ValidationRow(-1, 0.25, metrics={"reward": 0.25}))
    journal.record_snapshot(EpochSnapshot(-1, 0, "checkpoints/step-000000", state_of(-1)))
    journal.record_policy_version(0, "weights-0", 0, "checkpoints/step-000000")
    for epoch in range(EPOCHS):
        for number in range(12):
            record = EpisodeRecord(EpisodeKey("collect", epoch, "0", number), item, reward=number / 10)
            record.item = item.copy_with_updates(output_obj=f"☕ {random.Random(number).randbytes(300).hex()}")
            journal.record_episode(record)
        ref = TrainingJobRef(run_id="r", backend="local", metadata={"epoch": epoch})
        journal.record_job_intent(f"r/{epoch}", epoch, "r")
        journal.record_job_submission(f"r/{epoch}", ref)
        journal.record_job(ref, TrainingJobStatus(run_id="r", backend="local", status="completed"), f"r/{epoch}")
        journal.record_snapshot(EpochSnapshot(epoch, epoch + 1, None, state_of(epoch)))
        journal.record_policy_version(epoch + 1, f"weights-{epoch + 1}", 4, None)
        journal.record_metrics(EpochMetrics(epoch, 0.1 * epoch, job={"loss": 0.5}))
        journal.record_validation(ValidationRow(epoch, 0.5, metrics={"reward": 0.5}))
        journal.record_stage(epoch, "AWAIT", {"num_updates": 4})
    journal.forget_checkpoint("checkpoints/step-000000")
    journal.record_resume(1)
    journal.end_session("stopped: a limit")
    journal.close()
    return (folder / "run.sqlite").read_bytes()


def contents(folder):
    return {table: read_rows(folder, f"SELECT * FROM {table}") for table in TABLES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "r"
    data = write_journal(folder)
    assert [path.name for path in folder.glob("run.sqlite*")] == ["run.sqlite"], "one file, without write-ahead log"
    return data, contents(folder)


def flips(data, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        at = rng.randrange(len(data))
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        yield at, bytes(changed)


def find_overlooked(folder, whole, count, seed):
    data, rows = whole
    overlooked, num_changed = [], 0
    for at, changed in flips(data, count, seed):
        (folder / "run.sqlite").write_bytes(changed)
        try:
            is_same = contents(folder) == rows
        except (sqlite3.Error, ValueError, LookupError, TypeError):  # also of a packed episode
            is_same = False
        num_changed += not is_same
        if not is_same and not check_journal(folder).problems:
            overlooked.append(at)
    return num_changed, overlooked


def test_no_changed_bit_of_a_journal_is_overlooked(tmp_path, whole):
    num_changed, overlooked = find_overlooked(tmp_path, whole, 100, seed=1)
    assert num_changed > 40, "most of the file is rows"
    assert overlooked == []


@pytest.mark.fault
def test_none_of_4000_changed_bits_of_a_journal_is_overlooked(tmp_path, whole):
    assert find_overlooked(tmp_path, whole, 4000, seed=2)[1] == []


def test_without_comparing_checksums_changed_bits_are_overlooked(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(schema, "find_problem", lambda row, checksum: None)
    num_changed, overlooked = find_overlooked(tmp_path, whole, 30, seed=1)
    assert len(overlooked) > num_changed / 4, "the pages of the file still look right"


def test_a_checksum_is_of_values_and_types():
    values = (1, 1.0, "1", b"1", None, "", "11", -0.0, 0.0)
    assert compute_checksum(*values) == compute_checksum(*values[:7], 0.0, -0.0), "SQLite has no negative zero"
    assert len({compute_checksum(value) for value in (1, 1.0, "1", b"1", None, "", "null")}) == 7
    assert compute_checksum("a", "bc") != compute_checksum("ab", "c")
    assert compute_checksum("☕") == compute_checksum(bytearray("☕".encode()))


def test_a_damaged_row_is_never_returned(tmp_path):
    write_journal(tmp_path / "r")
    db = sqlite3.connect(tmp_path / "r" / "run.sqlite")
    with db:
        db.execute("UPDATE metrics SET data = replace(data, '0.5', '0.7') WHERE epoch = 1")
    db.close()
    reader = JournalReader(tmp_path / "r")
    assert [row.epoch for row in reader.metrics(before=1)] == [0]
    with pytest.raises(DamagedJournal, match=r"run.sqlite is damaged: metrics 1: its checksum differs\n.*runs verify"):
        reader.metrics(before=2)


def test_a_rebuilt_journal_has_every_whole_row_and_no_other(tmp_path, whole):
    """Rows that are lost stay lost; what is left is what was recorded."""
    data, rows = whole
    known = {(table, row) for table in TABLES for row in rows[table]}
    num_rebuilt = num_kept = 0
    for at, changed in flips(data, 20, seed=3):
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / "run.sqlite").write_bytes(changed)
        if not repair_journal(folder):
            continue
        num_rebuilt += 1
        assert check_journal(folder).problems == []
        assert (folder / "run.sqlite.damaged").read_bytes() == changed
        found = {(table, row) for table in TABLES for row in contents(folder)[table]}
        added = {row[0] for table, row in found - known if table == "run"}
        assert {table for table, _ in found - known} <= {"run"}
        assert added <= {REPAIR_NOTES, "run_id"}
        num_kept += len(found & known)
        assert read_overview(folder).status in ("stopped", "interrupted")
    assert num_rebuilt > 6
    assert num_kept > 0.7 * num_rebuilt * len(known)


def test_a_file_that_is_no_database_is_rebuilt_from_the_files_beside_it(tmp_path):
    folder = tmp_path / "r"
    write_journal(folder)
    (folder / "run.sqlite").write_bytes(b"no database" * 1000)
    (folder / "training_metrics.jsonl").write_text('{"epoch": 0, "avg_reward": 0.5}\n{"epoch": 1, "avg')
    (folder / "validation_history.json").write_text('[{"epoch": -1, "avg_reward": 0.25}]')
    assert repair_journal(folder)
    reader = JournalReader(folder)
    assert [(row.epoch, row.avg_reward) for row in reader.metrics(before=9)] == [(0, 0.5)]
    assert [(row.epoch, row.avg_reward) for row in reader.validations()] == [(-1, 0.25)]
    assert "rebuilt from its 0 intact rows" in reader.facts()[REPAIR_NOTES][0]


@pytest.mark.parametrize(
    ("damage", "newest"),
    [
        ("UPDATE metrics SET data = replace(data, '0.5', '0.7') WHERE epoch = 1", 1),
        ("UPDATE validations SET data = replace(data, '0.5', '0.7') WHERE epoch = 0", 0),
        ("UPDATE validations SET epoch = 7 WHERE epoch = 1", 1),
        ("UPDATE validations SET data = replace(data, '0.25', '0.75') WHERE epoch = -1", -1),
        ("UPDATE policy_versions SET fingerprint = 'x' WHERE version = 1", 2),
        ("UPDATE jobs SET at_s = 7 WHERE epoch = 2", 1),
        ("UPDATE episodes SET reward = 7 WHERE epoch = 1 AND generation = 3", 2),
        ("UPDATE sessions SET pid = pid + 1", 2),
    ],
)
def test_a_run_resumes_from_the_newest_snapshot_before_which_nothing_is_missing(tmp_path, damage, newest):
    """A snapshot needs the metrics and validations of the epochs before it, its job, and the version before its own."""
    folder = tmp_path / "r"
    write_journal(folder)
    db = sqlite3.connect(folder / "run.sqlite")
    with db:
        db.execute(damage)
    db.close()
    assert repair_journal(folder)
    assert JournalReader(folder).snapshot_rows()[0].epoch == newest
    assert not repair_journal(folder), "once is enough"


@pytest.fixture(scope="module")
def killed(tmp_path_factory, tiny_model_dir):
    folder = tmp_path_factory.mktemp("killed")
    project = Project(folder, tiny_model_dir).set("finetuning.num_epochs", 3)
    project.set("trajectory_builders.builder.examples_per_epoch", 4).rows = project.rows[:24]
    project.write("data.jsonl", "".join(json.dumps(row) + "\n" for row in project.rows))
    project.write("run.yml", yaml.safe_dump(project.settings, sort_keys=False))
    child = Child(folder, ["run.yml", "--run_name", "r"], "batch.sealed:3")
    assert child.wait() == KILLED, child.said
    return folder


@pytest.fixture
def run(killed, tmp_path, monkeypatch):
    shutil.copytree(killed, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("task", None)
    return tmp_path / "project" / "runs" / "r"


def call(*arguments):
    return CliRunner().invoke(main, [*arguments])


def change_a_stage(run):
    db = sqlite3.connect(run / "run.sqlite")
    with db:
        db.execute("UPDATE stages SET data = replace(data, '32', '33') WHERE id = 3")
    db.close()


def lose_the_log(run):
    """As a copy of `run.sqlite` alone: everything that the run recorded is in the write-ahead log."""
    assert (run / "run.sqlite-wal").stat().st_size > 0
    for name in ("run.sqlite-wal", "run.sqlite-shm"):
        (run / name).unlink(missing_ok=True)


def overwrite_the_header(run):
    db = sqlite3.connect(run / "run.sqlite")
    db.execute("PRAGMA journal_mode = DELETE")  # moves the write-ahead log into the file
    db.close()
    data = bytearray((run / "run.sqlite").read_bytes())
    data[:100] = b"\xa5" * 100
    (run / "run.sqlite").write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said", "note"),
    [
        pytest.param(
            change_a_stage, "stages 3: its checksum differs", "without 1 damaged rows", marks=pytest.mark.slow
        ),
        pytest.param(
            lose_the_log,
            r"it ends before checkpoints/step-000002: its write-ahead log (run.sqlite-wal) is gone",
            "rebuilt",
            marks=pytest.mark.slow,
        ),
        (overwrite_the_header, "DatabaseError: file is not a database", "rebuilt from its 0 intact rows"),
    ],
)
def test_a_run_with_a_damaged_journal_says_so_and_resumes(run, damage, said, note):
    damage(run)
    listed, shown, verified = (
        call("runs", *arguments, "--output_dir", "runs") for arguments in (("list",), ("show", "r"), ("verify", "r"))
    )
    for result, code in ((listed, 0), (shown, 4), (verified, 4)):
        assert result.exit_code == code, result.output
        assert "a fault of reinforge" not in result.output
    assert "r     damaged" in listed.output or "r  damaged" in listed.output, listed.output
    assert said in verified.output
    assert "recoverable: " in verified.output
    assert "training_metrics.jsonl, 3 checkpoints; `reinforge finetune --resume runs/r`" in verified.output
    resumed = call("finetune", "run.yml", "--resume", "r")
    assert resumed.exit_code == 0, resumed.output
    log = (run / "run.log").read_text()
    assert note in log, log
    assert "resuming after epoch 1 from checkpoints/step-000002" in log
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], len(JournalReader(run).metrics(before=9))) == ("completed", 3)
    assert call("runs", "verify", "runs/r").exit_code == 0
