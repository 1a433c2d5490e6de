"""A copy of the run folder in object storage, from which another machine resumes the run.

    URL/RUN/manifests/000003.json   each file of the run folder as a list of pieces; written last, with its own hash
    URL/RUN/pieces/SHA256           8 MiB of one or more files; what the two newest manifests do not name is removed

A copy that is cut off changes nothing: the newest whole manifest names pieces that were there before it. A piece that
a manifest names is not sent again, so a copy costs what has changed: new checkpoints, and the end of the journal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from reinforge.config.schema import TrackerConfig
from reinforge.errors import BackendError, ConfigError, Problem, StorageError, boundary
from reinforge.files import format_manifest, is_inside, make_private, make_private_folder, make_staging_path
from reinforge.interfaces import Builder, Tracker
from reinforge.registry import register_tracker
from reinforge.runs.journal.journal import LOCK, OWNER
from reinforge.runs.journal.reader import JOURNAL
from reinforge.runs.manifest import OWN_FILES
from reinforge.runs.run_folder import check_run_name
from reinforge.trackers.packages import require_package
from reinforge.types.tracking import MetricPoint, TrackedRun

FORMAT = 1
PIECE_BYTES = 8 * 2**20
OF_THE_PROCESS = re.compile(
    rf"{re.escape(JOURNAL)}-.*|{re.escape(LOCK)}|{re.escape(OWNER)}|(.*/)?\.(tmp|trash)-.*|(.*/)?\..+\.tmp-\d+",
    re.DOTALL,
)
"""Files of a run folder that mean something only to the process that works on it."""
MANIFEST_NAME = re.compile(r"(\d{6,})\.json")


class MirrorConfig(TrackerConfig, name="mirror"):
    """Copies the run folder, prompts and replies included, to object storage after every epoch."""

    location: str = Field(
        description="Folder for the copies of runs: s3://BUCKET/FOLDER, gs://..., az://..., or a shared folder."
    )

    @property
    def url(self) -> str:
        """Where runs are copied to; empty: a folder of this machine."""
        return self.location if "://" in self.location and not self.location.startswith("file://") else ""


class MirrorFolder:
    """The copy of one run."""

    def __init__(self, url: str, setting: str = "location"):
        import fsspec

        try:
            self.fs, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            fix = "install the package that it names (pip install s3fs, gcsfs or adlfs), or correct the URL"
            raise ConfigError(Problem(setting, f"{url}: {error}", fix)) from None
        self.url = url

    def list_manifests(self) -> list[int]:
        """Returns the numbers of the manifests, the newest first; they may be damaged."""
        found = (MANIFEST_NAME.fullmatch(name) for name in self._list("manifests"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def read_manifest(self, number: int) -> MirrorManifest | None:
        """Returns a manifest; None: it is not whole."""
        try:
            text = self.fs.cat_file(f"{self.root}/manifests/{number:06d}.json").decode()
            values = json.loads(text)
            if text != format_manifest({name: value for name, value in values.items() if name != "sha256"}):
                return None
        except (FileNotFoundError, ValueError, AttributeError):
            return None
        if values["format"] != FORMAT:
            raise StorageError(f"{self.url} has format {values['format']}; this version reads format {FORMAT}")
        return MirrorManifest(number, values["key"], values["writer"], values["files"])

    def read_manifests(self) -> Iterator[MirrorManifest]:
        """Yields the manifests that are whole, the newest first."""
        for number in self.list_manifests():
            if (found := self.read_manifest(number)) is not None:
                yield found

    def write_manifest(self, manifest: MirrorManifest) -> None:
        content = {"format": FORMAT, "key": manifest.key, "writer": manifest.writer, "files": manifest.files}
        self._write(f"manifests/{manifest.number:06d}.json", format_manifest(content).encode())

    def read_piece(self, name: str) -> bytes:
        data: bytes = self.fs.cat_file(f"{self.root}/pieces/{name}")
        if hashlib.sha256(data).hexdigest() != name:
            raise StorageError(f"{self.url}: the piece {name} is damaged")
        return data

    def write_piece(self, name: str, data: bytes) -> None:
        self._write(f"pieces/{name}", data)

    def remove_except(self, manifests: list[MirrorManifest]) -> None:
        kept = {
            "manifests": {f"{each.number:06d}.json" for each in manifests},
            "pieces": set[str]().union(*(each.pieces for each in manifests)),
        }
        for part, names in kept.items():
            for name in set(self._list(part)) - names:
                self.fs.rm_file(f"{self.root}/{part}/{name}")

    def _write(self, name: str, data: bytes) -> None:
        path = f"{self.root}/{name}"
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(path, data)

    def _list(self, part: str) -> list[str]:
        try:
            return [path.rpartition("/")[2] for path in self.fs.ls(f"{self.root}/{part}", detail=False, refresh=True)]
        except FileNotFoundError:
            return []


@dataclass
class MirrorManifest:
    number: int
    key: str  # of `TrackedRun`
    writer: str  # names the process that wrote it
    files: dict[str, dict[str, Any]]  # name -> {"bytes": 9, "pieces": ["ab12..."]}, relative to the run folder

    @property
    def pieces(self) -> set[str]:
        return {piece for entry in self.files.values() for piece in entry["pieces"]}


@dataclass
class MirrorTracker(Tracker):
    """Copies the run folder whenever there are new metrics, if anything has changed."""

    config: MirrorConfig
    finish_s, stop_s = 3600.0, 60.0
    _writer: str = field(default_factory=lambda: secrets.token_hex(8))
    _hashed: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)  # by name, size, time and inode of a file
    _kept: list[MirrorManifest] = field(default_factory=list)  # at most two, the newest first
    _state: object = None

    def start(self, run: TrackedRun) -> dict[str, int]:
        self._run, self._mirror = run, MirrorFolder(f"{self.config.location.rstrip('/')}/{run.name}")
        with boundary(BackendError, f"cannot read {self._mirror.url}"):
            self._kept = list(self._mirror.read_manifests())[:2]
        if self._kept and self._kept[0].key != run.key:
            raise BackendError(f"{self._mirror.url} has a copy of another run: use another --run_name or location")
        self._copy()
        return {}

    def log(self, point: MetricPoint) -> None:
        self._copy()

    def finish(self, status: str) -> None:
        self._copy()

    def _copy(self) -> None:
        state = self._describe_state()
        if state == self._state:
            return
        with boundary(BackendError, f"cannot copy the run to {self._mirror.url}"):
            self._check_owner()
            staged = make_staging_path(self._run.folder)
            make_private_folder(staged)
            try:
                self._stage(staged)
                self._publish(self._send(staged))
            finally:
                shutil.rmtree(staged, ignore_errors=True)
        self._state = state

    def _describe_state(self) -> object:
        """Returns what differs once a file of the run folder has changed."""
        found = []
        for path in list_files(self._run.folder):
            with contextlib.suppress(FileNotFoundError):
                entry = path.stat()
                found.append((path, entry.st_size, entry.st_mtime_ns))
        return found

    def _check_owner(self) -> None:
        """Raises `BackendError` once another process has resumed the run and copies it, too."""
        number = next(iter(self._mirror.list_manifests()), 0)
        if number == self._number:
            return
        found = self._mirror.read_manifest(number)
        if found is not None and found.writer == self._writer:  # the answer to its request was lost
            self._kept = [found, *self._kept][:2]
        elif found is not None:
            raise BackendError("another process copies the same run: it was resumed elsewhere")

    @property
    def _number(self) -> int:
        return self._kept[0].number if self._kept else 0

    def _stage(self, staged: Path) -> None:
        """Links what is to be copied, so that the run may replace and remove files meanwhile."""
        for path in list_files(self._run.folder):
            name = path.relative_to(self._run.folder).as_posix()
            if not OWN_FILES.fullmatch(name) or OF_THE_PROCESS.fullmatch(name):
                continue
            make_private_folder((staged / name).parent)
            with contextlib.suppress(FileNotFoundError):  # a checkpoint that the run has just removed
                if name == JOURNAL and path.with_name(f"{JOURNAL}-wal").exists():
                    copy_journal(path, staged / name)
                    continue
                try:
                    os.link(path, staged / name)
                except OSError:  # a file system without links
                    shutil.copy2(path, staged / name)

    def _send(self, staged: Path) -> dict[str, dict[str, Any]]:
        """Sends the pieces that the storage does not have, and returns the files of the next manifest."""
        files, known = {}, set[str]().union(*(each.pieces for each in self._kept))
        before, self._hashed = self._hashed, {}
        for path in list_files(staged):
            name, found = path.relative_to(staged).as_posix(), path.stat()
            key = (name, found.st_size, found.st_mtime_ns, found.st_ino)
            pieces = before.get(key)
            if pieces is None or not known.issuperset(pieces):
                pieces = list(self._send_pieces(path, found.st_size, known))
            self._hashed[key] = pieces
            files[name] = {"bytes": found.st_size, "pieces": pieces}
        return files

    def _send_pieces(self, path: Path, size: int, known: set[str]) -> Iterator[str]:
        with open(path, "rb") as file:
            for start in range(0, size, PIECE_BYTES):
                data = file.read(min(PIECE_BYTES, size - start))  # not what is being appended
                name = hashlib.sha256(data).hexdigest()
                if name not in known:
                    self._mirror.write_piece(name, data)
                    known.add(name)
                yield name

    def _publish(self, files: dict[str, dict[str, Any]]) -> None:
        manifest = MirrorManifest(self._number + 1, self._run.key, self._writer, files)
        self._mirror.write_manifest(manifest)
        self._kept = [manifest, *self._kept][:2]
        self._mirror.remove_except(self._kept)


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def copy_journal(journal: Path, target: Path) -> None:
    """Copies a database to which another connection writes, as it is at one moment."""
    with contextlib.closing(sqlite3.connect(journal)) as source, contextlib.closing(sqlite3.connect(target)) as copy:
        source.backup(copy)
    make_private(target)


def fetch_run(url: str, output_dir: Path) -> Path | None:
    """Downloads the newest whole copy of a run, and returns its folder; None: there is no copy.

    Args:
        url: The copy, such as s3://bucket/runs/NAME.
        output_dir: Gets the run folder NAME.

    Raises:
        ConfigError: The folder exists, or the URL does not end with the name of a run.
        StorageError: The copy cannot be read.
    """
    mirror = MirrorFolder(url.rstrip("/"), "URL")
    name = mirror.root.rpartition("/")[2]
    check_run_name(name, "URL")
    target = output_dir.expanduser() / name
    if target.exists():
        raise ConfigError(f"{target} already exists: resume that one, or choose another --output_dir")
    with boundary(StorageError, f"cannot fetch {url}"):
        manifest = next(mirror.read_manifests(), None)
        if manifest is None:
            return None
        staged = make_staging_path(target.parent)
        make_private_folder(staged)
        try:
            for file_name, entry in manifest.files.items():
                if not OWN_FILES.fullmatch(file_name) or not is_inside(staged, file_name):
                    raise StorageError(f"{url} names {file_name!r}, which no run has written")
                make_private_folder((staged / file_name).parent)
                with open(staged / file_name, "wb") as file:
                    for piece in entry["pieces"]:
                        file.write(mirror.read_piece(piece))
            for path in staged.rglob("*"):
                make_private(path)
            os.rename(staged, target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return target


@register_tracker(config_type=MirrorConfig)
async def mirror(config: MirrorConfig, builder: Builder) -> AsyncIterator[MirrorTracker]:
    require_package("fsspec", "storage")
    MirrorFolder(config.location)
    yield MirrorTracker(config)
