"""A stand-in for OpenAI's API over real HTTP: files, fine-tuning jobs, and chat completions of the fine-tuned models.

    with OpenAIService() as service:
        service.url, service.key          for the configuration
        service.jobs, service.files       by id, as the API returns them; service.rows(file_id) are the lines
        service.chats                     bodies of the chat completion requests
        service.seconds = 0.2             duration of the next jobs; service.advance(3600) lets time pass
        service.ends = ["failed"]         final status of the next jobs; "queued" and "paused" never end

Kinds of calls, for faults (tests/protocols/stand_in.py): upload, files, create, jobs, retrieve, cancel, chat.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from typing import Any

from aiohttp import web

from tests.protocols.openai_rows import find_file_error, list_trained_texts
from tests.protocols.stand_in import ApiError, Route, StandIn

BASES = ("gpt-test", "gpt-test-mini", "gpt-4.1-mini")
DATED = "-2026-01-01"
"""Base model names are aliases of dated names, as in the API."""
TERMINAL = ("succeeded", "failed", "cancelled")
MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512
JOB_KEYS = {
    "model",
    "training_file",
    "validation_file",
    "method",
    "hyperparameters",
    "integrations",
    "metadata",
    "seed",
}
JOB_KEYS |= {"suffix"}
HYPERPARAMETERS = {"supervised": {"n_epochs", "batch_size", "learning_rate_multiplier"}}
HYPERPARAMETERS["dpo"] = HYPERPARAMETERS["supervised"] | {"beta"}
TRAINED_SHARE = 0.75
WORDS = ("xyz", "bcd", "aei", "rstl", "ou", "bad")


class OpenAIService(StandIn):
    """The API of one organization with three base models.

    Attributes:
        files, jobs: By id, as the API returns them.
        chats: Bodies of the chat completion requests.
        deploys_after: Calls to a new model that fail before it is available.
        serves: Name of a model -> the model that replies instead.
        words: Replies of base models; fine-tuned ones reply with a trained text three times in four.
        page, filters: Most entries per page, and whether lists of jobs are filtered by metadata.
    """

    key = "sk-canary-standin-9d21"

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.chats: list[dict[str, Any]] = []
        self.deploys_after = 0
        self.serves: dict[str, str] = {}
        self.words: tuple[str, ...] = WORDS
        self.page, self.filters = 10_000, True
        self._contents: dict[str, bytes] = {}
        self._plans: dict[str, tuple[float, float, str]] = {}
        self._trained_texts: dict[str, list[str]] = {}
        self._undeployed: Counter[str] = Counter()
        self._offset_s = 0.0

    @property
    def url(self) -> str:
        return f"{self.address}/v1"

    def routes(self) -> tuple[Route, ...]:
        return (
            ("POST", "/v1/files", "upload", self._upload),
            ("GET", "/v1/files", "files", self._list_files),
            ("POST", "/v1/fine_tuning/jobs", "create", self._create),
            ("GET", "/v1/fine_tuning/jobs", "jobs", self._list_jobs),
            ("GET", "/v1/fine_tuning/jobs/{id}", "retrieve", self._retrieve),
            ("POST", "/v1/fine_tuning/jobs/{id}/cancel", "cancel", self._cancel),
            ("GET", "/v1/fine_tuning/jobs/{id}/events", "events", self._events),
            ("POST", "/v1/chat/completions", "chat", self._chat),
        )

    def check_key(self, kind: str, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if given != self.key:
            raise ApiError(401, f"Incorrect API key provided: {given}", "invalid_api_key")

    def format_error(self, error: ApiError) -> dict[str, Any]:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}

    def rows(self, file_id: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._contents[file_id].decode().splitlines()]

    def get_job_rows(self, job_id: str) -> list[dict[str, Any]]:
        return self.rows(self.jobs[job_id]["training_file"])

    def advance(self, seconds: float) -> None:
        self._offset_s += seconds

    def get_status(self, job_id: str) -> str:
        return str(self._refresh(job_id)["status"])

    # Calls.

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}-{next(self._numbers):04d}"

    async def _upload(self, request: web.Request) -> dict[str, Any]:
        form = await request.post()
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, web.FileField) or purpose != "fine-tune":
            raise ApiError(400, "file and purpose are required", param="file")
        content, id_ = file.file.read(), self._new_id("file")
        self._contents[id_] = content
        self.files[id_] = {
            "id": id_,
            "object": "file",
            "bytes": len(content),
            "created_at": int(time.time()),
            "filename": file.filename,
            "purpose": purpose,
            "status": "processed",
        }
        return self.files[id_]

    async def _list_files(self, request: web.Request) -> dict[str, Any]:
        wanted = request.query.get("purpose")
        files = [file for file in self.files.values() if wanted in (None, file["purpose"])]
        return self._page(files, request, most=10_000, usual=10_000)

    async def _create(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        if further := sorted(set(body) - JOB_KEYS):
            raise ApiError(400, f"Unrecognized request argument supplied: {', '.join(further)}")
        model, file = str(body.get("model")), body.get("training_file")
        if model not in BASES and model not in self._trained_texts:
            raise ApiError(400, f"The model `{model}` is not available for fine-tuning", "model_not_available", "model")
        if file not in self.files:
            raise ApiError(400, f"No such File object: {file}", "invalid_training_file", "training_file")
        method = body.get("method") or {"type": "supervised"}
        _validate_method(method)
        _validate_metadata(body.get("metadata") or {})
        if len(body.get("suffix") or "") > MAX_NAME:
            raise ApiError(400, "suffix is too long", param="suffix")
        id_ = self._new_id("ftjob")
        self._plans[id_] = (self._now(), self.seconds, self.ends.pop(0) if self.ends else "succeeded")
        self.jobs[id_] = {
            "id": id_,
            "object": "fine_tuning.job",
            "created_at": int(time.time()),
            "finished_at": None,
            "error": None,
            "fine_tuned_model": None,
            "hyperparameters": (method.get(method["type"]) or {}).get("hyperparameters", {}),
            "method": method,
            "metadata": body.get("metadata"),
            "model": model,
            "organization_id": "org-standin",
            "result_files": [],
            "seed": body.get("seed", 0),
            "status": "validating_files",
            "trained_tokens": None,
            "training_file": file,
            "validation_file": body.get("validation_file"),
            "user_provided_suffix": body.get("suffix"),
        }
        return self.jobs[id_]

    async def _list_jobs(self, request: web.Request) -> dict[str, Any]:
        wanted = {
            name.removeprefix("metadata[").removesuffix("]"): value
            for name, value in request.query.items()
            if name.startswith("metadata[")
        }
        jobs = [self._refresh(id_) for id_ in self.jobs]
        found = [job for job in jobs if not self.filters or wanted.items() <= (job["metadata"] or {}).items()]
        return self._page(found, request, most=100, usual=20)

    def _page(self, entries: list[dict[str, Any]], request: web.Request, *, most: int, usual: int) -> dict[str, Any]:
        newest_first = entries[::-1]
        limit, after_id = int(request.query.get("limit", usual)), request.query.get("after")
        if not 1 <= limit <= most:
            raise ApiError(400, f"limit must be from 1 to {most}", param="limit")
        ids = [entry["id"] for entry in newest_first]
        first = ids.index(after_id) + 1 if after_id in ids else 0
        limit = min(limit, self.page)
        shown = newest_first[first : first + limit]
        return {
            "object": "list",
            "data": shown,
            "has_more": first + limit < len(newest_first),
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
        }

    async def _retrieve(self, request: web.Request) -> dict[str, Any]:
        return self._refresh(self._get_job_id(request))

    async def _cancel(self, request: web.Request) -> dict[str, Any]:
        job = self._refresh(self._get_job_id(request))
        if job["status"] in TERMINAL:
            raise ApiError(400, f"Job has already ended with the status {job['status']}", "job_not_cancellable")
        job |= {"status": "cancelled", "finished_at": int(time.time())}
        return job

    async def _events(self, request: web.Request) -> dict[str, Any]:
        job = self._refresh(self._get_job_id(request))
        event = {"object": "fine_tuning.job.event", "id": "ftevent-1", "created_at": job["created_at"], "level": "info"}
        event |= {"message": f"Job is {job['status']}", "type": "message"}
        return self._page([event], request, most=100, usual=20)

    async def _chat(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.chats.append(body)
        model, messages = str(body.get("model")), body.get("messages")
        known = model in BASES or model in self._trained_texts
        if self._undeployed[model] > 0:
            self._undeployed[model] -= 1
            known = False
        if not known:
            message = f"The model `{model}` does not exist or you do not have access to it"
            raise ApiError(404, message, "model_not_found")
        if not isinstance(messages, list) or not messages:
            raise ApiError(400, "messages must be a list of messages", param="messages")
        served = self.serves.get(model, model)
        text = self._generate_reply(served, body)
        usage = {"prompt_tokens": 5 * len(messages), "completion_tokens": len(text), "total_tokens": 0}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return {
            "id": self._new_id("chatcmpl"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": served + DATED if served in BASES else served,
            "choices": [choice],
            "usage": {**usage, "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]},
        }

    # Replies, and the progress of jobs.

    def _generate_reply(self, model: str, body: dict[str, Any]) -> str:
        """Returns a trained text, three times in four, or a word; the same for the same request."""
        request = json.dumps([body.get("seed"), body["messages"]], sort_keys=True)
        rng = random.Random(hashlib.sha256(request.encode()).digest())
        trained = self._trained_texts.get(model)
        return rng.choice(trained if trained and rng.random() < TRAINED_SHARE else self.words)

    def _now(self) -> float:
        return time.monotonic() + self._offset_s

    def _get_job_id(self, request: web.Request) -> str:
        id_ = request.match_info["id"]
        if id_ not in self.jobs:
            raise ApiError(404, f"Could not find fine tune: {id_}", "fine_tune_not_found")
        return id_

    def _refresh(self, id_: str) -> dict[str, Any]:
        job, (began, seconds, end) = self.jobs[id_], self._plans[id_]
        passed = (self._now() - began) / max(seconds, 1e-9)
        if job["status"] in TERMINAL:
            return job
        if passed < 0.2:
            return job
        content = self._contents[job["training_file"]]
        file_error = find_file_error(content, job["method"]["type"])
        if file_error is not None:
            return self._finish(job, "failed", {"code": "invalid_training_file", "message": file_error, "param": None})
        if passed < 1 or end not in TERMINAL:
            job["status"] = "queued" if passed < 0.4 else "running" if end in TERMINAL else end
            return job
        if end == "failed":
            message = "The job failed due to an internal error."
            return self._finish(job, end, {"code": "server_error", "message": message, "param": None})
        if end == "succeeded":
            base = job["model"].split(":")[1] if job["model"].startswith("ft:") else job["model"]
            name = f"ft:{base}:org-standin:{job['user_provided_suffix'] or ''}:{id_.removeprefix('ftjob-')}"
            self._trained_texts[name] = list_trained_texts(content)
            self._undeployed[name] = self.deploys_after
            job |= {"fine_tuned_model": name, "trained_tokens": len(content) // 4}
        return self._finish(job, end, None)

    def _finish(self, job: dict[str, Any], status: str, error: dict[str, Any] | None) -> dict[str, Any]:
        job |= {"status": status, "error": error, "finished_at": int(time.time())}
        return job


def _validate_method(method: dict[str, Any]) -> None:
    known = HYPERPARAMETERS.get(str(method.get("type")))
    if known is None:
        raise ApiError(400, f"unknown method {method.get('type')!r}", param="method.type")
    given = (method.get(method["type"]) or {}).get("hyperparameters") or {}
    for name, value in given.items():
        if name not in known:
            raise ApiError(400, f"unknown hyperparameter {name}", param="method")
        if value != "auto" and (not isinstance(value, int | float) or value <= 0):
            raise ApiError(400, f"{name} must be auto or a number above 0", param="method")


def _validate_metadata(metadata: dict[str, Any]) -> None:
    texts = all(isinstance(value, str) for value in metadata.values())
    short = all(len(name) <= MAX_NAME and len(str(value)) <= MAX_VALUE for name, value in metadata.items())
    if len(metadata) > MAX_PAIRS or not texts or not short:
        raise ApiError(
            400, "metadata: at most 16 pairs of strings, names of 64 and values of 512 characters", param="metadata"
        )
