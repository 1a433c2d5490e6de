"""Times of calls and messages, in the forms in which tools record them, as text that sorts by time.

make_sort_key("9") < make_sort_key("10")
make_sort_key("2026-01-01T09:00:00Z") < make_sort_key("2026-01-01T09:00:00.5Z")
"""

from __future__ import annotations

from datetime import UTC, datetime


def make_sort_key(start: str) -> str:
    """Returns text that sorts numbers and times in ISO 8601 by their value; any other text as it is."""
    time = _parse_time(start)
    return start if time is None else f"{time:030.9f}"


def is_sortable(start: str) -> bool:
    return _parse_time(start) is not None


def _parse_time(text: str) -> float | None:
    """Returns a number, or the seconds since 1970 of a time in ISO 8601, in UTC if it names no zone; else None."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text.strip().removesuffix(" UTC"))
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
