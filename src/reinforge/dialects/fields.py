"""Reads the fields of a request's body; whatever is wrong is a `BadRequest` that names the field.

fields = Fields({"model": "m", "top_p": "high"})
fields.text("model")      "m"
fields.number("top_p")    BadRequest('top_p: expected a number, found "high"', "top_p")
fields.number("seed")     None
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from reinforge.dialects.chat_call import BadRequest
from reinforge.limits import get_limits

T = TypeVar("T")
_INDEX = re.compile(r"\[\d+\]")
MAX_SHOWN = 60  # characters of a value that a message shows
MAX_NOTED = 32
MAX_NUMBER = 1e300  # no setting of a model is larger; a whole number may be, and then it has no float


@dataclass(frozen=True, slots=True)
class Notes:
    """What was found in a request on the way.

    Attributes:
        omits_content: Whether images and files become a note in brackets instead of an error.
        ignored: Fields that nothing uses, such as `tools[].cache_control`, in order.
    """

    omits_content: bool = False
    ignored: dict[str, None] = field(default_factory=dict)


class Fields:
    """One object of a request, whose fields are read by type; an absent field and null both read as None.

    Args:
        path: Where it is in the body, such as `messages[0]`; empty for the body itself.

    Attributes:
        notes: What was found on the way; all objects of a request share it.
    """

    def __init__(self, value: Any, path: str = "", notes: Notes | None = None):
        self.path, self.notes = path, notes or Notes()
        if not isinstance(value, Mapping):
            raise BadRequest(f"{path or 'the body'}: expected an object, found {describe(value)}", path or None)
        self.value = value

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def bad(self, name: str, message: str) -> BadRequest:
        path = self.at(name)
        return BadRequest(f"{path}: {message}", path)

    def text(self, name: str) -> str | None:
        return self._read(name, str, "a string")

    def nested(self, name: str, read: Collection[str] = ()) -> Fields | None:
        """Returns an object; with `read`, the fields that are used, others are noted."""
        if (found := self._read(name, dict, "an object")) is None:
            return None
        fields = Fields(found, self.at(name), self.notes)
        if read:
            fields.note_unread(read)
        return fields

    def items(self, name: str) -> list[Any] | None:
        found = self._read(name, list, "a list")
        if found is not None and len(found) > (most := get_limits().request_items):
            raise self.bad(name, f"expected at most {most} entries, found {len(found)}")
        return found

    def flag(self, name: str) -> bool | None:
        return self._read(name, bool, "true or false")

    def integer(self, name: str, *, least: int | None = None) -> int | None:
        found = self.value.get(name)
        if isinstance(found, float) and found.is_integer() and abs(found) < 1e15:  # 16.0, as JavaScript may write it
            found = int(found)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int):
            raise self.bad(name, f"expected a whole number, found {describe(found)}")
        if least is not None and found < least:
            raise self.bad(name, f"expected at least {least}, found {describe(found)}")
        return found

    def number(self, name: str) -> float | None:
        """Returns a number that a 64-bit float can hold."""
        found = self.value.get(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) <= MAX_NUMBER:
            raise self.bad(name, f"expected a number, found {describe(found)}")
        return found

    def choice(self, name: str, allowed: Collection[str]) -> str | None:
        found = self.text(name)
        if found is not None and found not in allowed:
            raise self.bad(name, f"expected one of {', '.join(sorted(allowed))}; found {describe(found)}")
        return found

    def objects(self, name: str) -> list[Fields]:
        path = self.at(name)
        return [Fields(each, f"{path}[{index}]", self.notes) for index, each in enumerate(self.items(name) or ())]

    def require(self, name: str, value: T | None) -> T:
        if value is None:
            raise self.bad(name, "this field is required")
        return value

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuses fields that are set, each with its reason; false, 0, "" and empty lists ask for nothing."""
        for name, reason in reasons.items():
            if self.value.get(name):
                raise self.bad(name, reason)

    def note(self, name: str) -> None:
        """Notes what the request asks for and nothing uses, which changes no token."""
        if len(self.notes.ignored) < MAX_NOTED:
            self.notes.ignored[_INDEX.sub("[]", self.at(name[:MAX_SHOWN]))] = None

    def omit(self, kind: str, name: str = "type") -> str:
        """Returns what stands for a part that a model of text cannot read, where the user allows that."""
        if self.notes.omits_content:
            return f"[{kind} omitted]"
        advice = "`finetuning.outcomes.unsupported_content: omit` puts a note in its place"
        raise self.bad(name, f"{describe(kind)}: the model takes text only; {advice}")

    def note_unread(self, read: Collection[str]) -> None:
        """Notes the fields that nothing reads; null, false, 0, "" and empty lists ask for nothing."""
        for name, value in self.value.items():
            if value and name not in read:
                self.note(str(name))

    def _read(self, name: str, kind: type[T], expected: str) -> T | None:
        found = self.value.get(name)
        if found is None or isinstance(found, kind):
            return found
        raise self.bad(name, f"expected {expected}, found {describe(found)}")


def describe(value: Any) -> str:
    """Returns a short description of a JSON value.

    Example: None -> "null"; "boom" -> '"boom"'; [1, 2] -> "a list of 2"; {"a": 1} -> "an object".
    """
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1e15:
        return "a huge number"
    shown = json.dumps(value, default=repr)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


def keep_given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def read_stop(fields: Fields, name: str) -> list[str] | None:
    """Returns the stop strings of a field that is a string or a list of strings."""
    found = fields.value.get(name)
    if found is None:
        return None
    stops = [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise fields.bad(name, f"expected a string that is not empty, or a list of them; found {describe(found)}")
    return stops


def read_schema(fields: Fields, name: str) -> dict[str, Any] | None:
    """Returns the JSON schema of a tool's arguments, which must describe an object; None: the field is absent."""
    found = fields.nested(name)
    if found is None:
        return None
    kind = found.value.get("type", "object")
    if found.value and kind != "object":
        raise found.bad("type", f'the arguments of a tool are an object, so expected "object"; found {describe(kind)}')
    properties = found.value.get("properties")
    if properties is not None and not isinstance(properties, dict):
        raise found.bad("properties", f"expected an object, found {describe(properties)}")
    return dict(found.value)


def read_function(tool: Fields, schema: str) -> dict[str, Any]:
    """Returns a tool in the form of chat completions; `schema` is the field of its arguments' schema."""
    function = keep_given(
        name=tool.require("name", tool.text("name")),
        description=tool.text("description"),
        parameters=read_schema(tool, schema),
        strict=tool.flag("strict"),
    )
    return {"type": "function", "function": function}


def read_texts(fields: Fields, name: str, read_part: Callable[[Fields], str], parts: str) -> list[str]:
    """Returns the strings of a field that is a string or a list of parts; one empty string for an absent field."""
    found = fields.value.get(name)
    if found is None or isinstance(found, str):
        return [found or ""]
    if not isinstance(found, list):
        raise fields.bad(name, f"expected a string or a list of {parts}, found {describe(found)}")
    return [read_part(part) for part in fields.objects(name)]


def join_texts(texts: list[str]) -> str | list[dict[str, Any]]:
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]
