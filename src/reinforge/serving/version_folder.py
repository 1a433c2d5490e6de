"""A folder with the versions of a served model, of which one is promoted and one may be a candidate.

    support/                  is served as `support`
        versions.json         the promoted version, and the candidate with its share of conversations
        log.jsonl             every change: what, by whom, why, on which evidence
        v000006/              a version: a model or an adapter, and version.json with its run, data and card
        v000007/

A change is the atomic replacement of `versions.json`, which has the event itself: a process that is killed leaves the
state before it or after it, and the next reader adds an event that is missing in the log. Numbers are never used again.
"""

from __future__ import annotations

import getpass
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from reinforge.crash import crash_point
from reinforge.errors import ConfigError, Problem, StorageError
from reinforge.files import (
    MANIFEST,
    PRIVATE_FILE,
    append_line,
    make_private_folder,
    read_json_file,
    read_lines,
    read_manifest,
    remove_leftovers,
    storage_boundary,
    sync,
    write_folder,
    write_json,
)

STATE, LOG, VERSION = "versions.json", "log.jsonl", "version.json"
CHANGES, ADDS = ".lock", ".add.lock"
"""Locks: a copy of a large model holds the second one, so that a rollback does not wait for it."""
DEFAULT_FOLDER = Path(".reinforge/versions")
LOCK_S, NO_LIMIT = 10.0, -1
DEFAULT_SHARE = 0.2

Action = Literal["add", "promote", "rollback", "try", "stop"]


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the log."""

    number: int  # counts the changes of the folder, from 1
    at: str  # UTC, ISO 8601
    action: Action
    version: int
    previous: int | None  # the version that was promoted before
    by: str  # `user NAME`, or what has decided
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionState:
    """Which versions answer."""

    promoted: int
    candidate: int | None = None
    share: float = 0.0  # of the conversations, for the candidate
    seed: int = 0  # of the split: secret, and new for each candidate, so that clients cannot choose their version
    event: Event | None = None  # the newest


@dataclass(frozen=True, slots=True)
class Cause:
    """Who or what changes a folder, and why."""

    reason: str = ""
    by: str = ""  # empty: the user of this process
    evidence: Mapping[str, Any] = field(default_factory=dict)
    seen: VersionState | None = None  # what it was decided on; if it no longer holds, nothing is changed

    def holds(self, state: VersionState) -> bool:
        return self.seen is None or replace(self.seen, event=None) == replace(state, event=None)


@dataclass(frozen=True, slots=True)
class Version:
    """One version, and where it comes from."""

    number: int
    created: str  # UTC, ISO 8601
    model: str  # what was added
    run: str | None = None  # folder of the run that trained it
    data: str | None = None  # what it was trained on
    card: str | None = None  # path of its model card
    settings: dict[str, Any] = field(default_factory=dict)  # how it is loaded: `max_model_len`, `dtype`, ...


NO_CAUSE = Cause()


def is_version_folder(path: Path) -> bool:
    return any((path / name).is_file() for name in (STATE, LOG))


class VersionFolder:
    """The versions of one served name; any number of processes may read and change it."""

    def __init__(self, folder: Path):
        self.folder = folder.expanduser().absolute()

    @classmethod
    def find(cls, name: str, versions_dir: Path = DEFAULT_FOLDER, *, creates: bool = False) -> VersionFolder:
        """Returns the folder of a name or a path; a `ConfigError` if there is none, unless it is to be created."""
        named = versions_dir.expanduser() / name
        for folder in (Path(name).expanduser(), named):
            if is_version_folder(folder):
                return cls(folder)
        if creates:
            return cls(named if Path(name).name == name else Path(name))
        known = sorted(path.parent.name for path in versions_dir.expanduser().glob(f"*/{STATE}"))
        message = f"there is no folder of versions named {name!r} here or in {versions_dir}"
        fix = f"name one of {', '.join(known)}" if known else "make one: reinforge versions NAME --add RUN"
        raise ConfigError(Problem("NAME", message, fix))

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def state_file(self) -> Path:
        return self.folder / STATE

    def path(self, number: int) -> Path:
        return self.folder / f"v{number:06d}"

    def numbers(self) -> list[int]:
        found = (path.name.removeprefix("v") for path in self.folder.glob("v*/"))
        return sorted(int(each) for each in found if each.isdecimal())

    def read(self) -> VersionState:
        """Returns the current state; a `ConfigError` if the file is missing or damaged."""
        try:
            found = dict(read_json_file(self.state_file))
            event = found.pop("event")
            return VersionState(**found, event=Event(**event))
        except (OSError, ValueError, TypeError, KeyError) as error:
            message = f"{self.state_file} cannot be read: {error}"
            fix = f"delete it, and promote a version: reinforge versions {self.folder} --promote N"
            raise ConfigError(Problem("", message, fix)) from None

    def read_version(self, number: int) -> Version:
        try:
            return Version(**read_json_file(self.path(number) / VERSION))
        except (OSError, ValueError, TypeError):
            raise self._refuse(number, f"{VERSION} cannot be read") from None

    def read_log(self) -> list[Event]:
        """Returns all changes, the oldest first."""
        events = [Event(**row) for row in self._read_rows()]
        newest = self.read().event
        is_whole = bool(events) and newest is not None and events[-1].number >= newest.number
        return events if newest is None or is_whole else [*events, newest]

    def _read_rows(self) -> list[dict[str, Any]]:
        log = self.folder / LOG
        return read_lines(log) if log.is_file() else []

    def add(self, model: Path, facts: Mapping[str, Any], cause: Cause = NO_CAUSE) -> int:
        """Copies a model into the folder as its next version; the first one is promoted at once.

        Args:
            facts: Fields of `Version`: `run`, `data`, `card`, `settings`.
        """
        make_private_folder(self.folder)
        with self._lock(ADDS, NO_LIMIT):
            with self._lock():
                remove_leftovers(self.folder)
            number = max(self.numbers(), default=0) + 1
            version = Version(number, _now(), str(model), **facts)
            ignored = shutil.ignore_patterns("training", MANIFEST)

            def fill(staged: Path) -> None:
                shutil.copytree(model, staged, ignore=ignored)
                write_json(staged / VERSION, asdict(version))

            with storage_boundary(self.path(number)):
                write_folder(self.path(number), fill, version=number)
            with self._lock():
                state = self.read() if self.state_file.is_file() else VersionState(number)
                self._commit(state, "add", number, cause, f"from {model}")
        return number

    def promote(self, number: int, cause: Cause = NO_CAUSE) -> VersionState:
        """Makes a version the one that answers, and ends the candidate's share, whose comparison was with another."""
        with self._lock():
            if cause.seen is not None and not cause.holds(now := self.read()):
                return now
            self._check(number)
            return self._commit(VersionState(number), "promote", number, cause)

    def rollback(self, to: int | None = None, cause: Cause = NO_CAUSE) -> VersionState:
        """Promotes an earlier version; None: the one before the current version was promoted."""
        with self._lock():
            if (number := to or self.find_earlier()) is None:
                raise self._refuse(self.read().promoted, "is the first that was promoted; pass --to N")
            self._check(number)
            return self._commit(VersionState(number), "rollback", number, cause)

    def try_candidate(self, number: int, share: float = DEFAULT_SHARE, cause: Cause = NO_CAUSE) -> VersionState:
        """Gives a version a share of the conversations, in (0, 1]."""
        with self._lock():
            self._check(number)
            state = self.read()
            if number == state.promoted:
                raise self._refuse(number, "is promoted, so it cannot be its own candidate")
            chosen = replace(state, candidate=number, share=share, seed=secrets.randbits(63))
            return self._commit(chosen, "try", number, cause, f"{share:.0%} of the conversations")

    def stop_candidate(self, cause: Cause = NO_CAUSE) -> VersionState:
        """Takes the share from the candidate; does nothing if there is none."""
        with self._lock():
            state = self.read()
            if state.candidate is None or not cause.holds(state):
                return state
            return self._commit(VersionState(state.promoted), "stop", state.candidate, cause)

    def find_earlier(self) -> int | None:
        """Returns the version that was promoted before the current one was; None: there was none.

        Example: 6 and 7 were promoted, and 7 was rolled back -> the one before 6, and not 7.
        """
        promoted = self.read().promoted
        changes = [each for each in self.read_log() if each.action == "promote" and each.version == promoted]
        return next((each.previous for each in reversed(changes) if each.previous != promoted), None)

    def _check(self, number: int) -> None:
        """Refuses a version that is missing or not as its manifest lists it; bytes are compared when it is loaded."""
        if not self.path(number).is_dir():
            raise self._refuse(number, "does not exist")
        try:
            sizes = {name: entry["bytes"] for name, entry in read_manifest(self.path(number)).items()}
            wrong = [name for name, size in sizes.items() if (self.path(number) / name).stat().st_size != size]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._refuse(number, f"is damaged: {error}") from None
        if wrong:
            raise self._refuse(number, f"is damaged: {wrong[0]} has another size")

    def _refuse(self, number: int, why: str) -> ConfigError:
        listed = ", ".join(map(str, self.numbers())) or "none"
        return ConfigError(Problem("", f"version {number} of {self.name} {why}", f"choose one of: {listed}"))

    def _commit(self, state: VersionState, action: Action, number: int, cause: Cause, reason: str = "") -> VersionState:
        before = self.read() if self.state_file.is_file() else None
        if before is not None and before.event is not None:
            self._append(before.event)
            sync(self.folder / LOG)
        rows = self._read_rows()
        by = cause.by or f"user {getpass.getuser()}"
        previous, count = None if before is None else before.promoted, rows[-1]["number"] + 1 if rows else 1
        event = Event(count, _now(), action, number, previous, by, cause.reason or reason, dict(cause.evidence))
        state = replace(state, event=event)
        crash_point("publish.before")
        write_json(self.state_file, asdict(state))
        crash_point("publish.mid")
        self._append(event)
        return state

    def _append(self, event: Event) -> None:
        rows = self._read_rows()
        if not rows or rows[-1]["number"] < event.number:
            append_line(self.folder / LOG, asdict(event))

    @contextmanager
    def _lock(self, name: str = CHANGES, timeout_s: float = LOCK_S) -> Iterator[None]:
        import filelock

        try:
            with filelock.FileLock(self.folder / name, timeout=timeout_s, mode=PRIVATE_FILE):
                yield
        except filelock.Timeout:
            raise StorageError(f"another process is changing {self.folder}; try again") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
