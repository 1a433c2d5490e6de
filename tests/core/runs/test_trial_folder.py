"""`check` tries the output folder as a run would use it, and leaves nothing behind."""

import contextlib
import sqlite3

import filelock
import pytest

from reinforge.runs import removal
from reinforge.runs.removal import find_obstacle


def test_a_usable_folder_has_no_obstacle_and_is_left_as_it_was(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("mine")
    assert find_obstacle(tmp_path / "runs") is None
    assert find_obstacle(tmp_path / "new" / "deep" / "runs") is None
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "runs"]


def test_a_file_where_a_folder_is_expected_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    found = find_obstacle(tmp_path / "taken" / "runs")
    assert found is not None
    assert found.startswith(("NotADirectoryError: ", "FileExistsError: "))
    assert "taken" in found
    assert (tmp_path / "taken").read_text() == "a file"


@contextlib.contextmanager
def no_locks(path, timeout):
    raise NotImplementedError("FileSystem does not appear to support flock")
    yield


def no_database(path):
    raise sqlite3.OperationalError("locking protocol")


@pytest.mark.parametrize(
    ("module", "name", "broken", "expected"),
    [
        (filelock, "FileLock", no_locks, "NotImplementedError: FileSystem does not appear to support flock"),
        (removal, "_write_database", no_database, "OperationalError: locking protocol"),
    ],
)
def test_a_file_system_without_locks_or_databases_is_reported(tmp_path, monkeypatch, module, name, broken, expected):
    monkeypatch.setattr(module, name, broken)
    assert find_obstacle(tmp_path / "new" / "runs") == expected
    assert list(tmp_path.iterdir()) == [], "what it made is removed"
