"""Runs of older versions: format 2 opens, is verified and resumes, format 1 is upgraded, a newer one is refused.

`run_of_format_2.tar.gz` is a run that the version of format 2 made; it stopped at its limit after two of three epochs.
"""

import asyncio
import sqlite3
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.errors import ConfigError
from reinforge.runs.journal import writer
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.journal.repair import check_journal, repair_journal
from reinforge.runs.journal.schema import SCHEMA_VERSION
from tests.journal_rows import read_rows
from tests.scripted_run import ScriptedRun
from tests.unit.runs.test_journal_schema import write_format_1

ARCHIVE = Path(__file__).parents[2] / "data" / "run_of_format_2.tar.gz"


@pytest.fixture
def old(tmp_path, monkeypatch):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "runs", filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "r"


def call(*arguments):
    return CliRunner().invoke(main, ["runs", *arguments, "--output_dir", "runs"])


def the_same_run(folder):
    """The run that the archive holds, as it was started."""
    made = ScriptedRun(folder, reward=lambda output, expected: float(output[-1]), count=24)
    made.settings["finetuning"] |= {"num_epochs": 3, "gate": {"num_samples": 1}}
    made.settings["trajectory_builders"]["builder"] |= {"num_generations": 2, "examples_per_epoch": 4}

    async def save(staged, version):
        staged.mkdir()
        (staged / "model.safetensors").write_bytes(b"weights")
        return True

    async def restore(folder, version):
        await made.adapter.server.publish(version)

    made.adapter.save, made.adapter.restore = save, restore
    return made


def test_a_run_of_format_2_opens_and_is_sound_without_being_changed(old):
    before = (old / "run.sqlite").read_bytes()
    assert "r     stopped  2 of 3" in call("list").output
    shown = call("show", "r")
    assert (shown.exit_code, "epoch 1: collected 8 trajectories" in shown.output) == (0, True), shown.output
    verified = call("verify", "r")
    assert verified.exit_code == 0, verified.output
    assert "20 episodes, 50 rows read; 50 rows of an older reinforge have no checksum" in verified.output
    assert (old / "run.sqlite").read_bytes() == before


def test_a_run_of_format_2_resumes(old):
    done = asyncio.run(the_same_run(old.parent).run(resume=old, allow_config_change=True))
    assert done.status == "completed"
    assert "resuming after epoch 1 from checkpoints/step-000002" in (old / "run.log").read_text()
    reader = JournalReader(old)
    assert reader.read_format() == SCHEMA_VERSION
    assert [row.epoch for row in reader.metrics(before=9)] == [0, 1, 2]
    assert [version.version for version in reader.policy_versions()] == [0, 1, 2, 3]
    assert call("verify", "r").exit_code == 0
    unsealed = read_rows(old, "SELECT epoch FROM episodes WHERE phase = 'collect' AND checksum IS NULL GROUP BY epoch")
    assert unsealed == [(0,), (1,)], "what was recorded since has its checksum"
    assert "rows of an older reinforge have no checksum" in call("verify", "r").output


def test_a_row_of_format_2_that_is_no_json_any_more_is_damage(old):
    database = sqlite3.connect(old / "run.sqlite")
    with database:
        database.execute("UPDATE metrics SET data = substr(data, 2) WHERE epoch = 1")
    database.close()
    assert check_journal(old).problems == ["metrics 1: its data is not JSON"]
    assert repair_journal(old)
    reader = JournalReader(old)
    assert (reader.read_format(), check_journal(old).problems) == (SCHEMA_VERSION, [])
    assert [row.epoch for row in reader.metrics(before=9)] == [0, 1], "from training_metrics.jsonl"


def test_a_run_of_format_1_says_how_it_is_upgraded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_format_1(tmp_path / "runs" / "r")
    listed, verified = call("list"), call("verify", "r")
    said = "has format 1 of an older reinforge; `reinforge finetune FILE --resume runs/r` upgrades it to format 3"
    assert (listed.exit_code, said in listed.output) == (0, True), listed.output
    assert (verified.exit_code, said in verified.output) == (4, True), verified.output


def test_a_run_of_a_newer_version_is_refused_and_left_alone(old):
    database = sqlite3.connect(old / "run.sqlite")
    database.execute("PRAGMA user_version = 4")
    database.close()
    before = (old / "run.sqlite").read_bytes()
    said = "has format 4, written by a newer reinforge; this one reads up to 3: upgrade reinforge"
    for arguments, code in ((("list",), 0), (("show", "r"), 4), (("verify", "r"), 4)):
        result = call(*arguments)
        assert (result.exit_code, said in result.output) == (code, True), result.output
    with pytest.raises(ConfigError, match=said):
        RunJournal.open(old)
    assert (old / "run.sqlite").read_bytes() == before


def test_without_looking_at_the_format_a_newer_journal_is_changed(old, monkeypatch):
    """Mutation check."""
    database = sqlite3.connect(old / "run.sqlite")
    database.execute("PRAGMA user_version = 4")
    database.close()
    before = (old / "run.sqlite").read_bytes()
    monkeypatch.setattr(writer, "create_or_upgrade", lambda db, database: None)
    RunJournal.open(old).close()
    assert (old / "run.sqlite").read_bytes() != before
