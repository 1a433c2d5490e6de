"""Reads a run's journal with SQL, independently of the package's own reader; packed episodes come as JSON."""

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from reinforge.runs.journal.packing import unpack_episode


def read_rows(folder: Path, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    uri = f"{(folder / 'run.sqlite').absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        rows = connection.execute(query, parameters).fetchall()
    return [tuple(json.dumps(unpack_episode(v)) if isinstance(v, bytes) else v for v in row) for row in rows]
