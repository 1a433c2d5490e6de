"""Folders of runs: their names, whether one can be made, and their removal: only of what a run has written.

A removal renames the folder first, so that a partly removed one is never taken for a run.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sqlite3
from pathlib import Path

import filelock

from reinforge.errors import ConfigError, Problem, StorageError
from reinforge.files import TRASH, make_staging_path, remove_folder, replace_file
from reinforge.runs.journal.journal import LOCK, describe_owner, lock_run
from reinforge.runs.manifest import OWN_FILES
from reinforge.runs.run_folder import is_in_use

MAX_LISTED = 5

PARTIAL_REMOVAL = re.compile(rf"{re.escape(TRASH)}.+-\d+-\d+")  # name of a run folder whose removal was interrupted


def find_partial_removals(output_dir: Path) -> list[Path]:
    """Returns what is left of run folders whose removal was interrupted."""
    folder = output_dir.expanduser()
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted(path for path in found if PARTIAL_REMOVAL.fullmatch(path.name) and path.is_dir())


def remove_run(folder: Path) -> None:
    """Removes a run folder, while holding its lock; refuses what `ensure_removable` does."""
    ensure_removable(folder)
    lock = lock_run(folder)
    try:
        remove_folder(folder)
    finally:
        lock.release()


def ensure_removable(folder: Path) -> None:
    """Raises if a run folder cannot be removed: it is a link, holds files that no run has written, or is in use."""
    if folder.is_symlink():
        raise ConfigError(Problem("", f"{folder} is a symbolic link", f"name the folder itself: {folder.resolve()}"))
    foreign = find_foreign_files(folder)
    if foreign:
        more = f" and {len(foreign) - MAX_LISTED} more" if len(foreign) > MAX_LISTED else ""
        message = f"{folder} holds files that no run has written: {', '.join(foreign[:MAX_LISTED])}{more}"
        raise ConfigError(Problem("", message, "nothing was removed; move them elsewhere first"))
    if is_in_use(folder):
        raise StorageError(f"the run folder {folder} is in use by {describe_owner(folder)}; stop it first")


def find_foreign_files(folder: Path) -> list[str]:
    """Returns the files of a run folder that no run writes, relative to it; a folder with such files only once."""
    found = [path.relative_to(folder).as_posix() for path in sorted(folder.iterdir())]
    for part in ("episodes", "transcripts", "checkpoints"):
        if (folder / part).is_dir() and not (folder / part).is_symlink():
            found += [path.relative_to(folder).as_posix() for path in sorted((folder / part).iterdir())]
    return [name for name in found if not OWN_FILES.fullmatch(name)]


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
