"""The package imports on Windows, where the modules of POSIX do not exist."""

import os
import subprocess
import sys

import filelock
import pytest

from reinforge.runs.journal.journal import LOCK
from reinforge.runs.run_folder import can_lock, is_in_use

POSIX_ONLY = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline")

IMPORT_EVERYTHING = """
import importlib, pkgutil, signal, sys, sqlite3, asyncio, numpy, pydantic, filelock

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {posix_only!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in {posix_only!r}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
for name in ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM"):
    delattr(signal, name)

import reinforge
import reinforge.cli
for package in ("reinforge.cli", "reinforge.runs", "reinforge.config", "reinforge.trainer"):
    module = importlib.import_module(package)
    for info in pkgutil.walk_packages(module.__path__, f"{{package}}."):
        importlib.import_module(info.name)
from reinforge.registry import REGISTRY
print("imported", len(REGISTRY.components()) > 10)
"""


@pytest.mark.slow
def test_everything_but_the_engine_imports_without_posix():
    code = IMPORT_EVERYTHING.format(posix_only=POSIX_ONLY)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "imported True", result.stderr


def test_whether_a_run_is_in_use_is_seen_without_touching_its_lock_file(tmp_path):
    assert not is_in_use(tmp_path)
    assert list(tmp_path.iterdir()) == [], "the lock file was created"
    lock = filelock.FileLock(tmp_path / LOCK)
    with lock:
        os.utime(tmp_path / LOCK, (1, 1))
        assert is_in_use(tmp_path)
        assert not can_lock(tmp_path / LOCK)
    assert not is_in_use(tmp_path)
    assert can_lock(tmp_path / LOCK)
    assert (tmp_path / LOCK).stat().st_mtime == 1, "the lock file was changed"
    (tmp_path / LOCK).chmod(0o400)
    assert not is_in_use(tmp_path)
