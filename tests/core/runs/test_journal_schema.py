"""A journal of another format is refused with a sentence, and left alone."""

import sqlite3

import pytest

from reinforge.errors import ConfigError, StorageError
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.journal.repair import check_journal, repair_journal
from reinforge.runs.journal.writer import JournalWriter
from tests.project import call


@pytest.fixture(params=[5, -1, 3])
def other(request, tmp_path):
    folder = tmp_path / "runs" / "r"
    folder.parent.mkdir()
    RunJournal(folder).close()
    database = sqlite3.connect(folder / "run.sqlite")
    database.execute("ALTER TABLE stages RENAME TO steps")
    database.execute(f"PRAGMA user_version = {request.param}")
    database.close()
    fix = "upgrade reinforge" if request.param == 5 else "start a new run"
    return folder, f"has format {request.param}, and this reinforge reads format 4: {fix}"


def test_a_journal_of_another_format_is_refused_and_left_alone(other):
    folder, said = other
    before = (folder / "run.sqlite").read_bytes()
    for arguments, code in ((("list",), 0), (("show", "r"), 4), (("verify", "r"), 4)):
        result = call("runs", *arguments, "--output_dir", str(folder.parent))
        assert (result.exit_code, said in result.output) == (code, True), result.output
    assert (check_journal(folder).problems, repair_journal(folder)) == ([], False)
    with pytest.raises(ConfigError, match=said):
        RunJournal.open(folder)
    for read in (JournalReader(folder).facts, JournalReader(folder).count_episodes):
        with pytest.raises(StorageError, match=said):
            read()
    assert (folder / "run.sqlite").read_bytes() == before


def test_without_looking_at_the_format_another_journal_is_changed(other, monkeypatch):
    """Mutation check."""
    folder, _ = other
    before = (folder / "run.sqlite").read_bytes()
    monkeypatch.setattr(JournalWriter.__init__, "__defaults__", (lambda db, database: None,))
    journal = RunJournal.open(folder)
    journal.set_facts(run_id="s")
    journal.close()
    assert (folder / "run.sqlite").read_bytes() != before
