"""A journal of any size: what `runs show` and a resume read of it does not grow with its episodes. No clock is read."""

import contextlib
import sqlite3

import pytest

from reinforge.runs.journal import repair
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import DAMAGE_MARK, DamagedJournal, JournalReader
from reinforge.runs.journal.repair import check_journal, repair_journal
from reinforge.runs.rows import EpochSnapshot
from reinforge.runs.run_folder import read_overview, read_record
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from tests.doubles import examples

EPOCHS, EPISODES = 4, 10


@pytest.fixture
def folder(tmp_path):
    journal = RunJournal(tmp_path / "r")
    journal.set_facts(run_id="r", status="stopped", reason="a limit")
    journal.start_session()
    for epoch in range(-1, EPOCHS):
        for number in range(EPISODES if epoch >= 0 else 0):
            journal.record_episode(EpisodeRecord(EpisodeKey("collect", epoch, "0", number), examples(1)[0], reward=1.0))
        journal.record_snapshot(EpochSnapshot(epoch, epoch + 1, None, {"epoch": epoch, "long": "x" * 1000}))
    journal.close()
    return tmp_path / "r"


class Statements:
    def __init__(self, monkeypatch, folder):
        self.folder, self.asked = folder, []
        connect = sqlite3.connect

        def connect_and_trace(*arguments, **options):
            connection = connect(*arguments, **options)
            connection.set_trace_callback(self.asked.append)
            return connection

        monkeypatch.setattr(sqlite3, "connect", connect_and_trace)
        self._connect = connect

    def scans(self, table):
        found = []
        with contextlib.closing(self._connect(self.folder / "run.sqlite")) as db:
            for statement in self.asked:
                if statement.lstrip().startswith(("SELECT", "DELETE", "UPDATE")):
                    plan = db.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
                    lines = [line for *_, line in plan if line.startswith(f"SCAN {table}") and "INDEX" not in line]
                    found += [statement] if lines else []
        return found


def test_a_run_is_shown_without_its_episodes_and_states(folder, monkeypatch):
    statements = Statements(monkeypatch, folder)
    overview = read_overview(folder)
    assert (overview.epochs_done, overview.record.snapshots[0].epoch) == (EPOCHS, EPOCHS - 1)
    asked = [each for each in statements.asked if "episodes" in each]
    assert asked == [], "the table that grows is not touched"
    assert not any("data" in each and "FROM snapshots" in each for each in statements.asked), "states may be large"


def test_a_resume_reads_the_state_that_it_uses_and_scans_no_episodes(folder, monkeypatch):
    statements = Statements(monkeypatch, folder)
    journal = RunJournal.open(folder)
    assert journal.find_snapshot(2).state["epoch"] == 2
    assert journal.find_snapshot(99) is None
    journal.rewind(2, forget_jobs=True, forget_episodes=True)
    assert len(journal.packed_episodes("collect", 2)) == EPISODES
    journal.close()
    assert statements.scans("episodes") == []
    assert JournalReader(folder).count_collected() == {0: 10, 1: 10, 2: 10}, "those of epoch 3 are forgotten"


def test_a_scan_of_the_episodes_would_be_found(folder, monkeypatch):
    """Mutation check."""
    statements = Statements(monkeypatch, folder)
    JournalReader(folder).count_outcomes()
    assert len(statements.scans("episodes")) == 1


def test_of_a_large_journal_only_the_newest_episodes_are_checked(folder):
    assert check_journal(folder).num_episodes == EPOCHS * EPISODES
    found = check_journal(folder, newest=EPISODES)
    assert (found.problems, found.num_episodes) == ([], EPISODES)
    assert found.num_rows > EPISODES + EPOCHS, "every row of the other tables"


def damage(folder, epoch):
    with contextlib.closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
        db.execute("UPDATE episodes SET reward = 0.5 WHERE key = ?", (f"collect/{epoch}/0/0/3",))


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(repair, "MAX_WHOLE_BYTES", 0)
    monkeypatch.setattr(repair, "NEWEST_EPISODES", EPISODES)


def test_new_damage_is_mended_before_a_resume(folder, large):
    damage(folder, EPOCHS - 1)
    assert repair_journal(folder)
    assert JournalReader(folder).count_episodes() == EPOCHS * EPISODES - 1


def test_old_damage_is_mended_by_the_resume_after_the_one_that_meets_it(folder, large):
    damage(folder, 0)
    assert not repair_journal(folder), "it is not looked for in a large journal"
    journal = RunJournal.open(folder)
    with pytest.raises(DamagedJournal):
        journal.packed_episodes("collect", 0)
    journal.close()
    assert repair_journal(folder)
    assert not (folder / DAMAGE_MARK).exists()
    assert len(JournalReader(folder).packed_episodes("collect", 0)) == EPISODES - 1


def test_old_damage_would_stop_every_resume_if_it_were_not_noted(folder, large, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(RunJournal, "_note_damage", lambda self: None)
    damage(folder, 0)
    for _ in range(2):
        assert not repair_journal(folder)
        journal = RunJournal.open(folder)
        with pytest.raises(DamagedJournal):
            journal.packed_episodes("collect", 0)
        journal.close()


def test_who_only_reads_a_run_leaves_no_mark(folder):
    damage(folder, 0)
    with pytest.raises(DamagedJournal):
        JournalReader(folder).packed_episodes("collect", 0)
    assert not (folder / DAMAGE_MARK).exists()
    assert read_record(folder).facts["run_id"] == "r"
