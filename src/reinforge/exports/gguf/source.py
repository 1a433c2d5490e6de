"""GGUF files as models: what their headers show, and the folder in transformers' layout that one is converted into.

These functions are what `reinforge.engine.model.source.ModelFormat` asks of a format.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from reinforge.engine.model.source import cache_folder
from reinforge.errors import ConfigError, Problem, StorageError, boundary
from reinforge.exports.gguf import tokenizer as gguf_tokenizer
from reinforge.exports.gguf.families import describe_model
from reinforge.exports.gguf.header import PLAIN_TYPES, GGUFError, GGUFHeader, read_header
from reinforge.exports.gguf.tokenizer import TEMPLATE, check_tokenizer
from reinforge.files import remove_leftovers, write_folder

logger = logging.getLogger(__name__)

FORMAT = 1  # part of a converted folder's name
ROOM = 1.1  # free bytes that a conversion asks for, as a multiple of what it writes


@contextmanager
def _name_file(file: str | Path, setting: str) -> Iterator[None]:
    """Turns an error of the file's content into one of the setting that names the file."""
    try:
        yield
    except GGUFError as error:
        raise ConfigError(Problem(setting, f"{file} {error}", error.fix)) from error


def read_gguf(file: str | Path, setting: str) -> GGUFHeader:
    try:
        stat = Path(file).stat()
        with _name_file(file, setting):
            return _read_header(str(file), stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ConfigError(Problem(setting, f"cannot read {file}: {error.strerror or error}")) from error


@lru_cache(maxsize=4)
def _read_header(file: str, size: int, changed_ns: int) -> GGUFHeader:
    return read_header(Path(file))


def find_problems(file: str, setting: str, *, tokenizer: bool) -> list[Problem]:
    try:
        header = read_gguf(file, setting)
        with _name_file(file, setting):
            describe_model(header)
            _require_package(header, file, setting)
            if tokenizer:
                check_tokenizer(header)
    except ConfigError as error:
        return error.problems
    return []


def get_chat_template(file: str, setting: str) -> str | None:
    template = read_gguf(file, setting).settings.get(TEMPLATE)
    return template if isinstance(template, str) else None


def check_same_tokens(tokenizer: Any, file: str, setting: str) -> None:
    with _name_file(file, setting):
        gguf_tokenizer.check_same_tokens(tokenizer, read_gguf(file, setting))


def ensure_converted(file: Path, setting: str) -> Path:
    """Returns the folder with the model of a GGUF file; converts it first if there is none for this content.

    The folder is complete or does not exist. If several processes call it at once, one converts and the others wait.
    """
    from filelock import FileLock

    header = read_gguf(file, setting)
    folder = cache_folder() / f"{file.stem[:80]}-{hash_content(file)[:16]}-{FORMAT}"
    if folder.is_dir():
        return folder
    _require_package(header, file, setting)
    from reinforge.exports.gguf.convert import convert, measure_folder  # imports torch

    with boundary(StorageError, f"cannot make {folder.parent}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / ".lock"):
        if folder.is_dir():
            return folder
        remove_leftovers(folder.parent)  # of a process that was killed: under the lock no other process converts
        _require_room(folder.parent, measure_folder(header), file)
        logger.warning("converting %s for training, once, into %s", file, folder)
        has_own = not find_problems(str(file), setting, tokenizer=True)
        with _name_file(file, setting):
            write_folder(folder, lambda staged: convert(file, header, staged, tokenizer=has_own), source=file.name)
    return folder


def _require_package(header: GGUFHeader, file: str | Path, setting: str) -> None:
    quantized = sorted({tensor.type_name for tensor in header.tensors.values()} - PLAIN_TYPES)
    if quantized and importlib.util.find_spec("gguf") is None:
        message = f"{file} has weights of the type {quantized[0]}; reading them needs gguf, which is not installed"
        raise ConfigError(Problem(setting, message, 'pip install "reinforge[gguf]", or: pip install gguf'))


def hash_content(file: Path) -> str:
    """Returns the SHA-256 of a file; computed again only if its size or its time changed."""
    stat = file.stat()
    return _hash_content(str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino)


@lru_cache(maxsize=16)
def _hash_content(file: str, size: int, changed_ns: int, inode: int) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _require_room(folder: Path, num_bytes: int, file: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes * ROOM:
        needed = f"{num_bytes * ROOM / 2**30:.1f} GiB"
        message = f"converting {file} needs {needed} in {folder}, which has {free / 2**30:.1f} GiB free"
        raise StorageError(f"{message}\n    fix: free some space, or set REINFORGE_HOME to a folder on another disk")
