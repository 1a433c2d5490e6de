"""Text of others, made safe: for a terminal, for Markdown, and without secrets."""

import logging
import time

import pytest

from reinforge import safe_text
from reinforge.safe_text import (
    CleanFormatter,
    escape_controls,
    escape_markdown,
    is_secret_name,
    is_secret_variable,
    is_token,
    redact_secrets,
    remember_secret,
    to_one_line,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]8;;http://evil\x07click\x1b]8;;\x07", r"\x1b]8;;http://evil\x07click\x1b]8;;\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
        ("\rover", r"\rover"),
        ("\ud800", r"\ud800"),
        ("line\n\ttab", "line\n\ttab"),
        ("é 日本\u3000語 👩\u200d🔬 a\xa0b", "é 日本\u3000語 👩\u200d🔬 a\xa0b"),
        ("plain", "plain"),
    ],
)
def test_nothing_that_controls_a_terminal_is_left(text, shown):
    assert escape_controls(text) == shown


def test_one_line_has_no_line_break():
    assert to_one_line("a\nb\r\n\tc\x1b[0m") == r"a b c\x1b[0m"


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)>"),
        ("![x](http://evil/a.png)", r"!\[x]\(http:\//evil/a.png)"),
        ("[click](javascript:alert(1))", r"[click]\(javascript:alert(1))"),
        ("a | b", "a &#124; b"),
        ("https://evil www.evil.com", r"https:\//evil www\.evil.com"),
        ("0.512 [0.480, 0.544]", "0.512 [0.480, 0.544]"),
        ("`code` &lt;b>", r"\`code\` &amp;lt;b>"),
        ("two\nlines \x1b[0m", r"two lines \\x1b[0m"),
    ],
)
def test_markdown_shows_the_text_and_loads_nothing(text, markdown):
    assert escape_markdown(text) == markdown


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("Incorrect API key provided: sk-abcd1234efgh.", "Incorrect API key provided: sk-***."),
        ("token hf_AbCdEfGhIjKlMnOpQrSt is invalid", "token hf_*** is invalid"),
        ("ghp_0123456789abcdef0123 and AKIA0123456789ABCDEF", "ghp_*** and AKIA***"),
        ("Authorization: Bearer xyz", "Authorization: Bearer ***"),
        ("{'Authorization': 'Basic dXNlcjpwYXNz'}", "{'Authorization': 'Basic ***'}"),
        ("sent Bearer abc-123-def", "sent Bearer ***"),
        ("https://user:pass@host/v1", "https://***@host/v1"),
        ("task-complete, disk-full, hf_dataset", "task-complete, disk-full, hf_dataset"),
        ("the bearer of news", "the bearer of news"),
        ("mail me@host.org, see http://host/a@b", "mail me@host.org, see http://host/a@b"),
    ],
)  # fmt: skip
def test_secrets_are_found_by_their_form(text, redacted):
    assert redact_secrets(text) == redacted


def test_secrets_of_the_environment_and_of_the_configuration_are_found(monkeypatch):
    monkeypatch.setattr(safe_text, "_KNOWN_SECRETS", set())
    monkeypatch.setenv("SOME_PASSWORD", "correct horse")
    monkeypatch.setenv("HARMLESS", "battery staple")
    remember_secret("s3cr3t-of-the-file\r")
    remember_secret("x")
    assert redact_secrets("correct horse, battery staple, s3cr3t-of-the-file, x") == "***, battery staple, ***, x"


def test_a_text_that_is_shorter_than_any_secret_is_shown_without_reading_the_environment(monkeypatch):
    """A page shows thousands of tokens."""
    monkeypatch.setenv("SOME_API_KEY", "12345678")
    assert redact_secrets("12345678") == "***"
    monkeypatch.setattr(safe_text, "is_secret_variable", None)
    assert redact_secrets("1234567") == "1234567"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("api_key", True), ("X-Api-Key", True), ("apiKey", True), ("Authorization", True), ("HF_TOKEN", True),
        ("db_password", True), ("client_secret", True), ("Cookie", True), ("access_token", True),
        ("eos_token", False), ("max_tokens", False), ("id_key", False), ("question_key", False), ("key", False),
        ("tokenizer", False), ("secretary", False),
    ],
)  # fmt: skip
def test_names_of_secrets(name, expected):
    assert is_secret_name(name) is expected


def test_variables_that_end_in_key_hold_secrets():
    assert is_secret_variable("STANDIN_KEY")
    assert not is_secret_variable("KEYBOARD")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("sk-abcd1234efgh", True), ("Bearer abcdefgh", True), ("https://u:p@host/x", True), ("http://host/x", False),
        ("never print sk-abcd1234efgh", False), ("", False), ("gpt-4.1-mini", False),
    ],
)  # fmt: skip
def test_whole_values_that_are_secrets(value, expected):
    assert is_token(value) is expected


def test_logs_are_clean_tracebacks_too():
    try:
        raise ValueError("\x1b[31m sk-abcd1234efgh")
    except ValueError as error:
        record = logging.LogRecord("r", logging.ERROR, "f", 1, "id %s", ("\x1b]0;t\x07",), (type(error), error, None))
    text = CleanFormatter().format(record)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.endswith(r"ValueError: \x1b[31m sk-***")


def test_long_text_takes_no_time():
    text = "://" * 40_000 + "Bearer " * 20_000 + "sk-" * 40_000 + "a" * 200_000 + "authorization: " * 10_000
    started = time.perf_counter()
    redact_secrets(text)
    assert time.perf_counter() - started < 5
