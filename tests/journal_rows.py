"""Reads a run's journal with SQL, independently of the package's own reader."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any


def read_rows(folder: Path, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    uri = f"{(folder / 'run.sqlite').absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        return connection.execute(query, parameters).fetchall()
