"""Checkpoints of Tinker's clients on disk, by their `tinker://` paths.

    tinker://RUN/weights/NAME            DATA/RUN/weights/NAME/            weights and optimizer
    tinker://RUN/sampler_weights/NAME    DATA/RUN/sampler_weights/NAME/    weights to sample from

A folder is an adapter in PEFT's layout, with `tinker.json` beside it: what the model was made of. They are all that
outlives the server.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reinforge.files import find_damage, read_json_file, remove_folder
from reinforge.serving.routes import ApiError

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}  # part of the path -> the SDK's type of checkpoint
NOTE = "tinker.json"
LAST_S = datetime.max.replace(tzinfo=UTC).timestamp() - 1  # Unix time of the last date
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class CheckpointNote:
    """What a checkpoint is of."""

    run_id: str
    base_model: str
    rank: int
    created_s: float  # Unix time
    expires_s: float | None = None  # Unix time from which it may be deleted; None: never
    user_metadata: dict[str, str] | None = None
    run_metadata: dict[str, str] | None = None

    def write(self, folder: Path) -> None:
        (folder / NOTE).write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    run_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, path: str) -> TinkerPath:
        parts = path.removeprefix(SCHEME).split("/")
        if path.startswith(SCHEME) and len(parts) == 3:
            found = cls(*parts)
            if _RUN.fullmatch(found.run_id) and found.kind in KINDS and _NAME.fullmatch(found.name):
                return found
        raise ApiError(
            400,
            f"{path[:200]!r} is not the path of a checkpoint of this server, such as tinker://RUN/weights/NAME or "
            "tinker://RUN/sampler_weights/NAME",
            param="path",
        )

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"


class CheckpointStore:
    def __init__(self, root: Path):
        self.root = root

    def choose_path(self, run_id: str, kind: str, name: str) -> TinkerPath:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"the name {name[:200]!r} of a checkpoint must be up to 128 letters, digits, dots, hyphens and "
                "underscores, and begin with a letter, a digit or an underscore"
            )
        return TinkerPath(run_id, kind, name)

    def find_folder(self, path: TinkerPath) -> Path:
        return self.root / path.run_id.replace(":", "_") / path.kind / path.name

    def read(self, path: TinkerPath) -> CheckpointNote:
        folder = self.find_folder(path)
        if not folder.is_dir():
            raise ApiError(404, f"there is no checkpoint {path}", param="path", code="checkpoint_not_found")
        if (damage := find_damage(folder)) is not None:
            raise ApiError(400, f"the checkpoint {path} is damaged: {damage}", param="path", code="checkpoint_damaged")
        return CheckpointNote(**read_json_file(folder / NOTE))

    def find(self, run_id: str | None = None) -> Iterator[tuple[TinkerPath, CheckpointNote]]:
        found = []
        for note in self.root.glob(f"*/*/*/{NOTE}"):
            kind, name = note.parts[-3:-1]
            try:
                read = CheckpointNote(**read_json_file(note))
                format_time(read.created_s), format_time(read.expires_s or 0.0)
            except (OSError, ValueError, TypeError, OverflowError):
                continue  # being written, or damaged: `read` says so to who asks for it
            is_complete = _NAME.fullmatch(name)  # a folder that is being written has another name
            if is_complete and kind in KINDS and (run_id is None or read.run_id == run_id):
                found.append((TinkerPath(read.run_id, kind, name), read))
        yield from sorted(found, key=lambda each: each[1].created_s)

    def delete(self, path: TinkerPath) -> None:
        folder = self.find_folder(path)
        if not folder.is_dir():
            raise ApiError(404, f"there is no checkpoint {path}", param="checkpoint_id", code="checkpoint_not_found")
        remove_folder(folder)

    def sweep(self) -> None:
        for path, note in list(self.find()):
            if note.expires_s is not None and note.expires_s < time.time():
                remove_folder(self.find_folder(path))

    def describe(self, path: TinkerPath, note: CheckpointNote) -> dict[str, Any]:
        files = [file for file in self.find_folder(path).rglob("*") if file.is_file()]
        return {
            "checkpoint_id": path.checkpoint_id,
            "checkpoint_type": KINDS[path.kind],
            "time": format_time(note.created_s),
            "tinker_path": str(path),
            "size_bytes": sum(file.stat().st_size for file in files),
            "public": False,
            "user_metadata": note.user_metadata,
            "expires_at": None if note.expires_s is None else format_time(note.expires_s),
        }


def make_note(
    run: CheckpointNote, *, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
) -> CheckpointNote:
    """Returns the note of a new checkpoint of a model, which may be deleted after `ttl_seconds`; None: never."""
    now = time.time()
    expires_s = None if ttl_seconds is None else now + ttl_seconds
    return replace(run, created_s=now, expires_s=expires_s, user_metadata=user_metadata)


def format_time(seconds: float) -> str:
    """Returns a Unix time as a date; one beyond the last date is that date."""
    return datetime.fromtimestamp(min(seconds, LAST_S), UTC).isoformat()
