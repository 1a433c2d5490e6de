"""Drives the fine-tuning jobs of a server: validates their files, trains them, and serves what they made.

    validating_files   the rows are checked and written into the job's folder; a bad one fails the job by its line
    queued             waits until fewer than `max_running` jobs run, in the order in which files were validated
    running            a separate process runs the job (`process`); its metrics become events
    succeeded          its checkpoints are copied to the folder of models, recorded, and served under their names

The record decides: a state is written before anything acts on it, so a server that is killed at any point and started
again resumes from there. A job whose process was running is queued again and resumes from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError, ReinforgeError, describe_error
from reinforge.files import find_json, make_private_folder, open_private, write_json
from reinforge.protocols.openai.graders.schema import Grader
from reinforge.protocols.openai.server.contents import FileContents
from reinforge.protocols.openai.server.file_store import UnknownObject
from reinforge.protocols.openai.server.models import TunedModels, publish_job
from reinforge.protocols.openai.server.plan import RUN, TRAINING_ROWS, VALIDATION_ROWS, JobInput, JobSettings, plan_job
from reinforge.protocols.openai.server.process import CONFIG, ENDED, INTERRUPTED, NOTE
from reinforge.protocols.openai.server.progress import read_events, read_note
from reinforge.protocols.openai.server.records import (
    MAX_MESSAGE,
    FineTuningJob,
    JobError,
    JobEvent,
    JobFailure,
    JobState,
)
from reinforge.protocols.openai.server.request import read_grader
from reinforge.protocols.openai.server.store import IllegalTransition, JobStore, make_event
from reinforge.protocols.openai.server.training_rows import prepare_rows, show_rows
from reinforge.rollout.isolation.processes import kill_group
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.safe_text import redact_secrets
from reinforge.serving.loading import BaseModels
from reinforge.serving.routes import ApiError, hide_paths

LOG = "process.log"
STOP_S = 20.0  # seconds that a process has to write its last checkpoint once it is told to stop; then it is killed


class JobProcess:
    """A process whose standard input is the sign that this server lives."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    async def wait(self) -> None:
        await self._process.wait()

    async def stop(self) -> None:
        """Stops it, so that it can be resumed; returns when it has ended."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            kill_group(self._process.pid)
            await self._process.wait()


class ProcessLauncher:
    """Runs `reinforge.protocols.openai.server.process`, with its output in the job's folder."""

    async def launch(self, folder: Path) -> JobProcess:
        with open(folder / LOG, "ab", opener=open_private) as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "reinforge.protocols.openai.server.process",
                str(folder),
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return JobProcess(process)


logger = logging.getLogger(__name__)

MAX_LOST = 3
"""Times in a row that a job's process may be killed by others, such as for its memory, before the job fails."""


class FineTuningRunner:
    """The jobs of one server; use it in one event loop."""

    def __init__(
        self,
        store: JobStore,
        contents: FileContents,
        folder: Path,
        models: TunedModels,
        sources: BaseModels,
        launcher: ProcessLauncher,
        settings: JobSettings,
    ):
        self.store, self.contents, self.folder, self.models = store, contents, folder, models
        self.sources, self.settings = sources, settings
        self._launcher = launcher
        self._slots = asyncio.Semaphore(settings.max_running)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, JobProcess] = {}
        self._recorded: dict[str, set[str]] = {}
        self._is_closing = False

    async def start(self) -> None:
        make_private_folder(self.folder)
        for job in await asyncio.to_thread(self.store.list_unfinished):
            if job.state is JobState.RUNNING:
                message = "The server was restarted; the job resumes from its last checkpoint"
                await self._change(job.id, JobState.QUEUED, message, only_from=JobState.RUNNING)
            if job.state is not JobState.PAUSED:
                self.drive(job.id)

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(process.stop() for process in self._processes.values()))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)  # never cancelled: some may be recording

    def drive(self, id_: str) -> None:
        """Begins to work on a job that is validating or queued; what still works on it ends first."""
        before = self._tasks.get(id_)
        self._tasks[id_] = task = asyncio.create_task(self._drive(id_, before), name=f"job-{id_}")
        task.add_done_callback(partial(self._forget, id_))

    async def stop(self, id_: str) -> None:
        """Stops the process of a job, if it has one; the record says already why."""
        process = self._processes.get(id_)
        if process is not None:
            await process.stop()

    def _forget(self, id_: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(id_) is task:
            del self._tasks[id_]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the work on job %s ended: %s", id_, describe_error(error), exc_info=error)

    async def _drive(self, id_: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            job = await asyncio.to_thread(self.store.find_job, id_)
            if job.state is JobState.VALIDATING:
                await self._validate(job)
            async with self._slots:
                job = await asyncio.to_thread(self.store.find_job, id_)
                if job.state is JobState.QUEUED and not self._is_closing:
                    await self._run(job)
        except IllegalTransition as raced:  # the job was cancelled or paused meanwhile
            logger.info("%s", raced)
        except JobFailure as failure:
            await self._fail(id_, failure.error)
        except ApiError as refused:  # what the request named has been removed or turned off since
            code = refused.code or "invalid_request"
            await self._fail(id_, JobFailure(code, refused.message, refused.param).error)
        except Exception as error:
            if not isinstance(error, ReinforgeError | OSError):
                logger.exception("the work on job %s failed", id_)
            await self._fail(id_, JobError("server_error", redact_secrets(describe_error(error))[:MAX_MESSAGE]))

    async def _fail(self, id_: str, error: JobError) -> None:
        error = replace(error, message=hide_paths(error.message))
        with contextlib.suppress(IllegalTransition):  # it was cancelled, which is final
            await self._change(id_, JobState.FAILED, f"The job failed: {error.message}", error=error)

    async def _change(self, id_: str, state: JobState, message: str, **changes: Any) -> FineTuningJob:
        return await asyncio.to_thread(self.store.transition, id_, state, message, **changes)

    async def _validate(self, job: FineTuningJob) -> None:
        plan = await run_in_daemon_thread(partial(self._prepare, job), "job-files")
        message = f"Files validated, moving job to queued state ({plan.num_steps} steps)"
        await self._change(
            job.id, JobState.QUEUED, message, only_from=JobState.VALIDATING, hyperparameters=plan.hyperparameters
        )

    def _prepare(self, job: FineTuningJob) -> Any:
        folder = self.folder / job.id
        make_private_folder(folder)
        grader = read_grader(job, allow_python=self.settings.allow_python)
        policy = self.models.resolve(job.model, self.sources)
        judges = {} if grader is None else self.models.resolve_judges(grader, self.sources)
        num_rows = self._prepare_rows(job, job.training_file, folder / TRAINING_ROWS, "training_file", grader)
        show_rows(folder / TRAINING_ROWS, folder / f"shown-{TRAINING_ROWS}")
        num_held_out = 0
        if job.validation_file is not None:
            target = folder / VALIDATION_ROWS
            num_held_out = self._prepare_rows(job, job.validation_file, target, "validation_file", grader)
        given = JobInput(job, policy, folder, num_rows, num_held_out, grader, judges, self.settings)
        try:
            plan = plan_job(given)
        except ConfigError as error:
            raise JobFailure("invalid_hyperparameters", str(error), "method") from None
        write_json(folder / CONFIG, plan.config)
        return plan

    def _prepare_rows(self, job: FineTuningJob, file_id: str, target: Path, param: str, grader: Grader | None) -> int:
        code = f"invalid_{param}"
        training = target.parent / TRAINING_ROWS if param == "validation_file" else None
        try:
            self.store.find_file(file_id)
            source = self.contents.path(file_id)
            num_rows, num_left_out = prepare_rows(source, target, job.method_type, grader, training)
        except UnknownObject as error:
            raise JobFailure(code, str(error), param) from None
        except ConfigError as error:
            count = len(error.problems)
            head = f"the file {file_id} has {count} problems:\n" if count > 1 else f"the file {file_id}: "
            raise JobFailure(code, f"{head}{error}", param) from None
        if num_left_out:
            message = f"{num_left_out} of {num_rows + num_left_out} pairs in {file_id} are left out: equal replies"
            self.store.add_events(job.id, [make_event(job.id, f"{param}-left-out", message, "warn")])
        return num_rows

    async def _run(self, job: FineTuningJob) -> None:
        # the operator may have turned graders in Python off since the job was queued
        read_grader(job, allow_python=self.settings.allow_python)
        await self._change(job.id, JobState.RUNNING, "Fine-tuning job started", only_from=JobState.QUEUED)
        folder = self.folder / job.id
        for _ in range(MAX_LOST):
            ended = await self._run_process(job.id, folder)
            current = await asyncio.to_thread(self.store.find_job, job.id)
            if current.state is not JobState.RUNNING or self._is_closing:
                return
            if ended is not None and ended["code"] != INTERRUPTED:
                break
            ended = None  # a signal that is not from here: SIGKILL, or SIGTERM
            logger.warning("the process of job %s was killed; it resumes from its last checkpoint", job.id)
        if ended is None:
            message = f"its process was killed {MAX_LOST} times; the machine may lack memory"
            raise JobFailure("process_killed", message)
        if ended["exit_code"] != 0:
            raise JobFailure(str(ended["code"]), str(ended["message"]))
        await publish_job(self.store, self.contents, self.models, job, folder / RUN)

    async def _run_process(self, id_: str, folder: Path) -> dict[str, Any] | None:
        """Runs the process of a job to its end; returns how it says that it ended; None: it was killed."""
        (folder / ENDED).unlink(missing_ok=True)
        try:
            process = await self._launcher.launch(folder)
        except OSError as error:  # the machine is out of processes or memory, which may pass
            logger.warning("the process of job %s cannot be started: %s", id_, error)
            await asyncio.sleep(self.settings.relaunch_s)
            return None
        self._processes[id_] = process
        try:
            current = await asyncio.to_thread(self.store.find_job, id_)
            if current.state is not JobState.RUNNING or self._is_closing:  # while the process was being started
                await process.stop()
            ended = asyncio.create_task(process.wait())
            while not ended.done():
                await asyncio.wait({ended}, timeout=self.settings.poll_s)
                await self._record_events(id_, folder)
        finally:
            await process.stop()
            del self._processes[id_]
        await self._record_events(id_, folder)
        del self._recorded[id_]
        ended_as = find_json(folder / ENDED)
        return ended_as if isinstance(ended_as, dict) and isinstance(ended_as.get("exit_code"), int) else None

    async def _record_events(self, id_: str, folder: Path) -> None:
        def read() -> list[JobEvent]:
            return [*read_note(id_, folder / NOTE), *read_events(id_, folder / RUN)]

        found = await run_in_daemon_thread(read, "job-events")
        known = self._recorded.setdefault(id_, set())
        if new := [event for event in found if event.id not in known]:
            await asyncio.to_thread(self.store.add_events, id_, new)
            known.update(event.id for event in new)
