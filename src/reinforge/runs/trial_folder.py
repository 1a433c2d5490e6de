"""Tries whether a run folder can be made in an output folder, by making a small one and removing it again."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import filelock

from reinforge.files import make_staging_path, replace_file
from reinforge.runs.journal import LOCK


def find_obstacle(output_dir: Path) -> str | None:
    """Returns why no run folder can be made in a folder, or None if one can; leaves nothing behind.

    Tries what a run does: it makes the folders, writes and syncs a file, takes the lock and opens a journal.
    """
    output_dir = output_dir.expanduser().absolute()
    missing = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    trial = make_staging_path(output_dir)
    try:
        trial.mkdir(parents=True)
        replace_file(trial / "file", "content")
        with filelock.FileLock(trial / LOCK, timeout=0):
            _write_database(trial / "trial.sqlite")
    except (OSError, sqlite3.Error, NotImplementedError) as error:  # filelock raises the last one: no locks here
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(trial, ignore_errors=True)
        with contextlib.suppress(OSError):  # not made, or another process put a run there in the meantime
            for path in missing:
                path.rmdir()
    return None


def _write_database(path: Path) -> None:
    database = sqlite3.connect(path)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE rows (id INTEGER)")
        database.commit()
    finally:
        database.close()
