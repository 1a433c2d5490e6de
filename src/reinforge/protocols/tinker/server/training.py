"""Training over Tinker's protocol: gradients, optimizer steps, and checkpoints of one model after the other.

forward_backward(data), forward_backward(data), optim_step   gradients of all data since the last step, one step
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from reinforge.errors import EngineError, did_you_mean
from reinforge.protocols.tinker.server import requests
from reinforge.protocols.tinker.server.checkpoints import CheckpointNote, CheckpointStore, TinkerPath, make_note
from reinforge.protocols.tinker.server.futures import Job, TinkerFutures, TinkerResult, build_json, build_proto
from reinforge.protocols.tinker.server.losses import build_batch, find_loss
from reinforge.protocols.tinker.server.sessions import TinkerModel, TinkerSampler, TinkerSession, TinkerSessions
from reinforge.protocols.tinker.server.slots import AdapterSlots, Snapshot
from reinforge.protocols.tinker.server.wire import CONTENT_TYPE, parse_request, read_config, read_data, write_output
from reinforge.serving.routes import ApiError, read_bytes, write_json
from reinforge.types.sample import AdamSettings

SILENCE_S = 60.0
"""Seconds of silence after which a session ends if another one needs its slot; a living client sends a heartbeat every
10 s."""
QUIET_S = 15.0  # seconds of silence after which a client may have ended
POLL_S = 1.0  # how often a free slot is looked for


@dataclass(frozen=True, slots=True)
class TinkerBase:
    """The model that adapters are trained on."""

    names: tuple[str, ...]  # all names by which clients may ask for it; the first is its own
    arch: str
    tokenizer: str
    vocab_size: int
    max_model_len: int
    max_rank: int

    def check(self, name: str) -> None:
        if name.rstrip("/") not in self.names:
            listed = ", ".join(self.names)
            raise ValueError(f"this server has no base_model {name[:200]!r}{did_you_mean(name, self.names)}: {listed}")


@dataclass(eq=False)
class TinkerParts:
    """What training and sampling work with."""

    base: TinkerBase
    _slots: AdapterSlots
    _sessions: TinkerSessions
    _futures: TinkerFutures
    _checkpoints: CheckpointStore


class TinkerTraining(TinkerParts):
    async def create_model(self, http: web.Request) -> web.Response:
        request = await requests.read(requests.CreateModel, http)
        session = self._sessions.find(request.session_id)
        model_id = f"{session.id}:train:{request.model_seq_id}"

        async def create() -> TinkerResult:
            self.base.check(request.base_model)
            lora = request.lora_config
            if lora is None:
                raise ValueError("lora_config is missing: this server trains LoRA adapters only")
            if not (lora.train_attn and lora.train_mlp):
                raise ValueError("train_attn and train_mlp must be true: this server trains attention and MLP together")
            _check_optimizer(request.optimizer_config)
            seed = secrets.randbits(31) if lora.seed is None else lora.seed % 2**63
            metadata = {key: str(value) for key, value in (request.user_metadata or {}).items()}
            note = CheckpointNote(model_id, request.base_model, lora.rank, time.time(), run_metadata=metadata)
            await self._add_model(session, note, seed)
            return build_json({"model_id": model_id, "type": "create_model"})

        return self._submit_alone(model_id, create)

    async def _add_model(self, session: TinkerSession, note: CheckpointNote, seed: int = 0) -> TinkerModel:
        if note.rank > self.base.max_rank:
            raise ValueError(
                f"the rank {note.rank} is above {self.base.max_rank}: use a smaller rank, or start the server with a "
                "larger --max_rank"
            )
        await self._wait_for_slot()
        slot = await self._slots.take(note.rank, seed)
        if session.id not in self._sessions.ids:
            self._slots.release(slot)
            raise EngineError(f"the session of {note.run_id} has ended")
        model = TinkerModel(note.run_id, slot, note, self._futures)
        session.models[note.run_id] = model
        return model

    async def _wait_for_slot(self) -> None:
        """Waits while all slots are taken and one may belong to a program that has died without closing it."""
        deadline = self._sessions.now() + SILENCE_S + POLL_S
        while not self._slots.has_free and self._sessions.now() < deadline:
            await self._sessions.sweep(SILENCE_S)
            if not self._slots.has_free:
                if not self._sessions.has_silent(QUIET_S):
                    return
                await asyncio.sleep(POLL_S)

    def _submit_alone(self, model_id: str, job: Job) -> web.Response:
        request_id = f"{model_id}:0"
        self._futures.start(request_id, job)
        return write_json({"request_id": request_id, "model_id": model_id})

    def _submit(self, http: web.Request, model_id: str, seq_id: int | None, job: Job) -> web.Response:
        model = self._sessions.find_model(model_id)
        if not seq_id:
            raise ApiError(400, "seq_id is missing: it orders the requests of a model, from 1", param="seq_id")
        request_id = f"{model_id}:{seq_id}"
        if not self._futures.has(request_id):
            num_bytes = http.content.total_bytes
            model.check_turn(seq_id, num_bytes)
            future, _ = self._futures.submit(request_id)
            model.enqueue(seq_id, future, job, num_bytes)
        return write_json({"request_id": request_id, "model_id": model_id})

    async def get_info(self, http: web.Request) -> web.Response:
        model = self._sessions.find_model((await requests.read(requests.OfModel, http)).model_id)
        asked = model.note.base_model
        data = {"arch": self.base.arch, "model_name": asked, "tokenizer_id": self.base.tokenizer}
        info = {"type": "get_info", "model_data": data, "model_id": model.id, "model_name": asked}
        return write_json({**info, "is_lora": True, "lora_rank": model.note.rank})

    async def forward_backward(self, request: web.Request) -> web.Response:
        if request.content_type != CONTENT_TYPE:
            raise ApiError(415, f"forward_backward takes {CONTENT_TYPE}, as the SDK 0.38 sends it")
        message = parse_request(await read_bytes(request, trains=True))
        model_id = message.model_id

        async def compute() -> TinkerResult:
            model = self._sessions.find_model(model_id)
            try:
                return await self._compute_gradient(model, message)
            except BaseException:
                if not message.forward_only and model.failed_seq is None:
                    model.failed_seq = message.seq_id
                raise

        return self._submit(request, model_id, message.seq_id, compute)

    async def _compute_gradient(self, model: TinkerModel, message: Any) -> TinkerResult:
        loss, spec = find_loss(message.loss_fn, read_config(message))
        size = self.base.vocab_size, self.base.max_model_len
        batch = await asyncio.to_thread(lambda: build_batch(read_data(message), loss, *size))
        backward = not message.forward_only
        report, rows = await self._slots.accumulate(model.slot, batch.samples, batch.contexts, spec, backward=backward)
        logprobs = batch.read_logprobs(report.logprobs, rows)
        return build_proto(write_output(logprobs, {"loss:sum": report.loss}))

    async def optim_step(self, http: web.Request) -> web.Response:
        request = await requests.read(requests.OptimStep, http)

        async def step() -> TinkerResult:
            model = self._sessions.find_model(request.model_id)
            failed, model.failed_seq = model.failed_seq, None
            if failed is not None:
                await self._slots.clear_gradients(model.slot)
                raise ValueError(
                    f"no step is made: the request {model.id}:{failed} before it failed, so a part of the gradient is "
                    "missing; the gradients are cleared"
                )
            if request.adam_params is None:
                family = "none" if request.optimizer_params is None else request.optimizer_params.type
                raise ValueError(f"optimizer parameters of the family {family}; this server has AdamParams only")
            adam = request.adam_params
            metrics = await self._slots.step(
                model.slot,
                AdamSettings(
                    adam.learning_rate,
                    (adam.beta1, adam.beta2),
                    adam.eps,
                    adam.weight_decay,
                    adam.grad_clip_norm if adam.grad_clip_norm > 0 else None,
                ),
            )
            return build_json({"metrics": {"unclipped_grad_l2:mean": metrics["grad_norm"]}, "type": "optim_step"})

        return self._submit(http, request.model_id, request.seq_id, step)

    async def save_weights(self, http: web.Request) -> web.Response:
        request = await requests.read(requests.SaveWeights, http)

        async def save() -> TinkerResult:
            model = self._sessions.find_model(request.model_id)
            path = self._checkpoints.choose_path(model.id, "weights", request.path or f"{request.seq_id:09}")
            if self._checkpoints.find_folder(path).exists() and not request.overwrite:
                raise ValueError(f"there is a checkpoint {path} already; choose another name, or set overwrite")
            await self._save(model, path, request)
            return build_json({"path": str(path), "type": "save_weights"})

        return self._submit(http, request.model_id, request.seq_id, save)

    async def _save(
        self, model: TinkerModel, path: TinkerPath, request: requests.SaveWeights | requests.SaveForSampler
    ) -> None:
        note = make_note(model.note, ttl_seconds=request.ttl_seconds, user_metadata=request.user_metadata)
        folder = self._checkpoints.find_folder(path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        await self._slots.save(model.slot, folder, note.write, with_training=path.kind == "weights")

    async def save_for_sampler(self, http: web.Request) -> web.Response:
        request = await requests.read(requests.SaveForSampler, http)

        async def save() -> TinkerResult:
            model = self._sessions.find_model(request.model_id)
            if request.path is not None:
                path = self._checkpoints.choose_path(model.id, "sampler_weights", request.path)
                await self._save(model, path, request)
                return build_json({"path": str(path), "type": "save_weights_for_sampler"})
            if request.sampling_session_seq_id is None:
                raise ValueError("either path or sampling_session_seq_id is needed")
            sampler_id = await self._add_sampler(model, request.sampling_session_seq_id, request.kind)
            return build_json({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

        return self._submit(http, request.model_id, request.seq_id, save)

    async def _add_sampler(self, model: TinkerModel, number: int, kind: str) -> str:
        session = self._sessions.find(model.id.partition(":")[0])
        sampler_id = f"{session.id}:sample:{number}"
        weights = await self._slots.read(model.slot)
        sampler = TinkerSampler(sampler_id, model.note.base_model)
        if kind == "inflight":
            if model.inflight is None:
                model.inflight = Snapshot(model.id, lambda: weights)
            else:
                model.inflight.load = lambda: weights
                await self._slots.refresh(model.inflight)
            sampler.snapshot = model.inflight
        else:
            sampler.snapshot = Snapshot(sampler_id, lambda: weights)
            model.samplers.append(sampler)
        session.samplers[sampler_id] = sampler
        await self._sessions.keep_newest(model)
        return sampler_id

    async def save_external(self, http: web.Request) -> web.Response:
        request = await requests.read(requests.SaveExternal, http)

        async def refuse() -> TinkerResult:
            raise ValueError(
                "save_weights_external is not offered: the checkpoints of save_weights are adapters in PEFT's layout "
                "already, below `tinker` in the server's --data_dir"
            )

        return self._submit(http, request.model_id, request.seq_id, refuse)

    async def load_weights(self, http: web.Request) -> web.Response:
        request = await requests.read(requests.LoadWeights, http)
        if request.session_id is None:
            if request.model_id is None:
                raise ApiError(400, "either session_id or model_id is needed", param="session_id")
            return self._submit(http, request.model_id, request.seq_id, partial(self._load, request))
        session = self._sessions.find(request.session_id)
        model_id = f"{session.id}:train:{request.model_seq_id or 0}"

        async def create() -> TinkerResult:
            note = await self._read_note(request)
            _check_optimizer(request.optimizer_config)
            metadata = {key: str(value) for key, value in (request.user_metadata or {}).items()}
            base = request.base_model or note.base_model
            own = CheckpointNote(model_id, base, note.rank, time.time(), run_metadata=metadata or note.run_metadata)
            model = await self._add_model(session, own)
            try:
                return await self._load_into(model, request, note)
            except BaseException:
                if session.id in self._sessions.ids:  # if not, its end has closed the model
                    del session.models[model_id]
                    await model.close()
                    self._slots.release(model.slot)
                raise

        return self._submit_alone(model_id, create)

    async def _load(self, request: requests.LoadWeights) -> TinkerResult:
        assert request.model_id is not None
        model, note = self._sessions.find_model(request.model_id), await self._read_note(request)
        if note.rank != model.note.rank:
            raise ValueError(f"{request.path} has the rank {note.rank}, but the model has {model.note.rank}")
        return await self._load_into(model, request, note)

    async def _read_note(self, request: requests.LoadWeights) -> CheckpointNote:
        path = TinkerPath.parse(request.path)
        if request.optimizer and path.kind != "weights":
            raise ValueError(f"{request.path} has no optimizer state; save_weights writes it, and has other paths")
        note = await self._slots.run(lambda: self._checkpoints.read(path))
        self.base.check(request.base_model or note.base_model)
        return note

    async def _load_into(self, model: TinkerModel, request: requests.LoadWeights, note: CheckpointNote) -> TinkerResult:
        folder = self._checkpoints.find_folder(TinkerPath.parse(request.path))
        await self._slots.load(model.slot, folder, note.rank, with_training=request.optimizer)
        return build_json({"path": request.path, "model_id": model.id, "type": "load_weights"})


def _check_optimizer(family: requests.OptimizerFamily | None) -> None:
    if family is not None and family.type != "adamw":
        raise ValueError(f"the optimizer {family.type!r} is not supported; use adamw")
