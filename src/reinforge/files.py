"""Crash-safe files: replaced as a whole, appended line by line, and folders committed by a manifest.

    step-000003/              a folder with its final name is committed
        model.safetensors  config.json  ...  training/optimizer.safetensors  training/state.json
        manifest.json         written last: size and SHA-256 of every file
    .tmp-PID-N/               being written; .trash-*: being removed

Nothing reads a folder whose name starts with `.tmp-` or `.trash-`. What is written here may hold prompts and replies,
so only its owner may read it: folders have the mode 0700 and files 0600, whatever the umask. A failed write raises
`StorageError`.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import platformdirs
from pydantic import BaseModel

from reinforge.bounded import TooDeepError, check_depth, dump_json, escape_surrogates, load_json
from reinforge.crash import crash_point
from reinforge.errors import RecordError, ReinforgeError, StorageError, is_interrupt, show
from reinforge.limits import get_limits

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
STAGED, TRASH = ".tmp-", ".trash-"
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DATABASE_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}
_numbers = itertools.count()


def home() -> Path:
    return Path(os.environ.get("REINFORGE_HOME") or platformdirs.user_cache_dir("reinforge"))


def to_json(value: Any, *, finite: bool = False) -> str:
    """Returns compact JSON: unknown types become text, non-finite floats null, and lone surrogates their escapes.

    Raises:
        RecordError: The value contains itself, is nested too deeply, has a key that is not a string, number or None,
            an integer with too many digits, or, where it has to be `finite`, a float that is not; or converting one of
            its parts failed.
    """
    with refuse_unwritable():
        text = _encode(value, finite)
    # JSON has lone surrogates only in its strings, where the replacement is their escape
    return escape_surrogates(text)


@contextmanager
def refuse_unwritable() -> Iterator[None]:
    """Turns whatever the conversion of an agent's value raises into a `RecordError`: SystemExit, too, is its own."""
    try:
        yield
    except (MemoryError, RecordError):
        raise
    except BaseException as cause:
        if is_interrupt(cause):
            raise
        raise RecordError(_describe_refusal(cause)) from cause


def find_unwritable(value: Any, *, finite: bool = False, max_chars: int | None = None) -> str | None:
    """Returns why a value from an agent, a model or an evaluator cannot be recorded; None: it can."""
    if value is None or type(value) is bool or (type(value) is float and not finite):
        return None
    most = get_limits().value_depth
    try:
        text = value if type(value) is str else to_json(value, finite=finite)
        if max_chars is not None and len(text) > max_chars:
            return f"it has {len(text):,} characters, and at most {max_chars:,} can be recorded"
        if text is not value:
            check_depth(text, 0, most)
    except RecordError as error:
        return str(error)
    except TooDeepError:
        return f"it is nested more than {most} levels deep"
    return None


def _encode(value: Any, finite: bool) -> str:
    try:
        return dump_json(value, ensure_ascii=False, separators=(",", ":"), default=to_plain, allow_nan=False)
    except ValueError as error:
        if finite or not str(error).startswith("Out of range float"):
            raise
    plain = json.loads(dump_json(value, default=to_plain), parse_constant=lambda _: None)
    return dump_json(plain, ensure_ascii=False, separators=(",", ":"))


def _describe_refusal(cause: BaseException) -> str:
    text = show(cause)
    if isinstance(cause, TooDeepError):
        return text
    if text.startswith("Circular reference"):
        return "it contains itself"
    if text.startswith("Out of range float"):
        return "a number is not finite"
    if text.startswith("Exceeds the limit"):
        return f"an integer has more than {sys.get_int_max_str_digits():,} digits"
    if text.startswith("keys must be"):
        return f"a key is a {text.rpartition(' ')[2]}; keys must be strings, numbers or None"
    return f"{type(cause).__name__}: {text}"


def to_plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", serialize_as_any=True)  # a field may hold a subclass with further fields
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value)


@contextmanager
def storage_boundary(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turns any error while writing `num_bytes` to a path into a `StorageError` that names both."""
    size = "" if num_bytes is None else f" ({num_bytes:,} bytes)"
    try:
        yield
    except ReinforgeError:
        raise
    except Exception as cause:
        full = getattr(cause, "errno", None) in _NO_ROOM or getattr(cause, "sqlite_errorcode", None) in _DATABASE_FULL
        room = f"; {shutil.disk_usage(find_existing_folder(path)).free:,} bytes are free on its disk" if full else ""
        raise StorageError(f"cannot write {path}{size}: {type(cause).__name__}: {cause}{room}") from cause


def find_existing_folder(path: Path) -> Path:
    """Returns a path as a folder, or the nearest folder above it that exists; absolute."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def replace_file(path: Path, content: bytes | str) -> None:
    """Writes a file atomically: a reader sees either the old or the new content."""
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    temporary = make_staging_path(path.parent)
    with storage_boundary(path, len(data)):
        try:
            with open(temporary, "wb", opener=open_private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)


def make_private_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Creates a folder that only its owner can look into, if there is none; its parents follow the umask."""
    try:
        path.mkdir(mode=PRIVATE_FOLDER, exist_ok=exist_ok)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_FOLDER, exist_ok=exist_ok)


def make_private(path: Path) -> None:
    """Gives a file or a folder that this process has written the mode of everything in a run folder."""
    if not path.is_symlink():
        path.chmod(PRIVATE_FOLDER if path.is_dir() else PRIVATE_FILE)


def read_regular_file(path: Path, max_bytes: int | None = None) -> bytes:
    """Returns the content of a file that may come from another user.

    Raises:
        OSError: It is missing, a link, a device or a pipe, or larger than `max_bytes`, by default `file_bytes`.
    """
    max_bytes = max_bytes or get_limits().file_bytes
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path.name} is not a regular file")
        if found.st_size > max_bytes:
            raise OSError(f"{path.name} has {found.st_size:,} bytes, more than {max_bytes:,}")
        return file.read(max_bytes + 1)


def read_json_file(path: Path) -> Any:
    """Returns the value of a JSON file that may come from another user; raises an `OSError` or a `ValueError`."""
    return load_json(read_regular_file(path))


def find_json(path: Path) -> Any:
    """Returns the value of a JSON file that may come from another user; None: there is none that can be read."""
    try:
        return read_json_file(path)
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    replace_file(path, json.dumps(json.loads(to_json(value)), indent=1) + "\n")


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends one JSON line; first removes a partial line that a crash left at the end."""
    data = (to_json(value) + "\n").encode()
    with storage_boundary(path, len(data)), open(path, "a+b", opener=open_private) as file:
        size = file.tell()
        complete = _find_complete_length(file, size)
        if complete != size:
            file.truncate(complete)
        file.write(data)


def _find_complete_length(file: Any, size: int) -> int:
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
    text = read_regular_file(path)
    return [load_json(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def make_staging_path(folder: Path) -> Path:
    """Returns an unused path in `folder` for something that gets its final name once it is complete."""
    return folder / f"{STAGED}{os.getpid()}-{next(_numbers)}"


def commit_folder(staged: Path, target: Path, **facts: Any) -> None:
    """Gives a staged folder its final name, in place of an existing one, once every byte is on disk.

    `facts` are further entries of the manifest, which is written last.
    """
    with storage_boundary(target):
        paths = sorted(path for path in staged.rglob("*") if path != staged / MANIFEST)
        files = {str(path.relative_to(staged)): hash_file(path) for path in paths if path.is_file()}
    with storage_boundary(target, sum(entry["bytes"] for entry in files.values())):
        for path in [staged, *paths]:
            make_private(path)
        for path in paths:
            sync(path)
        crash_point("ckpt.after_tensor")
        manifest = {"format": MANIFEST_FORMAT, **facts, "files": files}
        with open(staged / MANIFEST, "w", encoding="utf-8", opener=open_private) as file:
            file.write(format_manifest(manifest))
        sync(staged / MANIFEST)
        sync(staged)
        crash_point("ckpt.after_manifest")
        replaced = _move_to_trash(target) if target.exists() else None
        try:
            os.rename(staged, target)
        except OSError:
            if replaced is not None:
                os.rename(replaced, target)
            raise
        sync(target.parent)
        if replaced is not None:
            shutil.rmtree(replaced)


def write_folder(target: Path, fill: Callable[[Path], Any], **facts: Any) -> None:
    """Creates a folder atomically, in place of an existing one: it is complete or does not exist."""
    staged = make_staging_path(target.parent)
    try:
        fill(staged)
        commit_folder(staged, target, **facts)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def format_manifest(manifest: dict[str, Any]) -> str:
    """Returns the text of a manifest; its last entry is a hash of the others, to detect changes of the manifest."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1) + "\n"


def hash_file(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def find_damage(folder: Path) -> str | None:
    """Returns what is wrong with a committed folder, or None if every file is intact."""
    return next((problem for _, problem in list_damage(folder)), None)


def list_damage(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the files of a folder that are not as its manifest lists them, with what is wrong with each."""
    try:
        files = read_manifest(folder)
    except ValueError as error:
        yield MANIFEST, str(error)
        return
    if not files:
        yield MANIFEST, f"{MANIFEST} lists no files"
    for name, entry in files.items():
        if (problem := _find_file_damage(folder, name, entry)) is not None:
            yield name, problem


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns what the manifest of a folder says about each file; a `ValueError` if it is not an intact manifest."""
    try:
        text = read_regular_file(folder / MANIFEST).decode("utf-8")
        manifest = load_json(text)
        files, found = dict(manifest["files"]), manifest["format"]
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{MANIFEST} cannot be read") from None
    if found != MANIFEST_FORMAT:
        raise ValueError(f"{MANIFEST} has format {found}; this version reads format {MANIFEST_FORMAT}")
    if text != format_manifest({name: value for name, value in manifest.items() if name != "sha256"}):
        raise ValueError(f"{MANIFEST} was changed")
    return files


def _find_file_damage(folder: Path, name: str, entry: Any) -> str | None:
    """Returns what is wrong with one file of a manifest, which may name any path; reads only a file of the folder."""
    path = folder / name
    try:
        if not is_inside(folder, name):
            return f"{name!r} is not a file of the folder, or is a link"
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return f"{name!r} is not a regular file"
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
            return f"{MANIFEST} has no size of {name!r}"
        if found.st_size != entry["bytes"]:
            return f"{name} has {found.st_size:,} bytes instead of {entry['bytes']:,}"
        actual = hash_file(path)
    except (OSError, ValueError, RuntimeError):  # missing, a name that no path can have, or links in a circle
        return f"{name} is missing"
    return None if actual == entry else f"{name} was changed: its SHA-256 differs"


def is_inside(folder: Path, name: str) -> bool:
    """True if a name is that of something in a folder, with no link on the way to it."""
    parts = PurePath(name)
    is_plain = not parts.is_absolute() and ".." not in parts.parts
    return is_plain and (folder / name).resolve() == folder.resolve() / name


def remove_folder(folder: Path) -> None:
    """Removes a folder; renames it first, so that a partly removed folder is never used."""
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


def sync(path: Path) -> None:
    """Returns once a file, or the names in a folder, would survive a crash of the machine."""
    if os.name == "nt" and path.is_dir():  # Windows cannot sync a folder
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
