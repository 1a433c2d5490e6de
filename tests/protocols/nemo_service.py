"""A stand-in for NeMo Customizer, its entity store and its data store, over real HTTP on one port.

The data store speaks the part of the Hugging Face hub's API that `huggingface_hub` calls for one commit of small files.

    with NeMoService() as nemo:
        nemo.url                  for entity_host and datastore_host
        nemo.jobs, nemo.files     by id, and content by (repository, path)
        nemo.ends = ["failed"]    how the next jobs end
"""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from aiohttp import web

from tests.protocols.stand_in import ApiError, Route, StandIn

JOB_FIELDS = {"name", "config", "dataset", "hyperparameters"}


class NeMoService(StandIn):
    """One namespace's services.

    Attributes:
        jobs: By id.
        files: Content by (repository, path).
        namespaces, datasets: What was created.
    """

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.files: dict[tuple[str, str], bytes] = {}
        self.namespaces: list[str] = []
        self.datasets: dict[str, dict[str, Any]] = {}
        self._plans: dict[str, tuple[float, float, str]] = {}

    @property
    def url(self) -> str:
        return self.address

    def routes(self) -> tuple[Route, ...]:
        hub = "/v1/hf/api"
        return (
            ("GET", "/v1/namespaces/{id}", "namespace", self._get_namespace),
            ("POST", "/v1/namespaces", "namespace", self._create_namespace),
            ("GET", "/v1/datasets/{namespace}/{name}", "dataset", self._get_dataset),
            ("POST", "/v1/datasets", "dataset", self._create_dataset),
            ("POST", "/v1/customization/jobs", "create", self._create_job),
            ("GET", "/v1/customization/jobs", "jobs", self._list_jobs),
            ("GET", "/v1/customization/jobs/{id}", "retrieve", self._get_job),
            ("GET", "/v1/customization/jobs/{id}/status", "status", self._get_status),
            ("POST", "/v1/customization/jobs/{id}/cancel", "cancel", self._cancel),
            ("POST", f"{hub}/repos/create", "repo", self._create_repo),
            ("POST", f"{hub}/datasets/{{namespace}}/{{name}}/preupload/main", "preupload", self._preupload),
            ("POST", f"{hub}/datasets/{{namespace}}/{{name}}/commit/main", "commit", self._commit),
        )

    def rows(self, dataset: str, kind: str) -> list[dict[str, Any]]:
        """Returns the rows of a dataset's file: `training` or `validation`."""
        content = self.files[f"team/{dataset}", f"{kind}/{kind}_file.jsonl"]
        return [json.loads(line) for line in content.decode().splitlines()]

    async def _get_namespace(self, request: web.Request) -> dict[str, Any]:
        if request.match_info["id"] not in self.namespaces:
            raise ApiError(404, "no such namespace")
        return {"id": request.match_info["id"]}

    async def _create_namespace(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        if body["id"] in self.namespaces:
            raise ApiError(409, "it exists")
        self.namespaces.append(body["id"])
        return body

    async def _get_dataset(self, request: web.Request) -> dict[str, Any]:
        if request.match_info["name"] not in self.datasets:
            raise ApiError(404, "no such dataset")
        return self.datasets[request.match_info["name"]]

    async def _create_dataset(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.datasets[body["name"]] = body
        return body

    async def _create_repo(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        return {"url": f"{self.url}/v1/hf/datasets/{body.get('organization', '')}/{body['name']}"}

    async def _preupload(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        files = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in body["files"]]
        return {"files": files}

    async def _commit(self, request: web.Request) -> dict[str, Any]:
        repo = f"{request.match_info['namespace']}/{request.match_info['name']}"
        for line in (await request.text()).splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                value = entry["value"]
                self.files[repo, value["path"]] = base64.b64decode(value["content"])
        return {"commitUrl": f"{self.url}/v1/hf/datasets/{repo}/commit/abc", "commitOid": "abc", "success": True}

    async def _create_job(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        if set(body) != JOB_FIELDS:
            raise ApiError(422, f"unexpected fields {sorted(set(body) ^ JOB_FIELDS)}")
        if body["dataset"]["name"] not in self.datasets:
            raise ApiError(422, "no such dataset")
        id_ = f"cust-{next(self._numbers)}"
        self._plans[id_] = (time.monotonic(), self.seconds, self.ends.pop(0) if self.ends else "completed")
        self.jobs[id_] = {"id": id_, **body, "output_model": f"team/model-{id_}@v1", "status": "created"}
        return self.jobs[id_]

    async def _list_jobs(self, request: web.Request) -> dict[str, Any]:
        number, size = int(request.query["page"]), int(request.query["page_size"])
        newest_first = list(self.jobs.values())[::-1]
        pages = max(1, -(-len(newest_first) // size))
        data = newest_first[(number - 1) * size : number * size]
        return {"object": "list", "data": data, "pagination": {"page": number, "total_pages": pages}}

    async def _get_job(self, request: web.Request) -> dict[str, Any]:
        return self._find(request)

    async def _get_status(self, request: web.Request) -> dict[str, Any]:
        job = self._find(request)
        began, seconds, end = self._plans[job["id"]]
        if job["status"] != "cancelled":
            job["status"] = end if time.monotonic() - began >= seconds else "running"
        return (
            {"status": job["status"], "percentage_done": 100.0}
            if job["status"] == "completed"
            else {"status": job["status"]}
        )

    async def _cancel(self, request: web.Request) -> dict[str, Any]:
        job = self._find(request)
        job["status"] = "cancelled"
        return job

    def _find(self, request: web.Request) -> dict[str, Any]:
        if request.match_info["id"] not in self.jobs:
            raise ApiError(404, "no such job")
        return self.jobs[request.match_info["id"]]
