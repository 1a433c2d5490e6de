"""The record of fine-tuning jobs, of their events and checkpoints, and of the models that they made.

Every method is one transaction. A job's state changes only along `states.TRANSITIONS`, by `transition`, which writes
the state and its event together: of two that race, such as `cancel` and the end of the job, the first one wins and the
other one is told.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from reinforge.protocols.openai.server.file_store import FileStore, UnknownObject, insert
from reinforge.protocols.openai.server.records import (
    TRANSITIONS,
    FileRecord,
    FineTuningJob,
    JobCheckpoint,
    JobError,
    JobEvent,
    JobState,
    TunedModel,
)


class IllegalTransition(Exception):
    def __init__(self, job: FineTuningJob, state: JobState):
        super().__init__(f"the job {job.id} is {job.state.value}, so it cannot become {state.value}")
        self.job = job


class KeyReused(Exception):
    """A key that a client has sent before, now with another request."""


class JobStore(FileStore):
    def find_created(self, digest: str, keys: Iterable[str] = (), *, is_retry: bool = False) -> FineTuningJob | None:
        """Returns the job that the same request has created; None: it has created none.

        Args:
            digest: Hash of the whole request.
            keys: Keys that name the request, such as its Idempotency-Key.
            is_retry: The client sends the request again, so one with the same digest within `RETRY_S` is the same.

        Raises:
            KeyReused: One of the keys belongs to another request.
        """
        known = self.find_repeated(digest) if is_retry else None
        for key in keys:
            for row in self._read("SELECT digest, object_id FROM requests WHERE key = ?", key):
                if row["digest"] != digest:
                    raise KeyReused(f"the key {key.partition(':')[2][:80]!r} belongs to another request")
                known = row["object_id"]
        return None if known is None else self.find_job(known)

    def create_job(
        self,
        job: FineTuningJob,
        digest: str,
        keys: Collection[str] = (),
        *,
        is_retry: bool = False,
        warning: str | None = None,
    ) -> FineTuningJob:
        """Records a new job, or returns the one that the same request has created, as `find_created` does.

        Args:
            warning: The message of a second event.
        """
        with self._transaction() as database:
            if (known := self.find_created(digest, keys, is_retry=is_retry)) is not None:
                for key in keys:
                    self._remember(database, digest, known.id, key)
                return known
            row = {"id": job.id, "created_at": job.created_at, "state": job.state.value}
            insert(database, "jobs", {**row, "metadata": json.dumps(job.metadata or {}), "data": _dump_job(job)})
            self._remember(database, digest, job.id)
            for key in keys:
                self._remember(database, digest, job.id, key)
            _insert_event(database, job.id, make_event(job.id, "created", f"Created fine-tuning job: {job.id}"))
            if warning is not None:
                _insert_event(database, job.id, make_event(job.id, "warning", warning, "warn"))
            return job

    def find_job(self, id_: str) -> FineTuningJob:
        rows = self._read("SELECT * FROM jobs WHERE id = ?", id_)
        if not rows:
            raise UnknownObject(f"there is no fine-tuning job {id_[:80]!r}")
        return _read_job(rows[0])

    def list_jobs(
        self, after: str | None, limit: int, metadata: Mapping[str, str] | None = None
    ) -> tuple[list[FineTuningJob], bool]:
        """Returns a page of jobs, the newest first, and whether there are more.

        Args:
            limit: Maximum jobs of a page.
            metadata: Pairs that a job's metadata must have; empty: only jobs without metadata; None: any.
        """
        where, values = ["1"], list[Any]()
        if metadata is not None and not metadata:
            where.append("metadata = '{}'")
        for name, value in (metadata or {}).items():
            where.append("EXISTS (SELECT 1 FROM json_each(jobs.metadata) WHERE key = ? AND value = ?)")
            values += [name, value]
        rows, more = self._read_page("jobs", " AND ".join(where), tuple(values), after, limit)
        return [_read_job(row) for row in rows], more

    def list_unfinished(self) -> list[FineTuningJob]:
        final = [state.value for state in JobState if state.is_final]
        marks = ", ".join("?" * len(final))
        return [
            _read_job(row)
            for row in self._read(f"SELECT * FROM jobs WHERE state NOT IN ({marks}) ORDER BY number", *final)
        ]

    def transition(
        self,
        id_: str,
        state: JobState,
        message: str,
        *,
        only_from: JobState | None = None,
        models: Iterable[TunedModel] = (),
        checkpoints: Iterable[JobCheckpoint] = (),
        results: FileRecord | None = None,
        **changes: Any,
    ) -> FineTuningJob:
        """Brings a job into another state, with the event that says so; both or neither are recorded.

        Args:
            only_from: The state that the job must be in; None: any from which `state` may follow.

        Raises:
            IllegalTransition: `state` may not follow the job's state.
            UnknownObject: There is no such job.
        """
        with self._transaction() as database:
            job = self.find_job(id_)
            if state not in TRANSITIONS[job.state] or (only_from is not None and job.state is not only_from):
                raise IllegalTransition(job, state)
            finished = int(time.time()) if state.is_final else None
            if results is not None:
                insert(database, "files", asdict(results))
                changes["result_files"] = (results.id,)
            job = replace(job, state=state, finished_at=finished, **changes)
            database.execute("UPDATE jobs SET state = ?, data = ? WHERE id = ?", (state.value, _dump_job(job), id_))
            for model in models:
                insert(database, "models", asdict(model), "INSERT OR REPLACE")
            for checkpoint in checkpoints:
                row = {**asdict(checkpoint), "job_id": id_, "metrics": json.dumps(checkpoint.metrics)}
                insert(database, "checkpoints", row)
            level = "error" if state is JobState.FAILED else "info"
            _insert_event(database, id_, make_event(id_, secrets.token_hex(6), message, level))
            return job

    def add_events(self, job_id: str, events: Iterable[JobEvent]) -> None:
        with self._transaction() as database:
            for event in events:
                _insert_event(database, job_id, event)

    def list_events(self, job_id: str, after: str | None, limit: int) -> tuple[list[JobEvent], bool]:
        rows, more = self._read_page("events", "job_id = ?", (job_id,), after, limit)
        return [
            JobEvent(row["id"], row["created_at"], row["message"], row["level"], json.loads(row["data"] or "null"))
            for row in rows
        ], more

    def list_checkpoints(self, job_id: str, after: str | None, limit: int) -> tuple[list[JobCheckpoint], bool]:
        rows, more = self._read_page("checkpoints", "job_id = ?", (job_id,), after, limit)
        return [
            JobCheckpoint(row["id"], row["created_at"], row["step"], row["model"], json.loads(row["metrics"]))
            for row in rows
        ], more

    def list_models(self) -> list[TunedModel]:
        return [TunedModel(**dict(row)) for row in self._read("SELECT * FROM models ORDER BY name")]

    def remove_model(self, name: str) -> None:
        """Forgets a model; its folder may serve other names."""
        with self._transaction() as database:
            if not database.execute("DELETE FROM models WHERE name = ?", (name,)).rowcount:
                raise UnknownObject(f"no job has made the model {name[:200]!r}")

    def find_model(self, name: str) -> TunedModel | None:
        rows = self._read("SELECT * FROM models WHERE name = ?", name)
        return TunedModel(**dict(rows[0])) if rows else None


def _insert_event(database: sqlite3.Connection, job_id: str, event: JobEvent) -> None:
    data = None if event.data is None else json.dumps(event.data)
    insert(database, "events", {**asdict(event), "job_id": job_id, "data": data}, "INSERT OR IGNORE")


def make_event(
    job_id: str, what: str, message: str, level: str = "info", data: dict[str, Any] | None = None
) -> JobEvent:
    return JobEvent(f"ftevent-{job_id.removeprefix('ftjob-')}-{what}", int(time.time()), message, level, data)


def _dump_job(job: FineTuningJob) -> str:
    names = [name for name in FineTuningJob.__dataclass_fields__ if name not in ("id", "created_at", "state", "error")]
    values: dict[str, Any] = {name: getattr(job, name) for name in names}
    values["error"] = None if job.error is None else job.error.as_answer()
    return json.dumps(values)


def _read_job(row: sqlite3.Row) -> FineTuningJob:
    values = json.loads(row["data"])
    values["error"] = None if values["error"] is None else JobError(**values["error"])
    values["result_files"] = tuple(values["result_files"])
    return FineTuningJob(id=row["id"], created_at=row["created_at"], state=JobState(row["state"]), **values)
