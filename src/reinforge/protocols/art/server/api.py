"""ART's training service (protocol 2, as of its client 0.5.23), and the server of `art run` (protocol 1, 0.5.17).

The newest step is served as `wandb-artifact:///ENTITY/PROJECT/NAME` and as `NAME`, an earlier one as `...:step3` and
`NAME@3`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
from aiohttp import web

from reinforge.config.policy import PolicyConfig
from reinforge.files import remove_leftovers
from reinforge.protocols.art.server import wire
from reinforge.protocols.art.server.earlier_steps import EarlierSteps, ModelStep
from reinforge.protocols.art.server.model import ARTJob, ARTModel
from reinforge.protocols.art.server.records import JobResult, ModelFolder, ModelRecord
from reinforge.protocols.art.server.trajectories import SampledReplies
from reinforge.serving.loading import BaseModels, TrainingHost, find_bases, lock_folder
from reinforge.serving.models import ServedModel, ServedModels
from reinforge.serving.routes import ApiError, Feature, abortable, count_retries, make_id, read_json, write_json
from reinforge.types.episode import ModelCall

logger = logging.getLogger(__name__)

LOCAL_ENTITY = "local"
DEFAULT_PROJECT = "default"
MAX_MODELS = 8


class ARTApi(Feature):
    def __init__(
        self,
        models: ServedModels,
        bases: BaseModels,
        folder: Path,
        *,
        device: str = "auto",
        max_models: int = MAX_MODELS,
    ):
        self._models, self._bases, self._folder, self._device = models, bases, folder, device
        self._max_models = max_models
        self._replies, self._earlier = SampledReplies(), EarlierSteps(device)
        self._trained: dict[str, ARTModel] = {}
        self._jobs: dict[str, ARTJob] = {}
        self._deleting: set[str] = set()
        self._lock: filelock.BaseFileLock | None = None
        self._creating = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        model, job = "/v1/preview/models", "/v1/preview/training-jobs"
        return [
            web.post(model, self.create_model),
            web.delete(f"{model}/{{id}}", self.delete_model),
            web.get(f"{model}/{{id}}/checkpoints", self.list_checkpoints),
            web.delete(f"{model}/{{id}}/checkpoints", self.delete_checkpoints),
            web.post(job, self.create_job),
            web.get(f"{job}/{{id}}/events", self.list_events),
            web.post("/v1/preview/sft-training-jobs", self.refuse_sft),
            web.get("/healthcheck", self.show_health),
            web.post("/register", self.register),
            web.post("/_prepare_backend_for_training", self.prepare),
            web.post("/_get_step", self.get_step),
            web.post("/_delete_checkpoint_files", self.keep_steps),
            web.post("/_train_model", self.train),
        ]

    async def start(self) -> None:
        self._lock = lock_folder(self._folder, self._folder.with_name(f"{self._folder.name}.lock"))
        await asyncio.to_thread(remove_leftovers, self._folder)
        self._models.watch(self._record)
        for record, folder in self._list_records():
            if (obstacle := self._find_obstacle(record)) is None:
                await self._add(record, folder)
            else:
                logger.warning("the model %s of %s is not loaded: %s", record.name, record.project, obstacle)

    def _list_records(self) -> list[tuple[ModelRecord, ModelFolder]]:
        folders = [ModelFolder(path) for path in self._folder.iterdir() if path.name not in self._deleting]
        found = [(record, folder) for folder in folders if (record := folder.read()) is not None]
        return sorted(found, key=lambda each: (each[0].created_s, each[0].id))

    def _find_obstacle(self, record: ModelRecord) -> str | None:
        """Returns why a model cannot be loaded now; None: it can."""
        if record.base_model not in self._bases.names:
            return f"this server has no model {record.base_model} to train; it has: {', '.join(self._bases.names)}"
        if record.name in self._models:
            return f"a model is already served as {record.name!r}; choose another name"
        if len(self._trained) >= self._max_models:
            return (
                f"{self._max_models} models are loaded already (--max_models); delete one of them first, or start the "
                "server with a larger number"
            )
        return None

    def _record(self, call: ModelCall, model: ServedModel) -> None:
        self._replies.record(call, model.root or model.name)

    async def close(self) -> None:
        await self._earlier.close()
        for model in self._trained.values():
            await model.close()
        if self._lock is not None:
            self._lock.release()

    async def create_model(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        may_exist = body.get("return_existing") is True or count_retries(request) > 0
        model = await self._find_or_create(body, may_exist=may_exist)
        return write_json(model.record.describe())

    async def delete_model(self, request: web.Request) -> web.Response:
        """Removes a model with all its steps; its jobs are stopped, and its calls end first."""
        model = self._get_model(request)
        del self._trained[model.record.id]
        self._deleting.add(model.record.id)
        try:
            await self._delete(model)
        finally:
            self._deleting.discard(model.record.id)
        return web.Response(status=204)

    async def _delete(self, model: ARTModel) -> None:
        await model.stop()  # before its steps are listed, since a job makes one more
        for job in [job for job in self._jobs.values() if job.model_id == model.record.id]:
            del self._jobs[job.id]
            if job.result is None:
                job.end(JobResult(None, f"the model {model.record.name} was deleted", {}, job.num_sequences))
        steps = [name for step in model.list_steps() for name in _name_step(model.record, step)]
        for name in (model.record.artifact, model.record.name, *steps):
            if name in self._models:
                await self._models.remove(name)
        await model.close()
        model.folder.remove()

    async def list_checkpoints(self, request: web.Request) -> web.Response:
        """Lists the steps of a model; `order` is asc or desc, `after` the id of a checkpoint."""
        model = self._get_model(request)
        steps = model.list_steps()
        if request.query.get("order") == "desc":
            steps.reverse()
        rows = [{"id": f"{model.record.id}-step-{step}", "step": step, "metrics": {}} for step in steps]
        return wire.answer_page(request, rows)

    async def delete_checkpoints(self, request: web.Request) -> web.Response:
        model, wanted = self._get_model(request), wire.read_steps(await read_json(request), "steps")
        known = sorted({step for step in wanted if step in model.list_earlier()})
        for step in known:
            await self._remove_step(model, step)
        return write_json({"deleted_count": len(known), "not_found_steps": [s for s in wanted if s not in known]})

    async def create_job(self, request: web.Request) -> web.Response:
        """Starts a job, once: the same request sent again gets the same job."""
        body = await read_json(request, trains=True)
        id_ = body.get("model_id")
        model = self._trained.get(id_) if isinstance(id_, str) else None
        if model is None:
            raise ApiError(404, f"there is no model {str(id_)[:200]!r}", param="model_id", code="model_not_found")
        settings = wire.read_object(body, "experimental_config")
        groups = body.get("trajectory_groups")
        if count_retries(request) and (id_ := model.find_repeated(groups, settings)) is not None:
            return write_json({"id": id_})
        return write_json({"id": (await self._submit(model, groups, settings)).id})

    async def list_events(self, request: web.Request) -> web.Response:
        return wire.answer_page(request, wire.describe_events(self._get_job(request.match_info["id"])))

    async def refuse_sft(self, request: web.Request) -> web.Response:
        message = "this server reads no training data from a URL; upload it and use /v1/fine_tuning/jobs"
        raise ApiError(501, message, code="not_supported")

    async def show_health(self, request: web.Request) -> web.Response:
        return write_json({"status": "ok"})

    async def register(self, request: web.Request) -> web.Response:
        await self._find_or_create(await read_json(request), may_exist=True)
        return web.json_response(None)

    async def prepare(self, request: web.Request) -> web.Response:
        await self._find_described((await read_json(request)).get("model"))
        key = request.headers.get("authorization", "").removeprefix("Bearer ") or "none"
        return web.json_response([f"http://{request.headers['host']}/v1", key])

    async def get_step(self, request: web.Request) -> web.Response:
        return web.json_response((await self._find_described(await read_json(request))).step)

    async def keep_steps(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        model, kept = await self._find_described(body.get("model")), wire.read_steps(body, "steps_to_keep")
        for step in model.list_earlier():
            if step not in kept:
                await self._remove_step(model, step)
        return web.json_response(None)

    @abortable  # the job runs to its end, even if no client waits for it
    async def train(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, trains=True)
        model = await self._find_described(body.get("model"))
        given = wire.read_object(body, "config") | wire.read_object(body, "dev_config")
        settings = given | wire.read_trainer_args(body["model"])
        job = await asyncio.shield(self._submit(model, body.get("trajectory_groups"), settings))
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await response.prepare(request)
        await job.done.wait()
        assert job.result is not None  # it has ended
        if job.result.error is not None:
            if request.transport is not None:
                request.transport.abort()  # a stream that breaks off is how these clients learn of a failure
            return response
        if job.result.metrics.get("num_updates"):
            await response.write(json.dumps(job.result.metrics).encode() + b"\n")
        await response.write_eof()
        return response

    async def _find_or_create(self, body: Mapping[str, Any], *, may_exist: bool) -> ARTModel:
        entity, project, name = _read_names(body)
        base = body.get("base_model")
        self._bases.find(base if isinstance(base, str) else "")
        async with self._creating:
            found = self._find(entity, project, name)
            if found is not None:
                if not may_exist:
                    raise ApiError(409, f"the model {name} of {project} exists", param="name", code="model_exists")
                if found.record.base_model != base:
                    message = f"the model {name} of {project} is trained from {found.record.base_model}, not {base}"
                    raise ApiError(409, message, param="base_model", code="model_exists")
                return found
            record = ModelRecord(make_id("model"), entity, project, name, str(base), time.time())
            if (obstacle := self._find_obstacle(record)) is not None:
                raise ApiError(409, obstacle, param="name", code="model_unavailable")
            for known, folder in self._list_records():  # one that was not loaded, since there was no room
                if (known.artifact, known.base_model) == (record.artifact, record.base_model):
                    return await self._add(known, folder)
            folder = ModelFolder.create(self._folder, record)
            try:
                return await self._add(record, folder)
            except BaseException:
                folder.remove()
                raise

    async def _add(self, record: ModelRecord, folder: ModelFolder) -> ARTModel:
        await asyncio.to_thread(remove_leftovers, folder.path / "checkpoints")  # of a server that was killed
        policy = self._bases.find(record.base_model)
        model = ARTModel(record, folder, policy, self._device, self._replies, self._serve_step)
        served = await model.load()
        self._trained[record.id] = model
        for step in model.list_steps():
            self._serve_step(model, step)
        for name in (record.artifact, record.name):
            self._models.add(name, served, root=record.base_model)
        for id_ in folder.list_jobs():
            if folder.read_result(id_) is None and (job := model.resume(id_)) is not None:
                self._jobs[id_] = job
        return model

    def _find(self, entity: str, project: str, name: str) -> ARTModel | None:
        known = {(each.record.entity, each.record.project, each.record.name): each for each in self._trained.values()}
        return known.get((entity, project, name))

    async def _find_described(self, body: object) -> ARTModel:
        entity, project, name = _read_names(body if isinstance(body, dict) else {})
        if (model := self._find(entity, project, name)) is None:
            raise ApiError(404, f"the model {name} of {project} is not registered", code="model_not_found")
        return model

    def _get_model(self, request: web.Request) -> ARTModel:
        id_ = request.match_info["id"]
        if (model := self._trained.get(id_)) is None:
            raise ApiError(404, f"there is no model {id_[:200]!r}", code="model_not_found")
        return model

    async def _submit(self, model: ARTModel, groups: object, settings: dict[str, Any]) -> ARTJob:
        job = await model.submit(groups, settings)
        self._jobs[job.id] = job
        return job

    def _get_job(self, id_: str) -> ARTJob:
        if (job := self._jobs.get(id_)) is not None:
            return job
        for model in self._trained.values():
            if (job := model.resume(id_)) is not None:
                self._jobs[id_] = job
                return job
        raise ApiError(404, f"there is no training job {id_[:200]!r}", code="job_not_found")

    def _serve_step(self, model: ARTModel, step: int) -> None:
        base = model.record.base_model
        policy = self._bases.find(base)
        if step:
            policy = PolicyConfig(model=str(model.folder.get_checkpoint(step)), dtype=policy.dtype)
        served = ModelStep(step, model.policy, self._earlier, policy)
        for name in _name_step(model.record, step):
            if name not in self._models:
                self._models.add(name, served, root=base, close=lambda: self._earlier.remove(served))

    async def _remove_step(self, model: ARTModel, step: int) -> None:
        for name in _name_step(model.record, step):
            if name in self._models:
                await self._models.remove(name)
        model.folder.remove_step(step)


def _read_names(body: Mapping[str, Any]) -> tuple[str, str, str]:
    entity, project = wire.read_name(body, "entity", LOCAL_ENTITY), wire.read_name(body, "project", DEFAULT_PROJECT)
    return entity, project, wire.read_name(body, "name", None)


def _name_step(record: ModelRecord, step: int) -> tuple[str, str]:
    return f"{record.name}@{step}", f"{record.artifact}:step{step}"


async def make_art(host: TrainingHost) -> ARTApi:
    options, folder = host.options, host.options.data_dir.absolute() / "art"
    return ARTApi(host.models, await find_bases(options), folder, device=options.device, max_models=options.max_models)
