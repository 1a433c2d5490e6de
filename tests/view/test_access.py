"""Who may read the pages, and what the browser is told not to do."""

import re
from importlib.resources import files

import pytest

from reinforge.rollout.http.access import POLICY, AccessKey, is_own_host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:7477", "localhost:8000", "LOCALHOST:1"])
def test_names_of_this_machine(host):
    assert is_own_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:7477",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost:1:2",
        ":1",
    ],
)
def test_every_other_name_is_foreign(host):
    assert not is_own_host(host)


def test_each_server_has_a_key_of_its_own():
    first, second = AccessKey(1), AccessKey(2)
    assert first.accepts(first.value)
    assert not first.accepts(second.value)
    assert not first.accepts(None)
    assert not first.accepts("")
    assert not first.accepts("é")
    assert not first.accepts(b"\xff".decode("utf-8", "surrogateescape")), "a header may hold any bytes"
    assert first.find_in({first.cookie: first.value})
    assert not first.find_in({second.cookie: first.value})
    assert len(first.value) >= 32


def test_the_policy_allows_the_own_script_alone():
    rules = dict(rule.strip().partition(" ")[::2] for rule in POLICY.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in POLICY
    assert rules["require-trusted-types-for"] == "'script'"


def read_static(name):
    return files("reinforge.view").joinpath("static", name).read_text(encoding="utf-8")


SINKS = re.compile(
    r"innerHTML|outerHTML\s*=[^=]|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|javascript:"
)


def test_the_script_makes_no_markup_from_text_and_loads_nothing():
    script = read_static("view.js")
    assert not SINKS.search(script)
    for name in ("view.js", "view.css"):
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", re.sub(r"(?m)^\s*//.*$", "", read_static(name)))
    assert len(script) < 300_000


@pytest.mark.parametrize("line", ["row.innerHTML = text;", "part.outerHTML = text;", "document.write(text)"])
def test_a_line_that_makes_markup_is_found(line):
    assert SINKS.search(line)
