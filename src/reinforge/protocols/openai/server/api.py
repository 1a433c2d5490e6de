"""OpenAI's fine-tuning API as a part of the server, which owns the folder of its data alone."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from reinforge.bounded import escape_surrogates
from reinforge.protocols.openai.server.contents import FileContents
from reinforge.protocols.openai.server.file_store import UnknownObject
from reinforge.protocols.openai.server.files import FileLimits, FilesApi, find, hash_parts
from reinforge.protocols.openai.server.graders import GradersApi
from reinforge.protocols.openai.server.models import TunedModels
from reinforge.protocols.openai.server.plan import JobSettings
from reinforge.protocols.openai.server.records import FineTuningJob, JobState
from reinforge.protocols.openai.server.request import (
    hash_request,
    read_grader,
    read_job,
    read_job_key,
    warn_of_integrations,
)
from reinforge.protocols.openai.server.runner import FineTuningRunner, ProcessLauncher
from reinforge.protocols.openai.server.store import IllegalTransition, JobStore, KeyReused
from reinforge.serving.loading import BaseModels, ModelLoader, TrainingHost, find_bases, lock_folder
from reinforge.serving.models import ServedModels
from reinforge.serving.routes import (
    ApiError,
    Feature,
    count_retries,
    read_json,
    read_page_query,
    write_json,
    write_page,
)

logger = logging.getLogger(__name__)

MAX_PER_PAGE = 100
METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)
NO_RETRY = {"x-should-retry": "false"}  # a conflict stays one however often the request is sent
IDEMPOTENCY_KEY = "idempotency-key"
MAX_KEY = 512
RESUMED = dict.fromkeys((JobState.VALIDATING, JobState.QUEUED), (JobState.QUEUED, JobState.RUNNING))
"""The states in which a resumed job may be when its client asks again."""


@dataclass(frozen=True)
class FineTuningSettings:
    folder: Path
    jobs: JobSettings = field(default_factory=JobSettings)
    files: FileLimits = field(default_factory=FileLimits)


class FineTuningApi(Feature):
    """The feature; a `StorageError` if its folder cannot be used, or another server owns it."""

    def __init__(
        self,
        served: ServedModels,
        sources: BaseModels,
        host: ModelLoader,
        settings: FineTuningSettings,
        launcher: ProcessLauncher | None = None,
    ):
        self.settings, folder = settings, settings.folder
        self._lock = lock_folder(folder)
        self.store, self.contents = JobStore(folder / "jobs.sqlite"), FileContents(folder / "files")
        self.files = FilesApi(self.store, self.contents, settings.files)
        self.models = TunedModels(self.store, folder / "models", host)
        self.runner = FineTuningRunner(
            self.store, self.contents, folder / "jobs", self.models, sources, launcher or ProcessLauncher(),
            settings.jobs,
        )  # fmt: skip
        self.graders = GradersApi(served, allow_python=settings.jobs.allow_python)
        self._sources = sources

    def routes(self) -> list[web.RouteDef]:
        jobs = "/v1/fine_tuning/jobs"
        return [
            *self.files.routes(),
            *self.graders.routes(),
            web.post(jobs, self.create_job),
            web.get(jobs, self.list_jobs),
            web.get(f"{jobs}/{{id}}", self.retrieve_job),
            web.post(f"{jobs}/{{id}}/cancel", partial(self._stop_job, JobState.CANCELLED)),
            web.post(f"{jobs}/{{id}}/pause", partial(self._stop_job, JobState.PAUSED)),
            web.post(f"{jobs}/{{id}}/resume", self.resume_job),
            web.get(f"{jobs}/{{id}}/events", self.list_events),
            web.get(f"{jobs}/{{id}}/checkpoints", self.list_checkpoints),
            web.route("*", "/v1/fine_tuning/checkpoints/{name:.+}/permissions{rest:.*}", self.refuse_permissions),
            web.delete("/v1/models/{name:.+}", self.delete_model),
        ]

    async def start(self) -> None:
        known = {file.id for file in self.store.list_files(None, 1 << 30)[0]} | self.store.list_part_ids()
        await asyncio.to_thread(self.contents.remove_except, known)
        await self.graders.start()
        for problem in await self.models.start():
            logger.warning("a fine-tuned model is not served: %s", problem)
        await self.runner.start()

    async def close(self) -> None:
        await self.runner.close()
        await self.graders.close()
        self.store.close()
        self._lock.release()

    async def create_job(self, request: web.Request) -> web.Response:
        """Creates a job, once: the same request sent again gets the same job."""
        body = await read_json(request)
        job, job_key, warning = read_job(body), read_job_key(body), warn_of_integrations(body)
        digest = hash_parts("job", hash_request(body))
        header = escape_surrogates(request.headers.get(IDEMPOTENCY_KEY, ""))
        if len(header) > MAX_KEY:
            raise ApiError(400, f"{IDEMPOTENCY_KEY} is longer than {MAX_KEY} characters")
        keys = [f"header:{header}"] if header else []
        keys += [f"job_key:{job_key}"] if job_key else []
        is_retry = count_retries(request) > 0
        try:
            created = await asyncio.to_thread(self.store.find_created, digest, keys, is_retry=is_retry)
            if created is None:  # a file or a model of a job that exists may have been deleted since
                await asyncio.to_thread(self._check, job)
                created = await asyncio.to_thread(
                    self.store.create_job, job, digest, keys, is_retry=is_retry, warning=warning
                )
        except KeyReused as error:
            raise ApiError(409, str(error), code="idempotency_key_reused") from None
        if created.id == job.id:
            self.runner.drive(job.id)
        return write_json(created.as_answer())

    def _check(self, job: FineTuningJob) -> None:
        for param, file_id in (("training_file", job.training_file), ("validation_file", job.validation_file)):
            try:
                file = None if file_id is None else self.store.find_file(file_id)
            except UnknownObject as error:
                raise ApiError(400, str(error), param=param, code=f"invalid_{param}") from None
            if file is not None and file.purpose != "fine-tune":
                message = f"the file {file_id} has the purpose {file.purpose}; upload it with the purpose fine-tune"
                raise ApiError(400, message, param=param, code=f"invalid_{param}")
        grader = read_grader(job, allow_python=self.settings.jobs.allow_python)
        try:
            self.models.resolve(job.model, self._sources)
            if grader is not None:
                self.models.resolve_judges(grader, self._sources)
        except ApiError as error:
            raise ApiError(400, error.message, param="model", code="model_not_available") from None

    async def list_jobs(self, request: web.Request) -> web.Response:
        """Lists jobs, the newest first; `metadata[key]=value` filters them, `metadata=null` finds those without."""
        after, limit = read_page_query(request, usual=20, most=MAX_PER_PAGE)
        pairs = [(METADATA.fullmatch(name), value) for name, value in request.query.items()]
        metadata: dict[str, str] | None = {match[1]: value for match, value in pairs if match} or None
        if request.query.get("metadata") == "null":
            metadata = {}
        jobs, has_more = await find(self.store.list_jobs, after, limit, metadata)
        return write_page([job.as_answer() for job in jobs], has_more)

    async def retrieve_job(self, request: web.Request) -> web.Response:
        return write_json((await self._find(request)).as_answer())

    async def _stop_job(self, state: JobState, request: web.Request) -> web.Response:
        """Cancels a job, or pauses it at its last checkpoint; from then on it is, whatever its process still does."""
        job = await self._change(request, state, f"The job was {state.value}")
        await self.runner.stop(job.id)
        return write_json(job.as_answer())

    async def resume_job(self, request: web.Request) -> web.Response:
        found = await self._find(request)
        next_state = JobState.QUEUED if found.hyperparameters else JobState.VALIDATING
        job = await self._change(request, next_state, "The job was resumed", only_from=JobState.PAUSED)
        if job.state is next_state:
            self.runner.drive(job.id)
        return write_json(job.as_answer())

    async def list_events(self, request: web.Request) -> web.Response:
        job = await self._find(request)
        after, limit = read_page_query(request, usual=20, most=MAX_PER_PAGE)
        events, has_more = await find(self.store.list_events, job.id, after, limit)
        return write_page([event.as_answer() for event in events], has_more)

    async def list_checkpoints(self, request: web.Request) -> web.Response:
        job = await self._find(request)
        after, limit = read_page_query(request, usual=10, most=MAX_PER_PAGE)
        checkpoints, has_more = await find(self.store.list_checkpoints, job.id, after, limit)
        return write_page([checkpoint.as_answer(job.id) for checkpoint in checkpoints], has_more)

    async def refuse_permissions(self, request: web.Request) -> web.Response:
        raise ApiError(
            501, "this server has one organization and no projects, so checkpoints need no permissions",
            code="not_implemented", headers=NO_RETRY,
        )  # fmt: skip

    async def delete_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            await self.models.delete(name)
        except UnknownObject as error:
            raise ApiError(404, str(error), param="model", code="model_not_found") from None
        return write_json({"id": name, "object": "model", "deleted": True})

    async def _find(self, request: web.Request) -> FineTuningJob:
        try:
            return await asyncio.to_thread(self.store.find_job, request.match_info["id"])
        except UnknownObject as error:
            raise ApiError(404, str(error), code="fine_tune_not_found") from None

    async def _change(self, request: web.Request, state: JobState, message: str, **only: Any) -> FineTuningJob:
        """Brings a job into a state that a client asks for; a retry of a request that has done so is answered alike."""
        found = await self._find(request)
        try:
            return await asyncio.to_thread(self.store.transition, found.id, state, message, **only)
        except IllegalTransition as error:
            if count_retries(request) > 0 and error.job.state in (state, *RESUMED.get(state, ())):
                return error.job
            verb = request.path.rpartition("/")[2]
            message = f"the job {error.job.id} is {error.job.state.value}, so it cannot be changed by {verb}"
            code = {"cancel": "job_not_cancellable"}.get(verb, f"job_not_{verb[:-1]}able")
            raise ApiError(400, message, code=code, headers=NO_RETRY) from None


FOLDER = "fine_tuning"  # the folder of the API's data, in the server's


async def make_fine_tuning(host: TrainingHost) -> FineTuningApi:
    """Returns the part of the server that fine-tunes the models on its command line."""
    options = host.options
    bases = await find_bases(options)
    jobs = JobSettings(max_running=options.max_jobs, device=options.device, allow_python=options.allow_python_graders)
    if options.max_tokens is not None:
        jobs = replace(jobs, max_reply_tokens=options.max_tokens)
    folder = options.data_dir.absolute() / FOLDER
    return FineTuningApi(host.models, bases, host.loader, FineTuningSettings(folder, jobs))
