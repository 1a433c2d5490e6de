"""Crash-safe files: replaced as a whole, appended line by line, and folders committed by a manifest.

    step-000003/              a folder with its final name is committed
        model.safetensors  config.json  ...  training/optimizer.safetensors  training/state.json
        manifest.json         written last: size and SHA-256 of every file
    .tmp-PID-N/               being written; .trash-*: being removed

Nothing reads a folder whose name starts with `.tmp-` or `.trash-`.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reinforge.crash import crash_point
from reinforge.errors import ReinforgeError, StorageError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
STAGED, TRASH = ".tmp-", ".trash-"

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DATABASE_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}
_numbers = itertools.count()


def to_json(value: Any) -> str:
    """Returns compact JSON; unknown types become text, and non-finite floats become null."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=to_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_replace_non_finite(value), ensure_ascii=False, separators=(",", ":"), default=to_plain)


def to_plain(value: Any) -> Any:
    """Returns a value of a type that JSON does not have as plain data."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return value


@contextmanager
def storage_boundary(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turns any error while writing into a `StorageError` that names the path and the size.

    Args:
        path: What is written.
        num_bytes: Size of the content; None: unknown.
    """
    size = "" if num_bytes is None else f" ({num_bytes:,} bytes)"
    try:
        yield
    except ReinforgeError:
        raise
    except Exception as cause:
        full = getattr(cause, "errno", None) in _NO_ROOM or getattr(cause, "sqlite_errorcode", None) in _DATABASE_FULL
        room = f"; {_count_free_bytes(path):,} bytes are free on its disk" if full else ""
        raise StorageError(f"cannot write {path}{size}: {type(cause).__name__}: {cause}{room}") from cause


def _count_free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def replace_file(path: Path, content: bytes | str) -> None:
    """Writes a file atomically: a reader sees either the old or the new content.

    Raises:
        StorageError: Writing failed.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = make_staging_path(path.parent)
    with storage_boundary(path, len(data)):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Writes a value as indented JSON, atomically."""
    replace_file(path, json.dumps(json.loads(to_json(value)), indent=1) + "\n")


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends one JSON line; first removes a partial line that a crash left at the end.

    Raises:
        StorageError: Writing failed.
    """
    data = (to_json(value) + "\n").encode()
    with storage_boundary(path, len(data)), open(path, "a+b") as file:
        size = file.tell()
        complete = _find_complete_length(file, size)
        if complete != size:
            file.truncate(complete)
        file.write(data)


def _find_complete_length(file: Any, size: int) -> int:
    """Returns the length up to and including the last line break."""
    end = size
    while end > 0:
        start = max(0, end - 4096)
        file.seek(start)
        line_break = file.read(end - start).rfind(b"\n")
        if line_break >= 0:
            return start + int(line_break) + 1
        end = start
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSON Lines file, without a partial line at its end."""
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def make_staging_path(folder: Path) -> Path:
    """Returns an unused path in `folder` for something that gets its final name once it is complete."""
    return folder / f"{STAGED}{os.getpid()}-{next(_numbers)}"


def commit_folder(staged: Path, target: Path, **facts: Any) -> None:
    """Gives a staged folder its final name once every byte is on disk; writes the manifest last.

    Args:
        staged: The folder, on the same disk as `target`.
        target: Its final path; an existing folder is replaced.
        facts: Further entries of the manifest.

    Raises:
        StorageError: Writing failed.
    """
    with storage_boundary(target):
        paths = sorted(path for path in staged.rglob("*") if path != staged / MANIFEST)
        files = {str(path.relative_to(staged)): hash_file(path) for path in paths if path.is_file()}
    with storage_boundary(target, sum(entry["bytes"] for entry in files.values())):
        for path in paths:
            _fsync(path)
        crash_point("ckpt.after_tensor")
        manifest = {"format": MANIFEST_FORMAT, **facts, "files": files}
        (staged / MANIFEST).write_text(_format_manifest(manifest), encoding="utf-8")
        _fsync(staged / MANIFEST)
        _fsync(staged)
        crash_point("ckpt.after_manifest")
        replaced = _move_to_trash(target) if target.exists() else None
        try:
            os.rename(staged, target)
        except OSError:
            if replaced is not None:
                os.rename(replaced, target)
            raise
        _fsync(target.parent)
        if replaced is not None:
            shutil.rmtree(replaced)


def write_folder(target: Path, fill: Callable[[Path], Any], **facts: Any) -> None:
    """Creates a folder atomically: it is complete or does not exist.

    Args:
        target: Its final path; an existing folder is replaced.
        fill: Creates the folder at the path that it is given, and writes the files.
        facts: Further entries of the manifest.

    Raises:
        StorageError: Writing failed.
    """
    staged = make_staging_path(target.parent)
    try:
        fill(staged)
        commit_folder(staged, target, **facts)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _format_manifest(manifest: dict[str, Any]) -> str:
    """Returns the text of a manifest; its last entry is a hash of the others, to detect changes of the manifest."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1) + "\n"


def hash_file(path: Path) -> dict[str, Any]:
    """Returns the size and the SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def find_damage(folder: Path) -> str | None:
    """Returns what is wrong with a committed folder, or None if every file is intact."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        files = manifest["files"]
        if manifest["format"] != MANIFEST_FORMAT:
            return f"{MANIFEST} has format {manifest['format']}; this version reads format {MANIFEST_FORMAT}"
        if text != _format_manifest({name: value for name, value in manifest.items() if name != "sha256"}):
            return f"{MANIFEST} was changed"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    for name, facts in files.items():
        try:
            actual = hash_file(folder / name)
        except OSError:
            return f"{name} is missing"
        if actual["bytes"] != facts["bytes"]:
            return f"{name} has {actual['bytes']:,} bytes instead of {facts['bytes']:,}"
        if actual != facts:
            return f"{name} was changed: its SHA-256 differs"
    return None


def remove_folder(folder: Path) -> None:
    """Removes a folder; renames it first, so that a partly removed folder is never used.

    Raises:
        StorageError: Removing failed.
    """
    with storage_boundary(folder):
        trash = _move_to_trash(folder)
        crash_point("gc.mid_delete")
        shutil.rmtree(trash)


def remove_leftovers(folder: Path) -> list[str]:
    """Removes what a process that died left half written or half removed; returns the names."""
    leftovers = [path for path in folder.iterdir() if path.name.startswith((STAGED, TRASH))] if folder.is_dir() else []
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return sorted(path.name for path in leftovers)


def _move_to_trash(folder: Path) -> Path:
    trash = folder.with_name(f"{TRASH}{folder.name}-{os.getpid()}-{next(_numbers)}")
    os.rename(folder, trash)
    return trash


def _fsync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows cannot sync a folder
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
