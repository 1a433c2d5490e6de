"""The tables of the journal (`run.sqlite`), their format, and how a journal of an older format is upgraded.

`PRAGMA user_version` holds the format. 0 is an empty file: its process died before it had created the tables.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from reinforge.errors import ConfigError

SCHEMA_VERSION = 3
READABLE_FORMATS = (2, 3)
"""Formats that are read as they are: 2 has the same columns, apart from the checksums."""

_SCHEMA = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER) WITHOUT ROWID;
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, started_s REAL NOT NULL, pid INTEGER NOT NULL, host TEXT NOT NULL, resumed_after INTEGER,
    ended_s REAL, ended TEXT, checksum INTEGER);
CREATE TABLE stages (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, stage TEXT NOT NULL, at_s REAL NOT NULL, data TEXT NOT NULL, checksum INTEGER);
CREATE TABLE jobs (
    job_key TEXT PRIMARY KEY, epoch INTEGER NOT NULL, run_id TEXT NOT NULL, backend TEXT, status TEXT NOT NULL,
    at_s REAL NOT NULL, ref TEXT, data TEXT, checksum INTEGER) WITHOUT ROWID;
CREATE TABLE episodes (
    key TEXT PRIMARY KEY, phase TEXT NOT NULL, epoch INTEGER NOT NULL, round INTEGER NOT NULL,
    example_id TEXT NOT NULL, generation INTEGER NOT NULL, attempt INTEGER NOT NULL, outcome TEXT NOT NULL,
    reward REAL, data TEXT NOT NULL, checksum INTEGER);
CREATE INDEX episodes_by_epoch ON episodes (phase, epoch);
CREATE TABLE policy_versions (
    version INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, num_updates INTEGER, checkpoint TEXT,
    at_s REAL NOT NULL, checksum INTEGER);
CREATE TABLE metrics (epoch INTEGER PRIMARY KEY, data TEXT NOT NULL, checksum INTEGER);
CREATE TABLE validations (epoch INTEGER PRIMARY KEY, data TEXT NOT NULL, checksum INTEGER);
CREATE TABLE snapshots (
    epoch INTEGER PRIMARY KEY, version INTEGER, checkpoint TEXT, at_s REAL NOT NULL, data TEXT NOT NULL, checksum INTEGER);
"""  # noqa: E501  as SQLite itself writes a table that a migration has added a column to

# Format 1 had no sessions, metrics, validations and snapshots, so such a run resumes from its beginning. Its episodes
# lack the token counts and sampling settings that replaying needs: they are set aside, never replayed.
_FROM_1_TO_2 = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, started_s REAL NOT NULL, pid INTEGER NOT NULL, host TEXT NOT NULL, resumed_after INTEGER,
    ended_s REAL, ended TEXT);
ALTER TABLE jobs RENAME TO jobs_1;
CREATE TABLE jobs (
    job_key TEXT PRIMARY KEY, epoch INTEGER NOT NULL, run_id TEXT NOT NULL, backend TEXT, status TEXT NOT NULL,
    at_s REAL NOT NULL, ref TEXT, data TEXT) WITHOUT ROWID;
INSERT INTO jobs SELECT
    job_key, CAST(replace(job_key, rtrim(job_key, replace(job_key, '/', '')), '') AS INTEGER), run_id, backend, status,
    at_s, NULL, data FROM jobs_1;
DROP TABLE jobs_1;
DROP INDEX episodes_by_epoch;
ALTER TABLE episodes RENAME TO episodes_of_format_1;
CREATE TABLE episodes (
    key TEXT PRIMARY KEY, phase TEXT NOT NULL, epoch INTEGER NOT NULL, round INTEGER NOT NULL,
    example_id TEXT NOT NULL, generation INTEGER NOT NULL, attempt INTEGER NOT NULL, outcome TEXT NOT NULL,
    reward REAL, data TEXT NOT NULL);
CREATE INDEX episodes_by_epoch ON episodes (phase, epoch);
ALTER TABLE policy_versions RENAME TO policy_versions_1;
CREATE TABLE policy_versions (
    version INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, num_updates INTEGER, checkpoint TEXT,
    at_s REAL NOT NULL);
INSERT INTO policy_versions SELECT version, fingerprint, num_updates, checkpoint, at_s FROM policy_versions_1;
DROP TABLE policy_versions_1;
CREATE TABLE metrics (epoch INTEGER PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE validations (epoch INTEGER PRIMARY KEY, data TEXT NOT NULL);
INSERT OR REPLACE INTO validations SELECT epoch, data FROM stages WHERE stage IN ('BASELINE', 'VALIDATE') ORDER BY id;
CREATE TABLE snapshots (
    epoch INTEGER PRIMARY KEY, version INTEGER, checkpoint TEXT, at_s REAL NOT NULL, data TEXT NOT NULL);
"""

# Format 2 had no checksums. Its rows are taken over without one and get it when they are written again.
_FROM_2_TO_3 = """
ALTER TABLE run ADD COLUMN checksum INTEGER;
ALTER TABLE sessions ADD COLUMN checksum INTEGER;
ALTER TABLE stages ADD COLUMN checksum INTEGER;
ALTER TABLE jobs ADD COLUMN checksum INTEGER;
ALTER TABLE episodes ADD COLUMN checksum INTEGER;
ALTER TABLE policy_versions ADD COLUMN checksum INTEGER;
ALTER TABLE metrics ADD COLUMN checksum INTEGER;
ALTER TABLE validations ADD COLUMN checksum INTEGER;
ALTER TABLE snapshots ADD COLUMN checksum INTEGER;
"""

MIGRATIONS: dict[int, str] = {1: _FROM_1_TO_2, 2: _FROM_2_TO_3}
"""Format -> the script that upgrades a journal of that format to the next one."""


def can_upgrade(found: int) -> bool:
    return 0 < found < SCHEMA_VERSION and all(version in MIGRATIONS for version in range(found, SCHEMA_VERSION))


def describe_format(database: Path, found: int) -> str:
    """Returns why a journal cannot be read, and what to do about it.

    Args:
        found: Its format; not the current one.
    """
    if found > SCHEMA_VERSION:
        return (
            f"{database} has format {found}, written by a newer reinforge; this one reads up to {SCHEMA_VERSION}: "
            "upgrade reinforge"
        )
    if can_upgrade(found):
        fix = f"`reinforge finetune FILE --resume {database.parent}` upgrades it"
        return f"{database} has format {found} of an older reinforge; {fix} to format {SCHEMA_VERSION}"
    return f"{database} has format {found}, which this reinforge can neither read nor upgrade: start a new run"


def create_or_upgrade(db: sqlite3.Connection, database: Path | None = None) -> None:
    """Makes the tables of an empty journal, or upgrades an older one, in one transaction; else changes nothing.

    Args:
        db: A connection in autocommit mode.
        database: The SQLite file, for messages; None: it is in memory.

    Raises:
        ConfigError: The journal was written by a newer reinforge, or cannot be upgraded.
    """
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found == SCHEMA_VERSION:
        return
    if found != 0 and not can_upgrade(found):
        raise ConfigError(describe_format(database or Path(), found))
    steps = [_SCHEMA] if found == 0 else [MIGRATIONS[version] for version in range(found, SCHEMA_VERSION)]
    db.executescript(f"BEGIN IMMEDIATE; {' '.join(steps)} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")


def read_tables(db: sqlite3.Connection) -> dict[str, str]:
    """Returns the SQL of every table and index of a journal, by name; kept from older formats are not among them."""
    query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE '%_of_format_%'"
    return dict(db.execute(query).fetchall())
