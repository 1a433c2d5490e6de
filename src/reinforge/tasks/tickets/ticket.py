"""The ticket: four fields with fixed sets of values, and its parser, which reports the first problem.

{"product":"kettle","issue":"defect","priority":"high","refund":true}      ->  None
{"product":"kettle","issue":"defect","priority":"high"}                    ->  "refund is missing"
{"product":"kettle","issue":"defect","priority":"urgent","refund":true}    ->  "priority must be low, normal or high"
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reinforge.bounded import load_json

FIELDS: Mapping[str, tuple[str | bool, ...]] = {
    "product": ("kettle", "lamp", "camera", "vacuum", "speaker", "router"),
    "issue": ("defect", "delivery", "wrong_item", "billing"),
    "priority": ("low", "normal", "high"),
    "refund": (True, False),
}
"""The allowed values of each field, in the order of the fields in a ticket."""

Ticket = dict[str, Any]


def format_ticket(ticket: Ticket) -> str:
    return json.dumps(ticket, separators=(",", ":"))


def parse_ticket(text: str | None) -> tuple[Ticket | None, str | None]:
    """Returns the ticket and None, or None and the first problem, as worded for the agent."""
    try:
        value = load_json(text or "")
    except ValueError:
        return None, "this is not JSON"
    problem = find_ticket_problem(value)
    return (value, None) if problem is None else (None, problem)


def find_ticket_problem(ticket: Any) -> str | None:
    """Returns the first problem of a JSON value, or None for a valid ticket."""
    if not isinstance(ticket, dict):
        return "this is not an object"
    for name, values in FIELDS.items():
        if name not in ticket:
            return f"{name} is missing"
        if not any(type(ticket[name]) is type(value) and ticket[name] == value for value in values):
            words = [json.dumps(value).strip('"') for value in values]
            return f"{name} must be {', '.join(words[:-1])} or {words[-1]}"
    unknown = sorted(set(ticket) - set(FIELDS))
    return f"there is no field {unknown[0]}" if unknown else None


def count_correct_fields(ticket: Ticket, expected: Ticket) -> int:
    return sum(ticket[name] == expected[name] for name in FIELDS)
