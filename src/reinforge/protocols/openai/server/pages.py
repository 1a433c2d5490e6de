"""Pages of a list in OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from reinforge.serving.api_error import ApiError
from reinforge.serving.routes import write_json


def read_page_query(request: web.Request, *, usual: int, most: int) -> tuple[str | None, int]:
    """Returns `after` and `limit` of a list's query.

    Raises:
        ApiError: `limit` is no number in its range.
    """
    text = request.query.get("limit", str(usual))
    limit = int(text) if re.fullmatch(r"\d{1,9}", text) else 0
    if not 1 <= limit <= most:
        raise ApiError(400, f"limit must be from 1 to {most}, found {text[:40]!r}", param="limit")
    return request.query.get("after") or None, limit


def write_page(data: list[dict[str, Any]], has_more: bool) -> web.Response:
    """Returns a page of a list in OpenAI's form."""
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return write_json({"object": "list", "data": data, "has_more": has_more, **ends})


def flatten_query(query: Mapping[str, str], name: str) -> dict[str, str]:
    """Returns the pairs of `name[key]=value` in a query: `metadata[a]=b` -> {"a": "b"}."""
    start = f"{name}["
    return {key[len(start) : -1]: value for key, value in query.items() if key.startswith(start) and key.endswith("]")}
