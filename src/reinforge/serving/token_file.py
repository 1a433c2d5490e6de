"""The file with the key of a server, which its owner alone can read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from reinforge.errors import ConfigError, Problem

OPTION = "--token_file"
MAX_BYTES = 4096
LEAST_CHARACTERS = 16
"""Shorter keys can be guessed."""


def read_token(name: str | None) -> str | None:
    """Returns the key in a file; makes the file, with a random key, if it does not exist.

    Args:
        name: The file; None: there is no key.

    Raises:
        ConfigError: Others can read the file, or it has no key, or cannot be read.
    """
    if name is None:
        return None
    file = Path(name).expanduser()
    try:
        if not file.exists():
            _make(file)
        mode = stat.S_IMODE(file.stat().st_mode)
        if os.name == "posix" and mode & 0o077:
            message = f"other users of this machine can read {file} (mode {mode:o})"
            raise ConfigError(Problem(OPTION, message, f"chmod 600 {file}, and put a new key into it"))
        with open(file, "rb") as opened:
            token = opened.read(MAX_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(OPTION, f"cannot read {file}: {error}")) from None
    if len(token) < LEAST_CHARACTERS or not token.isascii() or any(each.isspace() for each in token):
        message = f"{file} has no key of at least {LEAST_CHARACTERS} ASCII characters without spaces"
        raise ConfigError(Problem(OPTION, message, "remove the file, and the server makes one with a random key"))
    return token


def _make(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(f"sk-reinforge-{secrets.token_urlsafe(32)}\n")
