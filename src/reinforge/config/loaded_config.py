"""A validated configuration and where each value came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.config.document import KeyPath
from reinforge.config.schema import Config


@dataclass
class LoadedConfig:
    """A checked configuration and where it came from.

    Attributes:
        config: The configuration; components are instances of their classes.
        path: The file; None where it came from Python.
        project_root: The file's folder, or the working directory: relative paths and `module:name` start here.
        data: The plain data that was checked, overrides and variables put in. It may hold secrets.
        placeholders: Text with `${VAR}` as it was written, by path.
        types: The `_type` of each component, by path.
        marks: Line and column of each key, by path; a text where an override set it.
    """

    config: Config
    path: Path | None
    project_root: Path
    data: dict[str, Any] = field(repr=False)
    placeholders: dict[KeyPath, str] = field(default_factory=dict)
    types: dict[KeyPath, str] = field(default_factory=dict)
    marks: dict[KeyPath, Any] = field(default_factory=dict, repr=False)

    def locate(self, path: str) -> str:
        """Returns `file:line:column` of a dotted path, or of the nearest key above it that the file has, or the file.

        `-o` alone stands for a value that an override of this very path set; empty for data from Python.
        """
        keys = tuple(path.split("."))
        for end in range(len(keys), 0, -1):
            mark = self.marks.get(keys[:end])
            if isinstance(mark, str):
                return "-o" if mark == f"-o {path}" else mark
            if mark is not None and self.path:
                return f"{self.path}:{mark[0]}:{mark[1]}"
        return str(self.path) if self.path and path else ""
