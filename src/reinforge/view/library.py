"""The runs of a folder as the pages need them, read again only where something has changed.

Whether a run has changed is told by the times and sizes of six of its files. The lock of a run that was running is
tried as well, since a killed process writes nothing. Other locks are not tried again and again: to try one that is free
is to hold it for a moment, in which the run could not be resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reinforge.errors import ReinforgeError
from reinforge.files import TRASH
from reinforge.runs.journal.reader import JOURNAL
from reinforge.runs.journal.served import SERVED
from reinforge.runs.page.chats import TokenTexts
from reinforge.runs.progress import StatusLine
from reinforge.runs.replay import JournalClock, RunReplay
from reinforge.runs.run_folder import (
    LABELS,
    RUNNING,
    RunOverview,
    find_run_folders,
    is_in_use,
    read_config,
    read_overview_of_any,
)
from reinforge.view.episode_table import EpisodeTable

CONFIG = "config.yml"
CHANGING = (JOURNAL, f"{JOURNAL}-wal", "summary.json", CONFIG, LABELS, SERVED)
"""Files of which at least one changes with everything that a page shows."""
MAX_KEPT = 4  # runs whose lists of episodes, and whose tokenizers, are kept in memory

T = TypeVar("T")
Version = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _ReadRun:
    version: Version
    overview: RunOverview
    activity: str
    config: dict[str, Any]


def _keep(kept: dict[Path, T], folder: Path, value: T) -> T:
    kept.pop(folder, None)
    kept[folder] = value
    while len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]
    return value


class RunLibrary:
    """Reads the runs of a folder; for one thread at a time."""

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir.expanduser()
        self._runs: dict[Path, _ReadRun] = {}
        self._watched: dict[Path, tuple[float | None, RunReplay, StatusLine]] = {}
        self._tables: dict[Path, EpisodeTable] = {}
        self._texts: dict[Path, tuple[Version, TokenTexts]] = {}

    def find_folder(self, name: str) -> Path | None:
        """Returns the folder of a run in the output folder; None: there is no run of that name."""
        if not name or name != Path(name).name or name in (".", "..") or name.startswith(TRASH):
            return None
        folder = self.output_dir / name
        try:
            return folder if (folder / JOURNAL).is_file() else None
        except OSError:  # a name that is too long
            return None

    def list_overviews(self) -> list[RunOverview]:
        folders = find_run_folders(self.output_dir)
        for kept in (self._runs, self._watched):
            for gone in kept.keys() - set(folders):
                del kept[gone]
        found = [self.read_overview(folder) for folder in folders]
        return sorted(found, key=lambda run: (-(run.started_s or 0.0), run.folder.name))

    def read_overview(self, folder: Path) -> RunOverview:
        return self._read(folder).overview

    def read_activity(self, folder: Path) -> str:
        return self._read(folder).activity

    def read_config(self, folder: Path) -> dict[str, Any]:
        return self._read(folder).config

    def read_version(self, folder: Path) -> str:
        return hash_version(self._measure(folder))

    def read_version_of_all(self) -> str:
        return hash_version(tuple((folder.name, self._measure(folder)) for folder in find_run_folders(self.output_dir)))

    def get_version(self, run: RunOverview) -> str:
        """Returns the `read_version` from before an overview was read, so that a page never claims to be newer."""
        return hash_version(self._runs[run.folder].version)

    def get_version_of_all(self, runs: Sequence[RunOverview]) -> str:
        folders = sorted(run.folder for run in runs)
        return hash_version(tuple((folder.name, self._runs[folder].version) for folder in folders))

    def read_table(self, folder: Path) -> EpisodeTable:
        table = _keep(self._tables, folder, self._tables.get(folder, EpisodeTable(folder)))
        table.update()
        return table

    def read_excerpts(self, folder: Path) -> int:
        """Reads the next excerpts of a list that is kept; returns how many: 0 if there are no more."""
        return self._tables[folder].read_excerpts() if folder in self._tables else 0

    def read_texts(self, folder: Path) -> TokenTexts:
        """Returns what splits the replies of a run into tokens; read again when the run has another checkpoint."""
        places = tuple(measure_file(folder / name) for name in ("checkpoints", "model"))
        known = self._texts.get(folder)
        if known is None or known[0] != places:
            known = (places, TokenTexts.find(folder, self.read_config(folder)))
        return _keep(self._texts, folder, known)[1]

    def _read(self, folder: Path) -> _ReadRun:
        version = self._measure(folder)
        known = self._runs.get(folder)
        if known is not None and known.version == version:
            return known
        overview = read_overview_of_any(folder)
        if overview.status == RUNNING:
            activity = self._watch(overview)
        else:
            activity = ""
            self._watched.pop(folder, None)
        # the lock counts from now on as it was just found
        version = (*version[: len(CHANGING)], overview.status == RUNNING)
        self._runs[folder] = _ReadRun(version, overview, activity, read_config(folder))
        return self._runs[folder]

    def _watch(self, run: RunOverview) -> str:
        sessions = run.record.sessions if run.record is not None else []
        session_s = sessions[-1].started_s if sessions else None
        if run.folder not in self._watched or self._watched[run.folder][0] != session_s:
            clock = JournalClock()  # another process has taken over: it may have removed what was passed on
            status = StatusLine(clock)
            self._watched[run.folder] = (session_s, RunReplay(run.folder, status, clock), status)
        _, watcher, status = self._watched[run.folder]
        try:
            watcher.update()
        except ReinforgeError:  # it is being removed; the list shows the other runs
            return ""
        return str(status)

    def _measure(self, folder: Path) -> Version:
        known = self._runs.get(folder)
        was_running = known is not None and known.overview.status == RUNNING
        return (*(measure_file(folder / name) for name in CHANGING), was_running and is_in_use(folder))


def measure_file(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)


def hash_version(version: Version) -> str:
    return hashlib.sha256(repr(version).encode()).hexdigest()[:16]
