"""Reads the bodies of HTTP requests, which may be too long, too slow, or no valid HTTP."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.web_request import BaseRequest

from reinforge.dialects.chat_call import BadRequest


async def read_body(request: BaseRequest, *, max_bytes: int, timeout_s: float, expects: bool = False) -> bytes:
    """Returns the whole body of a request.

    Args:
        expects: Tell a client that asks for it (`Expect: 100-continue`) to send its body; aiohttp's applications do so
            themselves.

    Raises:
        BadRequest: It is too long, too slow, or no valid HTTP.
    """
    if not request.can_read_body:
        return b""
    too_long = BadRequest(f"the body is longer than {max_bytes} bytes", status=413, code="request_too_large")
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_long
    if expects and request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise too_long
    except TimeoutError:
        message = f"the body did not arrive within {timeout_s:g} s"
        raise BadRequest(message, status=408, code="request_timeout") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body is no valid HTTP: {error}", status=400) from None
    return bytes(body)
