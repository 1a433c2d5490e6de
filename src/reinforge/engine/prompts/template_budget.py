"""What one rendering of a chat template may build: operators, methods and filters pay before they are called."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context

from reinforge.errors import EngineError
from reinforge.limits import get_limits

CHARS_PER_INPUT_CHAR = 128  # as many more for each character of the messages and tools, since templates copy them
MAX_RENDER_CPU_S = 3.0  # CPU time of one rendering, of this thread: a busy machine fails no template
CLOCK_STEPS = 64  # steps between two looks at the clock
STEP_CHARS, ENTRY_CHARS, CALL_CHARS = 8, 8, 64
"""What building anything costs besides its characters; what an entry of a list costs, and a call."""
_VIEWS = (KeysView, ValuesView, ItemsView)


class TemplateLimitReached(EngineError):
    """A chat template takes too long or builds too much; the message says which limit."""


class TemplateTooSlow(TemplateLimitReached):
    """A chat template takes too long."""


class Budget:
    """What one rendering may still build, and until when it may run.

    Args:
        values: What the template is given: the more, the more it may build.
    """

    def __init__(self, values: Mapping[str, Any]):
        self._values: Mapping[str, Any] | None = values
        self._num_chars = get_limits().render_chars
        self._steps, self._stop_s = 0, time.thread_time() + MAX_RENDER_CPU_S
        self._sizes: dict[int, tuple[Any, int, int]] = {}

    @pass_context  # so that the compiler does not take it for a constant
    def step(self, context: Context | None = None, value: Any = None, num_chars: int = 0) -> Any:
        """Pays for a step of a loop, a call or a comparison, and for text that the step writes; returns the value."""
        self._steps += 1
        self._num_chars -= num_chars
        if self._steps % CLOCK_STEPS == 0:
            self.spend(0)
            if time.thread_time() > self._stop_s:
                raise TemplateTooSlow(f"takes more than {MAX_RENDER_CPU_S:g} s of CPU time")
        return value

    def spend(self, num_chars: int) -> None:
        """Pays for a number of characters or list entries."""
        self._num_chars -= num_chars + STEP_CHARS
        if self._num_chars < 0:
            self._extend()

    def spend_result(self, value: Any) -> Any:
        """Pays for a value that has just been built and returns it."""
        if isinstance(value, str | bytes):
            self.spend(len(value))
        elif isinstance(value, list | tuple | dict | set):
            self.spend(ENTRY_CHARS * len(value))
        return value

    def spend_text(self, value: Any) -> Any:
        """Pays for a value that is about to be written as text, and returns it."""
        self.spend(len(value) if type(value) is str else self.measure(value)[0])
        return value

    def spend_container(self, value: Any) -> Any:
        """Pays for a list or mapping of the template and returns it; as text it must not be too long either."""
        self.spend(ENTRY_CHARS * len(value))
        self.measure(value)
        return value

    def join(self, values: Iterable[Any]) -> str:
        return "".join([str(self.spend_text(value)) for value in values])

    def measure(self, value: Any) -> tuple[int, int]:
        """Returns the number of characters of a value as text, about, and how deeply it is nested.

        Parts that are there several times count each time. Sizes are remembered, so a list of lists costs one step per
        entry.
        """
        if isinstance(value, str | bytes):
            return len(value), 0
        if not isinstance(value, list | tuple | dict):
            return self._add(value) if isinstance(value, _VIEWS) else (24, 0)
        if (known := self._sizes.get(id(value))) is not None:
            return known[1], known[2]
        size, depth = self._add([*value, *value.values()] if isinstance(value, dict) else value)
        if depth >= (most := get_limits().template_depth):
            raise TemplateLimitReached(f"nests lists and mappings deeper than {most} levels")
        self._sizes[id(value)] = value, size + 2, depth + 1
        return size + 2, depth + 1

    def _add(self, parts: Iterable[Any]) -> tuple[int, int]:
        size = depth = 0
        for part in parts:
            part_size, part_depth = self.measure(part)
            size, depth = size + part_size + 2, max(depth, part_depth)
            if size > self._num_chars:
                self.spend(size)
        return size, depth

    def _extend(self) -> None:
        """Adds, once, what the size of the values allows."""
        values, self._values = self._values, None
        if values is not None:
            # A value that is written again and again costs its size each time; it is measured only now, since most
            # templates never come near the limit.
            spent, self._num_chars = self._num_chars, sys.maxsize
            self._num_chars = spent + CHARS_PER_INPUT_CHAR * self.measure(dict(values))[0]
        if self._num_chars < 0:
            size = get_limits().render_chars >> 20
            raise TemplateLimitReached(
                f"builds more than {size} Mi characters, and {CHARS_PER_INPUT_CHAR} for each one of the messages and "
                "tools"
            )


def _pay_for_sum(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.spend(ENTRY_CHARS * (len(left) + len(right)))


def _pay_for_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    count, value = (left, right) if isinstance(left, int) else (right, left)
    if isinstance(count, int) and isinstance(value, str | bytes | list | tuple):
        budget.spend(len(value) * max(count, 0) * (1 if isinstance(value, str | bytes) else ENTRY_CHARS))


def _pay_for_power(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))


def _check_bits(num_bits: int) -> None:
    if num_bits > (most := get_limits().template_bits):
        raise TemplateLimitReached(f"computes an integer of more than {most} bits")


def _pay_for_modulo(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, str | bytes):
        pay_for_format(budget, left, right if isinstance(right, tuple) else (right,))


def pay_for_format(budget: Budget, template: Any, values: Sequence[Any]) -> None:
    """Pays for each place of a format string with its largest value, and the largest width in the string."""
    text = template.decode("latin-1") if isinstance(template, bytes) else str(template)
    sizes = [budget.measure(value)[0] for value in values]
    widths = [int(digits[:12]) for digits in re.findall(r"\d+", text)]
    if "*" in text or re.search(r"\{[^{}]*\{", text):  # the width is a value
        widths += [abs(value) for value in values if isinstance(value, int)]
    num_places = text.count("%") + text.count("{")
    budget.spend(len(text) + num_places * (max(sizes, default=0) + max(widths, default=0)))


def _pay_for_width(budget: Budget, value: Any, width: Any = 80, *_: Any, **named: Any) -> None:
    width = named.get("width", width)
    budget.spend(width if isinstance(width, int) else 0)


def _pay_for_tabs(budget: Budget, value: Any, tabsize: Any = 8) -> None:
    tab = "\t" if isinstance(value, str) else b"\t"
    budget.spend(len(value) + value.count(tab) * (tabsize if isinstance(tabsize, int) else 0))


def _pay_for_split(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    budget.spend(len(value) * ENTRY_CHARS // 2)  # every second character may be a separator


def _pay_for_replace(budget: Budget, value: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    if all(isinstance(part, str) for part in (value, old, new)) or all(
        isinstance(part, bytes) for part in (value, old, new)
    ):
        budget.spend(len(value) + value.count(old) * len(new))
    else:
        budget.spend(len(str(budget.spend_text(value))) * (1 + len(str(budget.spend_text(new)))))


def _pay_for_join(budget: Budget, separator: Any, parts: Any) -> tuple[Any, ...]:
    held = list(parts)
    budget.spend(sum(budget.measure(part)[0] + len(separator) for part in held))
    return (held,)


def _pay_for_join_filter(
    budget: Budget, value: Any, d: Any = "", attribute: Any = None, **named: Any
) -> tuple[Any, ...]:
    held, d = list(value), named.get("d", d)
    budget.spend(sum(budget.measure(part)[0] + len(str(d)) for part in held))
    return held, d, named.get("attribute", attribute)


def _pay_for_indent(budget: Budget, value: Any, width: Any = 4, *_: Any, **named: Any) -> None:
    width, text = named.get("width", width), str(budget.spend_text(value))
    size = width if isinstance(width, int) else len(str(width))
    budget.spend(len(text) + (len(text.splitlines()) + 1) * size)


def _pay_for_json(
    budget: Budget, value: Any, ensure_ascii: Any = False, indent: Any = None, *_: Any, **__: Any
) -> None:
    size, depth = budget.measure(value)
    step = len(indent) if isinstance(indent, str) else indent if isinstance(indent, int) else 0
    budget.spend(size * (1 + depth * max(step, 0)))


def _pay_for_count(budget: Budget, value: Any, count: Any = 1, *_: Any, **named: Any) -> None:
    numbers = [number for number in (count, *named.values()) if isinstance(number, int)]
    budget.spend(ENTRY_CHARS * max(numbers, default=0))


def _pay_for_rounding(budget: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(precision, int):
        _check_bits(abs(precision) * 4)


def _pay_for_total(budget: Budget, value: Any, attribute: Any = None, start: Any = 0, **_: Any) -> None:
    if not isinstance(start, int | float):
        raise TemplateLimitReached("uses the filter sum on values that are not numbers")


def _pay_for_text(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    budget.spend_text(value)


def _refuse(budget: Budget, *_: Any, **__: Any) -> None:
    raise TemplateLimitReached("calls translate or to_bytes")


BINARY_COSTS: dict[str, Callable[..., None]] = {
    "+": _pay_for_sum,
    "*": _pay_for_product,
    "**": _pay_for_power,
    "%": _pay_for_modulo,
}
METHOD_COSTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _pay_for_width),
    **dict.fromkeys(("translate", "to_bytes"), _refuse),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _pay_for_split),
    "expandtabs": _pay_for_tabs,
    "replace": _pay_for_replace,
    "join": _pay_for_join,
}
_TEXT_FILTERS = (
    "capitalize", "e", "escape", "forceescape", "list", "lower", "reverse", "safe", "string", "title", "trim",
    "truncate", "upper", "urlencode", "wordcount",
)  # fmt: skip
FILTER_COSTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_TEXT_FILTERS, _pay_for_text),
    **dict.fromkeys(("batch", "slice"), _pay_for_count),
    "center": _pay_for_width,
    "format": lambda budget, value, *args, **kwargs: pay_for_format(budget, value, (*args, *kwargs.values())),
    "indent": _pay_for_indent,
    "join": _pay_for_join_filter,
    "replace": _pay_for_replace,
    "round": _pay_for_rounding,
    "sum": _pay_for_total,
    "tojson": _pay_for_json,
}
