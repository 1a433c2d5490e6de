r"""Text that others wrote, made safe to show: for a terminal, for Markdown, and without secrets.

    escape_controls("ESC [31mred")           -> "\x1b[31mred"         for a terminal: no escape sequence, no bidi mark
    escape_markdown("<img src=x> | ![](u)")  -> "&lt;img src=x> &#124; !\[]\(u)"     for report.md
    redact_secrets("Bearer abc-123-def")     -> "Bearer ***"           for messages and logs

Dataset ids, YAML, model output and error messages of services reach the terminal through `to_printable`, and logs
through `CleanFormatter`. What a model said stays unchanged in the journal.
"""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from functools import lru_cache

KEPT = frozenset("\n\t\u200c\u200d")  # line break, tab, and the joiners that emoji and some scripts need

_KNOWN_SECRETS: set[str] = set()
MIN_SECRET_LENGTH = 8
"""Shorter values are not searched for: replacing every `x` or `test` would make messages unreadable."""

_SECRET_NAME = re.compile(
    r"(?:.*_)?(?:api_?key|(?:access|secret|private|auth|account|subscription)_key|token|secret|password|passwd|"
    r"passphrase|credentials?|authorization|bearer|cookie)"
)
_VOCABULARY_TOKEN = re.compile(
    r"(?:.*_)?(?:eos|bos|pad|unk|mask|sep|cls|end|start|stop|begin|image|audio|special|max|min|new|per|next|first|last)"
    r"_token"
)

TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(sk-)[A-Za-z0-9_-]{8,}|(hf_)[A-Za-z0-9]{16,}|(gh[pousr]_)[A-Za-z0-9]{16,}|(github_pat_)\w{16,}|"
    r"(AKIA)[0-9A-Z]{12,}|(xox[abprs]-)[\w-]{10,}|(glpat-)[\w-]{10,}|(AIza)[\w-]{30,}|"
    r"(eyJ)[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?)"
)
"""Tokens that their first characters give away; one group each."""

_AFTER = (
    re.compile(r"(?i)(\bauthorization[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:(?:bearer|basic|token)\s{1,9})?)[^\s\"',}]+"),
    re.compile(r"(?i)(\bbearer\s{1,9})(?=[^\s\"']{0,999}[-0-9._])[A-Za-z0-9._~+/=-]{6,}"),
    re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20}://)[^/\s@\"']{1,512}(?=@)"),
)
"""What precedes a secret, in the first group: an Authorization header, a bearer token, the user part of a URL."""

_WHOLE_VALUES = (TOKENS, re.compile(r"(?i)(?:bearer|basic)\s+\S{6,}"), re.compile(r"[A-Za-z][\w+.-]*://[^/\s@]+@\S+"))

_STAND_INS = "empty none null default dummy unused n/a not-needed not-used no-key no-key-required {api_key}"
"""What people write where a service wants no key, and the place of an episode's own key in a template."""

HIDDEN = "***"


def escape_controls(text: str) -> str:
    r"""Returns text that cannot control a terminal: `\x1b[31m` is printed as those characters, as are bidi marks.

    Keeps line breaks, tabs, spaces of every width, and the joiners inside emoji.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _is_shown(c) else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def _is_shown(char: str) -> bool:
    return char.isprintable() or char in KEPT or unicodedata.category(char) == "Zs"


def to_one_line(text: str) -> str:
    """Returns text for one line of a terminal: line breaks become spaces, control characters visible escapes."""
    return to_printable(" ".join(text.split()))


def to_printable(text: str) -> str:
    """Returns text for a terminal or a log: no control characters, no secrets."""
    return escape_controls(redact_secrets(text))


def escape_markdown(text: str) -> str:
    """Returns one line of Markdown that shows the text as it is: no HTML, image, link, or end of a table cell."""
    text = to_one_line(text).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    text = text.replace("|", "&#124;").replace("![", "!\\[").replace("](", "]\\(").replace("`", "\\`")
    return re.sub(r"(?i)\bwww\.", r"www\\.", text.replace("://", ":\\//"))


def is_secret_name(name: str) -> bool:
    """Returns True for a key, header or variable that holds a secret: `api_key`, `X-Auth-Token`, `DB_PASSWORD`.

    `eos_token` and `max_tokens` are about the tokens of a model, and `question_key` about a field of the rows.
    """
    words = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_")
    return _SECRET_NAME.fullmatch(words) is not None and _VOCABULARY_TOKEN.fullmatch(words) is None


@lru_cache(1024)  # asked of every variable for every text that is shown
def is_secret_variable(name: str) -> bool:
    """Returns True for an environment variable that holds a secret; here `OPENAI_KEY` counts as well."""
    return is_secret_name(name) or name.upper().endswith("_KEY")


def is_stand_in(text: str) -> bool:
    """Returns True for what is not a key, though it stands in place of one: `EMPTY`, `none`, `{api_key}`."""
    return text.strip().lower() in ("", "bearer {api_key}", *_STAND_INS.split())


def is_token(text: str) -> bool:
    """Returns True if a whole value is a secret by its form: `sk-...`, `Bearer ...`, a URL with a password."""
    return any(pattern.fullmatch(text.strip()) for pattern in _WHOLE_VALUES)


def remember_secret(value: str) -> None:
    """Makes `redact_secrets` replace a value from now on, wherever it appears."""
    if len(value.strip()) >= MIN_SECRET_LENGTH:
        _KNOWN_SECRETS.add(value.strip())


def redact_known_forms(text: str) -> str:
    """Returns text without tokens, Authorization headers and passwords in URLs, by their form alone."""
    text = TOKENS.sub(lambda match: f"{match[match.lastindex or 0]}{HIDDEN}", text)
    for pattern in _AFTER:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def redact_secrets(text: str) -> str:
    """Returns text without secrets: those of the configuration and the environment, and what has a secret's form."""
    if len(text) >= MIN_SECRET_LENGTH:  # a page shows thousands of tokens, and to read the environment takes a while
        held = {os.environ.get(name, "").strip() for name in os.environ if is_secret_variable(name)}
        for secret in sorted(_KNOWN_SECRETS | held, key=len, reverse=True):
            if len(secret) >= MIN_SECRET_LENGTH and secret in text:
                text = text.replace(secret, HIDDEN)
    return redact_known_forms(text)


class CleanFormatter(logging.Formatter):
    """Formats log records without control characters and secrets, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return to_printable(super().format(record))
