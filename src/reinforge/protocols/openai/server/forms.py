"""Multipart forms: their fields, the content of their files, and the names that clients give these."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from reinforge.bounded import replace_surrogates
from reinforge.limits import get_limits
from reinforge.protocols.openai.server.contents import CHUNK_BYTES
from reinforge.serving.routes import ApiError

MAX_NAME = 255


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


async def read_parts(request: web.Request, timeout_s: float) -> AsyncIterator[BodyPartReader]:
    """Yields the parts of a multipart form, each of which must be read to its end and begin within `timeout_s`."""
    num_parts = 0
    if request.content_type != "multipart/form-data":
        raise ApiError(400, f"expected multipart/form-data, found {request.content_type[:80]}")
    try:
        reader = await request.multipart()
    except (ValueError, AssertionError) as error:
        raise ApiError(400, f"the form is not valid: {error}") from None
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                part = await reader.next()
            name = None if part is None else getattr(part, "name", None)
        except TimeoutError:
            raise ApiError(408, f"nothing arrived for {timeout_s:g} s", code="request_timeout") from None
        except (ValueError, AssertionError, HttpProcessingError, web.RequestPayloadError) as error:
            raise ApiError(400, f"the form is not valid: {CONTROL.sub('', str(error))[:200]}") from None
        if part is None:
            return
        if not isinstance(part, BodyPartReader) or name is None:
            raise ApiError(400, "the form has a part without a name")
        num_parts += 1
        if num_parts > (most := get_limits().form_fields):
            raise ApiError(400, f"the form has more than {most} fields")
        yield part


async def read_chunks(part: BodyPartReader, timeout_s: float) -> AsyncIterator[bytes]:
    """Yields the content of a part, which is aborted after `timeout_s` without any data."""
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                chunk = await part.read_chunk(CHUNK_BYTES)
        except TimeoutError:
            message = f"nothing arrived for {timeout_s:g} s"
            raise ApiError(408, message, code="request_timeout") from None
        except (ValueError, web.RequestPayloadError) as error:
            raise ApiError(400, f"the form is cut off or not valid: {error}") from None
        if not chunk:
            return
        yield chunk


async def read_field(part: BodyPartReader, timeout_s: float) -> str:
    value = bytearray()
    async for chunk in read_chunks(part, timeout_s):
        value += chunk
        if len(value) > (most := get_limits().form_field_bytes):
            name = CONTROL.sub("", str(part.name))[:40]
            raise ApiError(400, f"the field {name!r} is longer than {most} bytes")
    return value.decode("utf-8", "replace")


def clean_name(name: str | None) -> str:
    """Returns a client's name of a file without its folders and control characters: `../a.jsonl` -> `a.jsonl`."""
    last = re.split(r"[/\\]", CONTROL.sub("", name or ""))[-1]
    return replace_surrogates(last[:MAX_NAME]) or "file"  # half a character cannot be stored
