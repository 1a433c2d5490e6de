"""A validated configuration and the position of each value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.config.document import KeyPath
from reinforge.config.schema import Config
from reinforge.errors import Problem


@dataclass
class LoadedConfig:
    """A validated configuration and where it came from."""

    config: Config
    path: Path | None  # None for a configuration from Python
    project_root: Path  # base of relative paths and of `module:name`: the file's folder, or the working directory
    data: dict[str, Any] = field(repr=False)
    """The plain data that was validated, after overrides and variables. It may contain secrets."""
    placeholders: dict[KeyPath, str] = field(default_factory=dict)  # text with `${VAR}` as written, by path
    types: dict[KeyPath, str] = field(default_factory=dict)  # the `_type` of each component, by path
    marks: dict[KeyPath, Any] = field(default_factory=dict, repr=False)
    """Line and column of each key, by path; text for a key set by an override."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with it; empty unless it was loaded with `keep_going`. Nothing runs on it then."""
    invalid: frozenset[KeyPath] = frozenset()  # paths of the components with problems, which cannot be built

    def locate(self, path: str) -> str:
        """Returns `file:line:column` of a dotted path, of the nearest key above it that is in the file, or the file.

        Returns `-o` for a value set by an override of exactly this path, and an empty string for data from Python.
        """
        keys = tuple(path.split("."))
        for end in range(len(keys), 0, -1):
            mark = self.marks.get(keys[:end])
            if isinstance(mark, str):
                return "-o" if mark == f"-o {path}" else mark
            if mark is not None and self.path:
                return f"{self.path}:{mark[0]}:{mark[1]}"
        return str(self.path) if self.path and path else ""
