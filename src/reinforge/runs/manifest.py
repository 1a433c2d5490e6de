"""The manifest of a run folder: size and SHA-256 of its files.

    config.yml, episodes/*     listed when they are written
    every other file           listed when the process ends: until then it grows, or each epoch writes it again
    checkpoints/*, model       not listed: they have manifests of their own

A file is taken out of the manifest before it changes, so a process that is killed anywhere leaves no wrong entry.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from reinforge.crash import crash_point
from reinforge.files import MANIFEST, MANIFEST_FORMAT, format_manifest, hash_file, read_manifest, replace_file

OWN_FILES = re.compile(
    r"config\.yml|run\.sqlite(-wal|-shm|-journal)?|run\.sqlite\.damaged(-\d+)?(-wal)?|run\.log(\.1)?|summary\.json"
    r"|report\.(html|md)|reward_plot\.png|training_metrics\.jsonl|(reward|validation)_history\.json|curriculum_state\.json"
    r"|episodes|episodes/epoch-\d+\.jsonl\.zst|transcripts|transcripts/[a-z_]+(-\d+)?\.(yml|json)|manifest\.json"
    r"|checkpoints|checkpoints/(unused-)?step-\d+(/.*)?|model|model/.*|(tensorboard|wandb)(/.*)?"
    r"|served\.jsonl|\.lock|\.(owner|labels)\.json|(.*/)?\.(tmp|trash)-.*|(.*/)?\..+\.(unfinished|tmp-\d+)",
    re.DOTALL,
)
"""What a run writes, relative to its folder."""

GROWING = re.compile(r"run\.sqlite|run\.log(\.1)?")
CHANGING = re.compile(r"(?!config\.yml|episodes/).*", re.DOTALL)
"""What a process of the run may write again once it has started."""
_UNLISTED = re.compile(r"manifest\.json|served\.jsonl|run\.sqlite-.*|(checkpoints|model)/.*|(.*/)?\..*", re.DOTALL)


def write_listed(folder: Path, name: str, content: bytes | str) -> None:
    """Writes a file of a run folder that is not going to change."""
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    known = _read(folder)
    if known.get(name) != entry:
        unlist(folder, re.compile(re.escape(name)))
    replace_file(folder / name, data)
    if known.get(name) != entry:
        _write(folder, {**known, name: entry})


def unlist(folder: Path, names: re.Pattern[str]) -> None:
    """Takes files out of the manifest, before they change."""
    known = _read(folder)
    kept = {name: entry for name, entry in known.items() if not names.fullmatch(name)}
    if kept != known:
        _write(folder, kept)


def list_files(folder: Path) -> None:
    """Adds every file to the manifest that is not in it."""
    known = _read(folder)
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_own = (
            OWN_FILES.fullmatch(name) and not _UNLISTED.fullmatch(name) and path.is_file() and not path.is_symlink()
        )
        has_log = path.with_name(f"{path.name}-wal").exists()  # another process reads the journal and may move its rows
        if is_own and name not in known and not has_log:
            known[name] = hash_file(path)
    _write(folder, known)


def _read(folder: Path) -> dict[str, Any]:
    try:
        return read_manifest(folder)
    except ValueError:  # missing or damaged, which `runs verify` reports
        return {}


def _write(folder: Path, files: dict[str, Any]) -> None:
    manifest = {"format": MANIFEST_FORMAT, "files": dict(sorted(files.items()))}
    crash_point("manifest.before")
    replace_file(folder / MANIFEST, format_manifest(manifest))
