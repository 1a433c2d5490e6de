"""Tells whether this user made a run folder, where it stands: only then may `--resume` import the code that it names.

A run folder names the folder of its Python files. One that came from elsewhere could name any folder, so each run is
sealed with a key that only this user has; a folder that was copied, moved, or written by others has no valid seal.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

import platformdirs

from reinforge.files import to_json

KEY_FILE = "run-seal.key"
KEY_BYTES = 32


def find_key_file() -> Path:
    return Path(os.environ.get("REINFORGE_HOME") or platformdirs.user_data_dir("reinforge")) / KEY_FILE


def seal_run(folder: Path, project_root: Path) -> str | None:
    """Returns the seal of a run of this user; None: the key cannot be read or written."""
    key = _read_key() or _make_key()
    return _sign(key, folder, project_root) if key is not None else None


def is_own_run(folder: Path, project_root: Path, seal: object) -> bool:
    """Returns True if this user made the run in this folder, with its Python files in that folder."""
    key = _read_key()
    if key is None or not isinstance(seal, str):
        return False
    return hmac.compare_digest(_sign(key, folder, project_root).encode(), seal.encode("utf-8", "replace"))


def _sign(key: bytes, folder: Path, project_root: Path) -> str:
    return hmac.new(key, to_json([str(folder.resolve()), str(project_root)]).encode(), hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    try:
        key = find_key_file().read_bytes()
    except OSError:
        return None
    return key if len(key) == KEY_BYTES else None


def _make_key() -> bytes | None:
    """Writes a new key, readable by this user only; if another process writes one at the same time, that one counts."""
    path = find_key_file()
    staged = path.with_name(f".{KEY_FILE}-{os.getpid()}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(staged, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(staged, path)
        staged.unlink(missing_ok=True)
    return _read_key()
