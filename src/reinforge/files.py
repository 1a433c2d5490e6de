"""Files that a crash cannot spoil: replaced whole, appended by line, folders committed by a manifest.

step-000003/            visible under this name = committed
model.safetensors  config.json  ...  training/optimizer.safetensors  training/state.json
manifest.json         written last: size and SHA-256 of every file
.tmp-PID-N/             being written; .trash-*: being removed. Neither is ever read
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
    """Returns compact JSON; what JSON does not know becomes text, and a float that is no number becomes null."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=plain, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), default=plain)


def plain(value: Any) -> Any:
    """Returns what JSON can hold of a value that it does not know."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turns what goes wrong while something is written into a `StorageError` with the path and what it needs.

    Args:
        path: What is written.
        num_bytes: How much; None: not known.
    """
    size = "" if num_bytes is None else f" ({num_bytes:,} bytes)"
    try:
        yield
    except ReinforgeError:
        raise
    except Exception as cause:
        full = getattr(cause, "errno", None) in _NO_ROOM or getattr(cause, "sqlite_errorcode", None) in _DATABASE_FULL
        room = f"; {_free(path):,} bytes are free on its disk" if full else ""
        raise StorageError(f"writing {path}{size}: {type(cause).__name__}: {cause}{room}") from cause


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def replace_file(path: Path, content: bytes | str) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part.

    Raises:
        StorageError: It cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = staging_folder(path.parent)
    with writing(path, len(data)):
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
    """Writes a value as indented JSON, whole."""
    replace_file(path, json.dumps(json.loads(to_json(value)), indent=1) + "\n")


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends one JSON line; half a line that a crash left at the end is cut off first.

    Raises:
        StorageError: It cannot be written.
    """
    data = (to_json(value) + "\n").encode()
    with writing(path, len(data)), open(path, "a+b") as file:
        size = file.tell()
        whole = _whole_length(file, size)
        if whole != size:
            file.truncate(whole)
        file.write(data)


def _whole_length(file: Any, size: int) -> int:
    """Returns the length up to and including the last line break."""
    end = size
    while end > 0:
        start = max(0, end - 4096)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + int(found) + 1
        end = start
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines; half a line at its end is no row yet."""
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def staging_folder(folder: Path) -> Path:
    """Returns a name below `folder`, used by nobody, for something that gets its own name once it is whole."""
    return folder / f"{STAGED}{os.getpid()}-{next(_numbers)}"


def commit_folder(staged: Path, target: Path, **facts: Any) -> None:
    """Gives a staged folder its name once every byte of it is on disk; the manifest is written last.

    Args:
        staged: The folder, on the same disk as `target`.
        target: Its name; what stands there is replaced.
        facts: Further entries of the manifest.

    Raises:
        StorageError: It cannot be written.
    """
    with writing(target):
        paths = sorted(path for path in staged.rglob("*") if path != staged / MANIFEST)
        files = {str(path.relative_to(staged)): file_facts(path) for path in paths if path.is_file()}
    with writing(target, sum(entry["bytes"] for entry in files.values())):
        for path in paths:
            _force(path)
        crash_point("ckpt.after_tensor")
        manifest = {"format": MANIFEST_FORMAT, **facts, "files": files}
        (staged / MANIFEST).write_text(_sealed(manifest), encoding="utf-8")
        _force(staged / MANIFEST)
        _force(staged)
        crash_point("ckpt.after_manifest")
        replaced = _set_aside(target) if target.exists() else None
        try:
            os.rename(staged, target)
        except OSError:
            if replaced is not None:
                os.rename(replaced, target)
            raise
        _force(target.parent)
        if replaced is not None:
            shutil.rmtree(replaced)


def write_folder(target: Path, fill: Callable[[Path], Any], **facts: Any) -> None:
    """Makes a folder that is whole or not there.

    Args:
        target: Its name; what stands there is replaced.
        fill: Makes the folder that it is given, and writes its files.
        facts: Further entries of the manifest.

    Raises:
        StorageError: It cannot be written.
    """
    staged = staging_folder(target.parent)
    try:
        fill(staged)
        commit_folder(staged, target, **facts)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _sealed(manifest: dict[str, Any]) -> str:
    """Returns the text of a manifest; its last entry is a hash of the others, so that a changed one is noticed too."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1) + "\n"


def file_facts(path: Path) -> dict[str, Any]:
    """Returns size and SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def damage(folder: Path) -> str | None:
    """Returns what is wrong with a committed folder, or None: every file is there, bit for bit."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        files = manifest["files"]
        if manifest["format"] != MANIFEST_FORMAT:
            return f"{MANIFEST} has the format {manifest['format']}, this version reads {MANIFEST_FORMAT}"
        if text != _sealed({name: value for name, value in manifest.items() if name != "sha256"}):
            return f"{MANIFEST} was changed"
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    for name, facts in files.items():
        try:
            found = file_facts(folder / name)
        except OSError:
            return f"{name} is missing"
        if found["bytes"] != facts["bytes"]:
            return f"{name} has {found['bytes']:,} bytes instead of {facts['bytes']:,}"
        if found != facts:
            return f"{name} was changed: its SHA-256 is another one"
    return None


def remove_folder(folder: Path) -> None:
    """Removes a folder; it loses its name first, so that half of it is never taken for the whole.

    Raises:
        StorageError: It cannot be removed.
    """
    with writing(folder):
        trash = _set_aside(folder)
        crash_point("gc.mid_delete")
        shutil.rmtree(trash)


def sweep(folder: Path) -> list[str]:
    """Removes what a dead owner was writing or removing; returns the names."""
    left = [path for path in folder.iterdir() if path.name.startswith((STAGED, TRASH))] if folder.is_dir() else []
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return sorted(path.name for path in left)


def _set_aside(folder: Path) -> Path:
    trash = folder.with_name(f"{TRASH}{folder.name}-{os.getpid()}-{next(_numbers)}")
    os.rename(folder, trash)
    return trash


def _force(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
