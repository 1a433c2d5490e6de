"""Reads a run's journal with SQL, independently of the package's own reader."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

FORMAT_1 = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE stages (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, stage TEXT NOT NULL, at_s REAL NOT NULL, data TEXT NOT NULL);
CREATE TABLE jobs (
    job_key TEXT PRIMARY KEY, run_id TEXT NOT NULL, backend TEXT NOT NULL, status TEXT NOT NULL, at_s REAL NOT NULL,
    data TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE episodes (
    key TEXT PRIMARY KEY, phase TEXT NOT NULL, epoch INTEGER NOT NULL, round INTEGER NOT NULL,
    example_id TEXT NOT NULL, generation INTEGER NOT NULL, attempt INTEGER NOT NULL, outcome TEXT NOT NULL,
    reward REAL, data TEXT NOT NULL);
CREATE INDEX episodes_by_epoch ON episodes (phase, epoch);
CREATE TABLE policy_versions (
    version INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, num_updates INTEGER NOT NULL, checkpoint TEXT,
    at_s REAL NOT NULL);
PRAGMA user_version = 1;
"""
"""The tables as the first version of the package made them."""


def read_rows(folder: Path, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the rows that a query finds in the journal of a run folder."""
    uri = f"{(folder / 'run.sqlite').absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        return connection.execute(query, parameters).fetchall()
