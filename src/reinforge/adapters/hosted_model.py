"""The name of a hosted model: what a checkpoint and `model/` store in place of weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from reinforge.errors import StorageError, boundary
from reinforge.files import read_json_file, replace_file, storage_boundary

BACKEND = "openai"
HOSTED_MODEL = "openai_model.json"


@dataclass(frozen=True, slots=True)
class HostedModel:
    model: str
    base_model: str
    service: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        with boundary(StorageError, f"cannot read {folder / HOSTED_MODEL}"):
            hosted = cls(**read_json_file(folder / HOSTED_MODEL))
            if not all(isinstance(value, str) and value for value in asdict(hosted).values()):
                raise ValueError(f"expected strings, found {json.dumps(asdict(hosted))[:200]}")
            return hosted

    def write(self, folder: Path) -> None:
        with storage_boundary(folder / HOSTED_MODEL):
            folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / HOSTED_MODEL, json.dumps(asdict(self), indent=1) + "\n")
