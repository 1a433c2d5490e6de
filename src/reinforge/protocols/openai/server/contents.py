"""The contents of uploaded files on disk.

The server makes every name; what a client calls a file is data and never part of a path. Content arrives in a staging
file and appears under its id whole, once it is synced.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.files import STAGED, make_private_folder, open_private, replace_file, storage_boundary, sync
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.serving.routes import ApiError

ID = re.compile(r"[a-z0-9-]{1,64}")  # every id that the server makes; anything else in a URL leads to no file
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredContent:
    num_bytes: int
    sha256: str
    md5: str


class FileContents:
    def __init__(self, folder: Path):
        self.folder = folder
        make_private_folder(folder)

    def path(self, id_: str) -> Path:
        path = self.folder / id_
        if ID.fullmatch(id_) is None or not path.resolve().is_relative_to(self.folder.resolve()):
            raise ApiError(404, f"there is no file {id_[:80]!r}", param="id", code="not_found")
        return path

    async def store(self, id_: str, chunks: AsyncIterator[bytes], max_bytes: int) -> StoredContent:
        """Writes the content of an id as it arrives; an `ApiError` if it is longer."""
        staged, target = self.folder / f"{STAGED}{id_}", self.path(id_)
        sha256, md5, size = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
        try:
            with storage_boundary(target):
                file = open(staged, "wb", buffering=0, opener=open_private)  # noqa: SIM115  closed below
            with file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > max_bytes:
                        message = f"the file is longer than {max_bytes:,} bytes"
                        raise ApiError(413, message, param="file", code="file_too_large")
                    with storage_boundary(target, len(chunk)):
                        _write(file, chunk)
                    sha256.update(chunk)
                    md5.update(chunk)
                with storage_boundary(target):
                    await run_in_daemon_thread(lambda: _commit(file, staged, target), "file-sync")
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        return StoredContent(size, sha256.hexdigest(), md5.hexdigest())

    async def join(self, id_: str, parts: Iterable[str]) -> StoredContent:
        """Writes the content of an id from those of other ids, in this order."""
        paths = [self.path(part) for part in parts]

        async def read() -> AsyncIterator[bytes]:
            for path in paths:
                with open(path, "rb") as file:
                    while chunk := await asyncio.to_thread(file.read, 1 << 20):
                        yield chunk

        return await self.store(id_, read(), max_bytes=1 << 62)

    def write(self, id_: str, content: bytes) -> StoredContent:
        """Writes a small content of the server's own."""
        replace_file(self.path(id_), content)
        with storage_boundary(self.folder):
            sync(self.folder)
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        return StoredContent(len(content), hashlib.sha256(content).hexdigest(), md5)

    def remove(self, id_: str) -> None:
        self.path(id_).unlink(missing_ok=True)

    def remove_except(self, ids: Collection[str]) -> None:
        """Deletes what no id leads to: staging files, and contents whose record was never written."""
        for path in self.folder.iterdir():
            if path.name not in ids and path.is_file():
                path.unlink(missing_ok=True)


def _write(file: Any, chunk: bytes) -> None:
    left = memoryview(chunk)
    while left:
        left = left[file.write(left) :]


def _commit(file: Any, staged: Path, target: Path) -> None:
    os.fsync(file.fileno())
    os.replace(staged, target)
    sync(target.parent)  # else a crash of the machine could undo the renaming, but not the record of the file
