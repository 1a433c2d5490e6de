"""The name of a model that a service holds, in place of weights: what a checkpoint and `model/` keep of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from reinforge.errors import StorageError, boundary
from reinforge.files import replace_file, writing

BACKEND = "openai"
HOSTED_MODEL = "openai_model.json"


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model that a service holds.

    Attributes:
        model: Its name.
        base_model: The model that the run began with.
        service: URL of the service.
    """

    model: str
    base_model: str
    service: str

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Returns the model that a folder names.

        Raises:
            StorageError: It names none.
        """
        with boundary(StorageError, f"read {folder / HOSTED_MODEL}"):
            return cls(**json.loads((folder / HOSTED_MODEL).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        """Writes the name into a folder, which may be new."""
        with writing(folder / HOSTED_MODEL):
            folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / HOSTED_MODEL, json.dumps(asdict(self), indent=1) + "\n")
