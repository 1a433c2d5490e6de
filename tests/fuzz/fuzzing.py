"""Fuzzing with a time budget: a fixed set of cases in `make test`, new ones for `MINUTES` in `make fuzz`.

@fuzzed(st.binary())
def test_a_file_is_read_or_refused(content): ...
"""

import copy
import json
import os
import re
import time

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

SECONDS = float(os.environ.get("REINFORGE_FUZZ_SECONDS", "0"))
"""How long each test looks for new cases; 0: it runs its fixed cases."""
QUICK, ROUND = 25, 200


def fuzzed(*strategies, quick=QUICK):
    """Makes a test run on drawn arguments: `quick` fixed ones, or random ones until the time is over."""

    def wrap(check):
        def run(num_cases, number):
            options = settings(
                max_examples=num_cases, deadline=None, database=None, suppress_health_check=list(HealthCheck)
            )
            seed(number)(options(given(*strategies)(check)))()

        def test():
            if not SECONDS:
                return run(quick, 0)
            end_s = time.monotonic() + SECONDS
            while time.monotonic() < end_s:
                run(min(ROUND, 4 * quick), time.time_ns())

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return wrap


TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(st.characters(), max_size=20),  # lone surrogates too
    st.sampled_from(
        ["", "\x00", "\ud800", "\u202e", "\x1b]0;t\x07", "<img src=x onerror=alert(1)>", "1e400", "NaN", "{", "]"]
    ),
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([400, 5000]).map(lambda digits: 10**digits),  # Python prints at most 4,300 digits
    st.sampled_from([1e308, -1e308, 5e-324, 2**63]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
"""Anything that JSON can say, and a little more."""


def nest(value, depth):
    """Returns a value inside `depth` lists."""
    for _ in range(depth):
        value = [value]
    return value


ODD = VALUES | SCALARS | st.sampled_from(
    [0, -1, 1e-40, 2**31, [], {}, "/etc/passwd", "x" * 200_000, {"a" * 5000: "a"}, [0] * 5000]
)  # fmt: skip


@st.composite
def damage(draw, value, most=2):
    """Draws a copy of a value with up to `most` of its parts replaced, removed, repeated or nested."""
    whole = {"": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, most))):
        places = list(_list_places(whole))
        inside, name = places[draw(st.integers(0, len(places) - 1))]
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "repeat", "nest"]))
        if how == "remove" and inside is not whole:
            del inside[name]
        elif how == "repeat":
            inside[name] = [inside[name]] * draw(st.sampled_from([2, 20]))
        elif how == "nest":
            inside[name] = nest(inside[name], draw(st.sampled_from([1, 100, 400])))
        else:
            inside[name] = copy.deepcopy(draw(ODD))
    return whole[""]


def _list_places(value):
    for name in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, name
        yield from _list_places(value[name])


def make_cycle():
    value = []
    value.append({"self": value})
    return value


OBJECTS = st.one_of(
    VALUES,
    st.builds(nest, SCALARS, st.sampled_from([10, 500, 3000])),
    st.builds(make_cycle),
    st.dictionaries(st.tuples(st.integers()), SCALARS, max_size=2),
    st.sets(st.integers(), max_size=3),
    st.binary(max_size=20),
    st.builds(object),
    st.builds(lambda text: RuntimeError(text), TEXTS),
)
"""What a function of a user's may return."""


def to_bytes(value):
    """Returns a value as JSON; text keeps its lone surrogates, and integers all of their digits."""
    text = json.dumps(_mark_long_integers(value), ensure_ascii=False, default=str)
    return re.sub(r'"10\*\*(\d+)"', lambda match: "1" + "0" * int(match[1]), text).encode("utf-8", "surrogatepass")


def _mark_long_integers(value):
    if isinstance(value, int) and value > 10**4000:
        return "10**5000"
    if isinstance(value, dict):
        return {key: _mark_long_integers(item) for key, item in value.items()}
    return [_mark_long_integers(item) for item in value] if isinstance(value, list) else value
