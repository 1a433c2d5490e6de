"""A folder that appears complete or not at all: it is written under a hidden name beside its place and then renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reinforge.errors import ConfigError, Problem
from reinforge.files import MANIFEST, STAGED, commit_folder, find_damage, read_json_file, storage_boundary
from reinforge.runs.journal.journal import is_alive

MAX_LISTED = 5
KIND = "export"  # entry of the manifest that tells an export from other folders


def check_target(target: Path) -> None:
    """Refuses a place for an export, unless it has nothing, an empty folder, or an unchanged export."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        kind = "a symbolic link" if target.is_symlink() else "a file"
        raise ConfigError(Problem("--output", f"{target} is {kind}", "name a folder that does not exist yet"))
    if not target.is_dir() or not any(target.iterdir()):
        return
    fix = "nothing was changed; name another folder, or remove this one yourself"
    foreign = _list_foreign(target)
    if foreign:
        more = f" and {len(foreign) - MAX_LISTED} more" if len(foreign) > MAX_LISTED else ""
        message = f"{target} holds files that no export has written: {', '.join(foreign[:MAX_LISTED])}{more}"
        raise ConfigError(Problem("--output", message, fix))
    if (damage := find_damage(target)) is not None:
        raise ConfigError(Problem("--output", f"{target} is an export that was changed since: {damage}", fix))


def _list_foreign(target: Path) -> list[str]:
    present = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir())
    try:
        manifest = read_json_file(target / MANIFEST)
        own = {MANIFEST, *manifest["files"]} if KIND in manifest else set()
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    return [name for name in present if name not in own]


@contextmanager
def stage_folder(target: Path, kind: str) -> Iterator[Path]:
    """Yields a new folder, which becomes `target` if the block ends without an error, and is removed if not.

    What processes that were killed left behind is removed first; the manifest records `kind`.
    """
    with storage_boundary(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target)
        staged = target.parent / f"{STAGED}{target.name}-{os.getpid()}"
        staged.mkdir(mode=0o700)
    try:
        yield staged
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        check_target(target)  # something may have been put there in the meantime
        commit_folder(staged, target, **{KIND: kind})
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def remove_abandoned(target: Path) -> None:
    name = re.compile(rf"{re.escape(STAGED + target.name)}-(\d+)")
    for path in target.parent.glob(f"{STAGED}*"):
        match = name.fullmatch(path.name)
        if match is None or not path.is_dir() or path.is_symlink():
            continue
        pid = int(match[1])
        if pid == os.getpid() or not is_alive(pid):  # this process has not begun yet: an earlier one had its number
            shutil.rmtree(path, ignore_errors=True)
