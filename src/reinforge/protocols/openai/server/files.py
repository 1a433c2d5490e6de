"""OpenAI's `/v1/files` and `/v1/uploads`: what fine-tuning jobs are given, and the files that they make."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from aiohttp import web

from reinforge.bounded import encode_any
from reinforge.limits import get_limits
from reinforge.protocols.openai.server.contents import FileContents
from reinforge.protocols.openai.server.file_store import FileStore, UnknownObject
from reinforge.protocols.openai.server.forms import clean_name, read_chunks, read_field, read_parts
from reinforge.protocols.openai.server.records import FileRecord, UploadRecord
from reinforge.serving.routes import (
    ApiError,
    count_retries,
    make_id,
    read_json,
    read_page_query,
    write_json,
    write_page,
)

P = ParamSpec("P")
T = TypeVar("T")

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MAX_FILES_PER_PAGE = 10_000
UPLOAD_S = 3600  # seconds that an upload has until it must be completed
EXPIRY_S = (3600, 2_592_000)  # least and most seconds of `expires_after`


@dataclass(frozen=True, slots=True)
class FileLimits:
    max_file_bytes: int = 512 << 20
    max_part_bytes: int = 64 << 20
    max_total_bytes: int = 16 << 30
    chunk_timeout_s: float = 60.0


class FilesApi:
    def __init__(self, store: FileStore, contents: FileContents, limits: FileLimits | None = None):
        self.store, self.contents, self.limits = store, contents, limits or FileLimits()
        self._arriving = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/files", self.create_file),
            web.get("/v1/files", self.list_files),
            web.get("/v1/files/{id}", self.retrieve_file),
            web.get("/v1/files/{id}/content", self.read_content),
            web.delete("/v1/files/{id}", self.delete_file),
            web.post("/v1/uploads", self.create_upload),
            web.post("/v1/uploads/{id}/parts", self.add_part),
            web.post("/v1/uploads/{id}/complete", self.complete_upload),
            web.post("/v1/uploads/{id}/cancel", self.cancel_upload),
        ]

    async def create_file(self, request: web.Request) -> web.Response:
        """Stores the file of a multipart form; a retry of the same upload gets the same file."""
        await asyncio.to_thread(self._remove_expired)
        fields, stored, filename = dict[str, str](), None, ""
        with ExitStack() as room, self._new_content("file") as id_:
            async for part in read_parts(request, self.limits.chunk_timeout_s):
                if part.name != "file":
                    fields[str(part.name)] = await read_field(part, self.limits.chunk_timeout_s)
                elif stored is None:
                    filename = clean_name(part.filename)
                    most = room.enter_context(self._keep_room(request.content_length))
                    stored = await self.contents.store(id_, read_chunks(part, self.limits.chunk_timeout_s), most)
                else:
                    raise ApiError(400, "the form has more than one file", param="file")
            if stored is None:
                raise ApiError(400, "the form has no file", param="file", code="missing_required_parameter")
            purpose = check_purpose(fields.get("purpose"))
            seconds = read_expiry(fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]"))
            digest = hash_parts("file", stored.sha256, filename, purpose)
            if (known := self._find_repeated(request, digest)) is not None:
                self.contents.remove(id_)
                return write_json(self.store.find_file(known).as_answer())
            now = int(time.time())
            expires_at = None if seconds is None else now + seconds
            file = FileRecord(id_, stored.num_bytes, now, filename, purpose, stored.sha256, expires_at)
            await asyncio.to_thread(self.store.add_file, file, digest)
        return write_json(file.as_answer())

    async def list_files(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self._remove_expired)
        after, limit = read_page_query(request, usual=MAX_FILES_PER_PAGE, most=MAX_FILES_PER_PAGE)
        order = request.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {order[:40]!r}; allowed: asc, desc", param="order")
        purpose, oldest_first = request.query.get("purpose"), order == "asc"
        files, has_more = await find(self.store.list_files, after, limit, purpose, oldest_first=oldest_first)
        return write_page([file.as_answer() for file in files], has_more)

    async def retrieve_file(self, request: web.Request) -> web.Response:
        return write_json((await self._find_file(request)).as_answer())

    async def read_content(self, request: web.Request) -> web.StreamResponse:
        file = await self._find_file(request)
        headers = {"content-type": "application/octet-stream", "content-disposition": "attachment"}
        return web.FileResponse(self.contents.path(file.id), headers=headers)

    async def delete_file(self, request: web.Request) -> web.Response:
        id_ = request.match_info["id"]
        await find(self.store.remove_file, id_)
        self.contents.remove(id_)
        return write_json({"id": id_, "object": "file", "deleted": True})

    async def create_upload(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self._remove_expired)
        body = await read_json(request)
        size, name = body.get("bytes"), body.get("filename")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ApiError(400, "bytes must be the size of the file, a whole number from 1", param="bytes")
        if not isinstance(name, str) or not name:
            raise ApiError(400, "filename must be a string", param="filename")
        expiry = body.get("expires_after") or {}
        if not isinstance(expiry, dict):
            raise ApiError(400, "expires_after must be an object", param="expires_after")
        seconds = read_expiry(expiry.get("anchor"), expiry.get("seconds"))
        now, purpose = int(time.time()), check_purpose(body.get("purpose"))
        upload = UploadRecord(
            make_id("upload"), size, now, now + UPLOAD_S, clean_name(name), purpose, expires_after=seconds
        )
        digest = hash_parts("upload", json.dumps(body, sort_keys=True))
        if (known := self._find_repeated(request, digest)) is not None:
            upload = await find(self.store.find_upload, known)
        else:
            with self._keep_room(size) as room:
                if size > room:
                    raise ApiError(413, f"a file of {size:,} bytes is too large", param="bytes", code="file_too_large")
                await asyncio.to_thread(self.store.add_upload, upload, digest)
        return write_json(upload.as_answer())

    async def add_part(self, request: web.Request) -> web.Response:
        """Stores one part of an upload; a retry of the same part gets the same part."""
        upload = await self._find_pending(request)
        known = self.store.list_parts(upload.id)
        if len(known) >= get_limits().upload_parts:
            raise ApiError(400, f"the upload has {len(known)} parts already, the most that are allowed", param="data")
        stored = None
        taken = 0 if count_retries(request) else sum(known.values())  # a retry may be among them
        with self._new_content("part") as id_:
            async for part in read_parts(request, self.limits.chunk_timeout_s):
                if part.name == "data" and stored is None:
                    most = min(self.limits.max_part_bytes, upload.num_bytes - taken)
                    stored = await self.contents.store(id_, read_chunks(part, self.limits.chunk_timeout_s), most)
                else:
                    await read_field(part, self.limits.chunk_timeout_s)
            if stored is None:
                raise ApiError(400, "the form has no data", param="data", code="missing_required_parameter")
            digest = hash_parts("part", upload.id, stored.sha256)
            repeated = self._find_repeated(request, digest)
            if repeated is not None and repeated in self.store.list_parts(upload.id):
                self.contents.remove(id_)
                id_ = repeated
            elif not await find(self.store.add_part, id_, upload.id, stored.num_bytes, digest):
                message = f"the parts are longer than the {upload.num_bytes:,} bytes that the upload announced"
                raise ApiError(413, message, param="data", code="file_too_large")
        made = {"id": id_, "object": "upload.part", "created_at": int(time.time()), "upload_id": upload.id}
        return write_json(made)

    async def complete_upload(self, request: web.Request) -> web.Response:
        """Makes a file of the parts of an upload; one that is completed already is returned unchanged."""
        done = await find(self.store.find_upload, request.match_info["id"])
        if done.file_id is not None:
            made = await find(self.store.find_file, done.file_id)
            return write_json(done.as_answer(made))
        upload, body = await self._find_pending(request), await read_json(request)
        parts, known = body.get("part_ids"), self.store.list_parts(upload.id)
        if not isinstance(parts, list) or not parts or len(set(map(str, parts))) != len(parts):
            raise ApiError(400, "part_ids must list the parts in their order, each once", param="part_ids")
        if unknown := [str(part)[:80] for part in parts if not isinstance(part, str) or part not in known]:
            raise ApiError(400, f"the upload has no part {unknown[0]!r}", param="part_ids")
        if (total := sum(known[part] for part in parts)) != upload.num_bytes:
            message = f"the parts have {total:,} bytes, but the upload was announced with {upload.num_bytes:,}"
            raise ApiError(400, message, param="part_ids")
        now = int(time.time())
        with self._new_content("file") as id_:
            stored = await self.contents.join(id_, parts)
            given = body.get("md5")
            if given is not None and str(given).lower() != stored.md5:
                raise ApiError(400, f"the content has the MD5 {stored.md5}, not the one given", param="md5")
            expires_at = None if upload.expires_after is None else now + upload.expires_after
            file = FileRecord(id_, total, now, upload.filename, upload.purpose, stored.sha256, expires_at)
            await find(self.store.end_upload, upload.id, "completed", file)
        for part in known:
            self.contents.remove(part)
        upload = await find(self.store.find_upload, upload.id)
        return write_json(upload.as_answer(file))

    async def cancel_upload(self, request: web.Request) -> web.Response:
        upload = await self._find_pending(request)
        parts = self.store.list_parts(upload.id)
        await find(self.store.end_upload, upload.id, "cancelled")
        for part in parts:
            self.contents.remove(part)
        return write_json((await find(self.store.find_upload, upload.id)).as_answer())

    @contextmanager
    def _new_content(self, kind: str) -> Iterator[str]:
        id_ = make_id(kind)
        try:
            yield id_
        except BaseException:
            self.contents.remove(id_)
            raise

    async def _find_file(self, request: web.Request) -> FileRecord:
        return await find(self.store.find_file, request.match_info["id"])

    async def _find_pending(self, request: web.Request) -> UploadRecord:
        upload = await find(self.store.find_upload, request.match_info["id"])
        if upload.status != "pending":
            raise ApiError(400, f"the upload {upload.id} is {upload.status}", code="upload_not_pending")
        return upload

    def _find_repeated(self, request: web.Request, digest: str) -> str | None:
        return self.store.find_repeated(digest) if count_retries(request) > 0 else None

    @contextmanager
    def _keep_room(self, wanted: int | None) -> Iterator[int]:
        """Yields how many bytes a new file may have; during the block no other file gets this room."""
        left = self.limits.max_total_bytes - self.store.count_bytes() - self._arriving
        room = min(left, self.limits.max_file_bytes if wanted is None else min(wanted, self.limits.max_file_bytes))
        if room < 1:
            message = f"all files together may have {self.limits.max_total_bytes:,} bytes; delete some"
            raise ApiError(413, message, param="file", code="quota_exceeded")
        self._arriving += room
        try:
            yield room
        finally:
            self._arriving -= room

    def _remove_expired(self) -> None:
        for upload in self.store.list_expired_uploads():
            parts = self.store.list_parts(upload)
            with suppress(UnknownObject):  # another request was faster
                self.store.end_upload(upload, "expired")
            for part in parts:
                self.contents.remove(part)
        for file in self.store.list_expired_files():
            with suppress(UnknownObject):
                self.store.remove_file(file.id)
            self.contents.remove(file.id)


async def find(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return await asyncio.to_thread(read, *args, **kwargs)
    except UnknownObject as error:
        raise ApiError(404, str(error), param="id", code="not_found") from None


def check_purpose(purpose: Any) -> str:
    if purpose not in PURPOSES:
        message = f"purpose is {str(purpose)[:40]!r}; allowed: {', '.join(PURPOSES)}"
        raise ApiError(400, message, param="purpose", code="invalid_value")
    return str(purpose)


def read_expiry(anchor: Any, seconds: Any) -> int | None:
    """Returns after how many seconds a file is deleted; None: never."""
    if anchor is None and seconds is None:
        return None
    least, most = EXPIRY_S
    value = int(seconds) if re.fullmatch(r"\d{1,9}", str(seconds)) else 0
    if anchor != "created_at" or not least <= value <= most:
        message = f"expires_after needs the anchor created_at and seconds from {least} to {most}"
        raise ApiError(400, message, param="expires_after")
    return value


def hash_parts(*parts: str) -> str:
    return hashlib.sha256(encode_any("\0".join(parts))).hexdigest()
