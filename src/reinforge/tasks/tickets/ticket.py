"""The ticket: four fields with closed vocabularies, and what is wrong with a text that should be one.

{"product":"kettle","issue":"defect","priority":"high","refund":true}      ->  None
{"product":"kettle","issue":"defect","priority":"high"}                    ->  "refund is missing"
{"product":"kettle","issue":"defect","priority":"urgent","refund":true}    ->  "priority must be low, normal or high"
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

FIELDS: Mapping[str, tuple[str | bool, ...]] = {
    "product": ("kettle", "lamp", "camera", "vacuum", "speaker", "router"),
    "issue": ("defect", "delivery", "wrong_item", "billing"),
    "priority": ("low", "normal", "high"),
    "refund": (True, False),
}
"""Every field and the values it may have; the order is the one that answers are written in."""

Ticket = dict[str, Any]


def write_ticket(ticket: Ticket) -> str:
    """Returns a ticket as one compact line of JSON."""
    return json.dumps(ticket, separators=(",", ":"))


def read_ticket(text: str | None) -> tuple[Ticket | None, str | None]:
    """Returns the ticket and None, or None and the first thing that is wrong, as the agent is told it."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return None, "this is not JSON"
    problem = ticket_problem(found)
    return (found, None) if problem is None else (None, problem)


def ticket_problem(found: Any) -> str | None:
    """Returns the first thing in which a JSON value breaks the schema, or None for a valid ticket."""
    if not isinstance(found, dict):
        return "this is not an object"
    for name, values in FIELDS.items():
        if name not in found:
            return f"{name} is missing"
        if not any(type(found[name]) is type(value) and found[name] == value for value in values):
            words = [json.dumps(value).strip('"') for value in values]
            return f"{name} must be {', '.join(words[:-1])} or {words[-1]}"
    unknown = sorted(set(found) - set(FIELDS))
    return f"there is no field {unknown[0]}" if unknown else None


def num_right(ticket: Ticket, expected: Ticket) -> int:
    """Returns how many fields of a valid ticket are as expected."""
    return sum(ticket[name] == expected[name] for name in FIELDS)
