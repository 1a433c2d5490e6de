"""A stand-in for OpenPipe ART over real HTTP: the server of `art run` (protocol 1), the training service (protocol 2).

    with ARTService() as art:
        art.ip, art.port, art.base_url, art.key    for the configuration
        art.jobs                                    what was trained, in order: `groups`, `config`, `step`
        art.chats                                   bodies of the chat completion requests
        art.seconds = 0.2                           duration of the next jobs
        art.ends = ["failed"]                       how the next jobs end; later ones succeed

Kinds of calls, for faults (tests/protocols/stand_in.py): register, prepare, step, delete, train (protocol 1); models,
create, events, checkpoints, delete (protocol 2); names, chat (both). Every body is checked against the shape that the
published clients send.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.protocols.stand_in import ApiError, Route, StandIn

MODEL_FIELDS = {
    "name", "project", "entity", "id", "run_id", "config", "trainable", "inference_api_key", "inference_base_url",
    "inference_model_name", "base_path", "report_metrics", "base_model", "_internal_config",
}  # fmt: skip
TRAIN_CONFIG = {"learning_rate", "kl_penalty_coef"}
DEV_CONFIG = {
    "advantage_balance", "allow_training_without_logprobs", "epsilon", "epsilon_high", "importance_sampling_level",
    "kimi_k2_tau", "mask_prob_ratio", "max_negative_advantage_importance_sampling_weight", "ppo",
    "precalculate_logprobs", "scale_learning_rate_by_reward_std_dev", "scale_rewards", "truncated_importance_sampling",
    "num_trajectories_learning_rate_multiplier_power", "logprob_calculation_chunk_size", "kl_ref_adapter_path",
}  # fmt: skip
EXPERIMENTAL = (TRAIN_CONFIG | DEV_CONFIG) | {
    "loss_fn", "normalize_advantages", "kl_penalty_source", "kl_penalty_reference_step", "kl_penalty_step_lag",
    "packed_sequence_length",
}  # fmt: skip
HISTORY_FIELDS = {"messages_and_choices", "tools"}
TRAJECTORY_FIELDS = HISTORY_FIELDS | {
    "additional_histories", "reward", "initial_policy_version", "final_policy_version", "metrics", "metadata", "logs",
}  # fmt: skip
GROUP_FIELDS = {"trajectories", "exceptions", "metadata", "metrics", "logs"}
TRAINED_SHARE = 0.75
WORDS = ("xyz", "bcd", "aei", "rstl", "ou", "bad")


@dataclass
class ARTJob:
    """One training job.

    Attributes:
        groups: The trajectory groups as they were sent.
        config: The settings as they were sent; protocol 1: `config` and `dev_config`.
        seconds: How long it takes.
        end: `succeeded`, `failed` or `hangs`.
        step: The step that it made; None: it has not ended.
    """

    id: str
    groups: list[dict[str, Any]]
    config: dict[str, Any]
    seconds: float
    end: str
    step: int | None = None
    num_updates: int = 2
    is_over: bool = False


@dataclass
class ARTModel:
    id: str
    name: str
    project: str
    entity: str
    base_model: str
    step: int = 0
    learnt: dict[int, list[str]] = field(default_factory=lambda: {0: []})


class ARTService(StandIn):
    """A server of protocol 1 and a service of protocol 2, on one port.

    Attributes:
        jobs: Every job that was started.
        models: By name.
        chats: Bodies of the chat completion requests.
        names_steps: Protocol 1: serve `name@step`, one name for each checkpoint; False: only `name`, the newest.
        goes_on: Protocol 1: training goes on where the client has left; False: it stops with the request.
        gives_logprobs: Chat completions carry log-probs if they were asked for.
    """

    key = "wandb-canary-standin-51c7"
    inference_key = "inference-canary-77"

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[ARTJob] = []
        self.models: dict[str, ARTModel] = {}
        self.chats: list[dict[str, Any]] = []
        self.names_steps, self.goes_on, self.gives_logprobs = True, True, True
        self.registered: list[dict[str, Any]] = []
        self.kept: list[list[int]] = []
        self.deleted: list[list[int]] = []
        self.words: tuple[str, ...] = WORDS
        self.tool_call: dict[str, Any] | None = None
        self._training: set[asyncio.Task[None]] = set()

    @property
    def ip(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def routes(self) -> tuple[Route, ...]:
        return (
            ("POST", "/register", "register", self._register),
            ("POST", "/_prepare_backend_for_training", "prepare", self._prepare),
            ("POST", "/_get_step", "step", self._get_step),
            ("POST", "/_delete_checkpoint_files", "delete", self._keep_steps),
            ("POST", "/_train_model", "train", self._train),
            ("GET", "/healthcheck", "health", self._healthcheck),
            ("POST", "/v1/preview/models", "models", self._create_model),
            ("POST", "/v1/preview/training-jobs", "create", self._create_job),
            ("GET", "/v1/preview/training-jobs/{id}/events", "events", self._list_events),
            ("GET", "/v1/preview/models/{id}/checkpoints", "checkpoints", self._list_checkpoints),
            ("DELETE", "/v1/preview/models/{id}/checkpoints", "delete", self._delete_checkpoints),
            ("GET", "/v1/models", "names", self._list_names),
            ("POST", "/v1/chat/completions", "chat", self._chat),
        )

    def check_key(self, kind: str, request: web.Request) -> None:
        """Protocol 1 has no key, protocol 2 the service's; either key samples."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not request.path.startswith("/v1/"):
            if given:
                raise ApiError(400, "this port takes no key")
        elif given != self.key and not (kind in ("names", "chat") and given == self.inference_key):
            raise ApiError(401, f"invalid key {given}", "invalid_api_key")

    async def _stop(self) -> None:
        for task in self._training:
            task.cancel()
        await super()._stop()

    # Protocol 1.

    async def _register(self, request: web.Request) -> None:
        body = await request.json()
        _require(body, MODEL_FIELDS, "model")
        self.registered.append(body)
        self._add_model(body["name"], body["project"], str(body["entity"]), body["base_model"])

    async def _prepare(self, request: web.Request) -> list[str]:
        body = await request.json()
        _require(body, {"model", "config"}, "body")
        self._find_model(body["model"]["name"])
        return [f"http://0.0.0.0:{self.port}/v1", self.inference_key]

    async def _get_step(self, request: web.Request) -> int:
        body = await request.json()
        _require(body, MODEL_FIELDS, "model")
        return self._find_model(body["name"]).step

    async def _keep_steps(self, request: web.Request) -> None:
        body = await request.json()
        _require(body, {"model", "steps_to_keep"}, "body")
        self.kept.append(body["steps_to_keep"])
        model = self._find_model(body["model"]["name"])
        model.learnt = {step: texts for step, texts in model.learnt.items() if step in body["steps_to_keep"]}

    async def _healthcheck(self, request: web.Request) -> dict[str, str]:
        return {"status": "ok"}

    async def _train(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        _require(body, {"model", "trajectory_groups", "config", "dev_config", "verbose"}, "body")
        _forbid(body["config"], TRAIN_CONFIG, "config")
        _forbid(body["dev_config"], DEV_CONFIG, "dev_config")
        model = self._find_model(body["model"]["name"])
        job = self._start_job(body["trajectory_groups"], {**body["config"], **body["dev_config"]})
        task = asyncio.get_running_loop().create_task(self._finish_later(model, job))
        self._training.add(task)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            await response.prepare(request)
            await asyncio.shield(task)
            if job.end == "failed":
                request.transport.abort()  # a server whose training raises drops the stream
                return response
            for number in range(job.num_updates):
                await response.write(json.dumps({"loss": 0.5 - 0.1 * number, "grad_norm": 1.0}).encode() + b"\n")
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            if not self.goes_on:
                task.cancel()
            raise
        return response

    async def _finish_later(self, model: ARTModel, job: ARTJob) -> None:
        await asyncio.sleep(job.seconds if job.end != "hangs" else 3600)
        self._finish(model, job)

    # Protocol 2.

    async def _create_model(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        _require(body, {"entity", "project", "name", "base_model", "return_existing"}, "body")
        if body["return_existing"] is not True and body["name"] in self.models:
            raise ApiError(409, "the model exists")
        model = self._add_model(body["name"], body["project"], body["entity"] or "own-team", body["base_model"])
        return {
            "id": model.id, "entity": model.entity, "project": model.project, "name": model.name,
            "base_model": model.base_model, "run_id": "w1",
        }  # fmt: skip

    async def _create_job(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        _require(body, {"model_id", "trajectory_groups", "experimental_config"}, "body")
        _forbid(body["experimental_config"], EXPERIMENTAL, "experimental_config")
        model = next((each for each in self.models.values() if each.id == body["model_id"]), None)
        if model is None:
            raise ApiError(404, f"no model {body['model_id']}")
        job = self._start_job(body["trajectory_groups"], body["experimental_config"])
        task = asyncio.get_running_loop().create_task(self._finish_later(model, job))
        self._training.add(task)
        return {"id": job.id}

    async def _list_events(self, request: web.Request) -> dict[str, Any]:
        job = next((each for each in self.jobs if each.id == request.match_info["id"]), None)
        if job is None:
            raise ApiError(404, "no such training job")
        events = [("training_started", {"num_sequences": len(job.groups)})]
        if job.is_over and job.end == "succeeded":
            events += [("gradient_step", {"loss": 0.5 - 0.1 * n, "grad_norm": 1.0}) for n in range(job.num_updates)]
            events.append(("training_ended", {}))
        elif job.is_over:
            events.append(("training_failed", {"error_message": "CUDA out of memory"}))
        listed = [{"id": f"{job.id}-e{n}", "type": kind, "data": data} for n, (kind, data) in enumerate(events)]
        ids = [each["id"] for each in listed]
        after_id = request.query.get("after", "")
        first = ids.index(after_id) + 1 if after_id in ids else 0
        page = listed[first : first + 2]
        return {"object": "list", "data": page, "has_more": first + 2 < len(listed)}

    async def _list_checkpoints(self, request: web.Request) -> dict[str, Any]:
        model = self._get_model(request)
        steps = sorted(model.learnt, reverse=request.query.get("order") == "desc")
        steps = steps[: int(request.query.get("limit", 20))]
        data = [{"id": f"{model.id}-c{step}", "step": step, "metrics": {}} for step in steps]
        return {"object": "list", "data": data, "has_more": False}

    async def _delete_checkpoints(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        _require(body, {"steps"}, "body")
        self.deleted.append(body["steps"])
        model = self._get_model(request)
        model.learnt = {step: texts for step, texts in model.learnt.items() if step not in body["steps"]}
        return {"deleted_count": len(body["steps"]), "not_found_steps": []}

    # Serving.

    async def _list_names(self, request: web.Request) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in self._serves()]}

    def _serves(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        for model in self.models.values():
            artifact = f"wandb-artifact:///{model.entity}/{model.project}/{model.name}"
            newest = model.learnt[model.step]
            names |= {f"{artifact}:step{step}": texts for step, texts in model.learnt.items()}
            names[artifact] = newest
            if self.names_steps:
                names |= {f"{model.name}@{step}": texts for step, texts in model.learnt.items()}
            else:
                names[model.name] = newest
        return names

    async def _chat(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.chats.append(body)
        name, messages = str(body.get("model")), body.get("messages")
        served = self._serves()
        if name not in served:
            raise ApiError(404, f"The model `{name}` does not exist")
        rng = random.Random(hashlib.sha256(json.dumps([body.get("seed"), messages], sort_keys=True).encode()).digest())
        trained = served[name]
        text = rng.choice(trained if trained and rng.random() < TRAINED_SHARE else self.words)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.tool_call is not None and body.get("tools") and messages[-1]["role"] == "user":
            message["tool_calls"] = [self.tool_call]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        if body.get("logprobs") and self.gives_logprobs:
            content = [
                {"token": f"token_id:{ord(letter)}", "logprob": -0.5, "bytes": [ord(letter)], "top_logprobs": []}
                for letter in text
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        answer = {
            "id": f"chatcmpl-{next(self._numbers)}", "object": "chat.completion", "created": int(time.time()),
            "model": name, "choices": [choice],
            "usage": {"prompt_tokens": 5, "completion_tokens": len(text), "total_tokens": 5 + len(text)},
        }  # fmt: skip
        if body.get("return_token_ids"):
            choice["token_ids"] = [ord(letter) for letter in text]
            answer["prompt_token_ids"] = [1, 2, 3, 4, 5]
        return answer

    # Models and jobs.

    def _add_model(self, name: str, project: str, entity: str, base_model: str) -> ARTModel:
        if name not in self.models:
            self.models[name] = ARTModel(f"model-{next(self._numbers)}", name, project, entity, base_model)
        return self.models[name]

    def _find_model(self, name: str) -> ARTModel:
        if name not in self.models:
            raise ApiError(500, f"{name} is not registered")
        return self.models[name]

    def _get_model(self, request: web.Request) -> ARTModel:
        found = [model for model in self.models.values() if model.id == request.match_info["id"]]
        if not found:
            raise ApiError(404, "no such model")
        return found[0]

    def _start_job(self, groups: list[dict[str, Any]], config: dict[str, Any]) -> ARTJob:
        allows_all = bool(config.get("allow_training_without_logprobs"))
        for group in groups:
            _check_group(group, needs_logprobs=not allows_all)
        end = self.ends.pop(0) if self.ends else "succeeded"
        job = ARTJob(f"job-{next(self._numbers)}", groups, config, self.seconds, end)
        self.jobs.append(job)
        return job

    def _finish(self, model: ARTModel, job: ARTJob) -> None:
        if job.end == "succeeded":
            model.step += 1
            job.step = model.step
            model.learnt[model.step] = _list_good_texts(job.groups) or model.learnt[max(model.learnt)]
        job.is_over = True


def _list_good_texts(groups: list[dict[str, Any]]) -> list[str]:
    """Returns the sampled texts of the trajectories above their group's mean reward."""
    texts = []
    for group in groups:
        rewards = [each["reward"] for each in group["trajectories"]]
        mean = sum(rewards) / len(rewards)
        for trajectory, reward in zip(group["trajectories"], rewards, strict=True):
            choices = [each for each in trajectory["messages_and_choices"] if "finish_reason" in each]
            texts += [each["message"]["content"] for each in choices if reward > mean]
    return texts


def _check_group(group: dict[str, Any], *, needs_logprobs: bool) -> None:
    _require(group, GROUP_FIELDS, "group")
    for trajectory in group["trajectories"]:
        _require(trajectory, TRAJECTORY_FIELDS, "trajectory")
        if not isinstance(trajectory["reward"], int | float):
            raise ApiError(422, "reward is not a number")
        for history in [trajectory, *trajectory["additional_histories"]]:
            _require({key: history.get(key) for key in HISTORY_FIELDS & set(history)}, HISTORY_FIELDS, "history")
            for each in history["messages_and_choices"]:
                _check_message(each, needs_logprobs=needs_logprobs)


def _check_message(message: dict[str, Any], *, needs_logprobs: bool) -> None:
    if "role" in message:
        return
    _require({key: message.get(key) for key in CHOICE_FIELDS & set(message)}, CHOICE_FIELDS, "choice")
    content = (message["logprobs"] or {}).get("content")
    if needs_logprobs and not content:
        raise ApiError(422, "Chat completion choices must have logprobs")


CHOICE_FIELDS = {"finish_reason", "index", "logprobs", "message"}


def _require(found: Any, fields: set[str], what: str) -> None:
    """Refuses an object that has not exactly these fields."""
    given = set(found) if isinstance(found, dict) else set()
    if given != fields:
        raise ApiError(422, f"{what}: missing {sorted(fields - given)}, unknown {sorted(given - fields)}")


def _forbid(found: dict[str, Any], known: set[str], what: str) -> None:
    if further := sorted(set(found) - known):
        raise ApiError(422, f"{what}: unknown {', '.join(further)}")
