"""Tinker's protocol as a part of the server: programs written for Tinker's service train against this machine.

    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python -m tinker_cookbook.recipes.math_rl.train ...

Made for the SDK 0.38. What a client asks for and this server does not have is refused by name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.model.model_files import ADAPTER_CONFIG
from reinforge.engine.model.preflight import check_adapters, check_policy
from reinforge.engine.packages import check_packages
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import PolicyServer
from reinforge.protocols.tinker.server import requests
from reinforge.protocols.tinker.server.checkpoints import SCHEME, CheckpointStore, TinkerPath, format_time
from reinforge.protocols.tinker.server.futures import TinkerFutures
from reinforge.protocols.tinker.server.sampling import TinkerSampling
from reinforge.protocols.tinker.server.sessions import TinkerSessions
from reinforge.protocols.tinker.server.slots import BASE, AdapterSlots, SnapshotPolicy, list_slots
from reinforge.protocols.tinker.server.training import TinkerBase, TinkerTraining
from reinforge.protocols.tinker.server.wire import require_protobuf
from reinforge.serving.loading import MODEL, TrainingHost, find_source
from reinforge.serving.models import ServedModels
from reinforge.serving.routes import LIMITS, ApiError, Feature, abortable, read_bytes, read_json, write_json

if TYPE_CHECKING:
    from reinforge.engine import Engine


logger = logging.getLogger(__name__)
API = "/api/v1"
POLL_S = 20.0  # how long a poll for a result waits; the SDK gives up after 45 s
SWEEP_S = 10.0  # how often sessions, results and checkpoints are looked through for those whose time has passed
MAX_CHUNK_BYTES = 5_000_000  # how much the SDK sends in one forward_backward
NOTICE = "LoRA on attention and MLP; the output layer stays unchanged (train_unembed has no effect)"


@dataclass(frozen=True, slots=True)
class TinkerSettings:
    """What the protocol offers."""

    policy: PolicyConfig
    name: str
    data_dir: Path
    device: str = "auto"
    seed: int = 0
    max_models: int = 4
    max_samplers: int = 4  # maximum snapshots that sample at a time; more take turns
    max_rank: int = 32
    session_timeout_s: float = 300.0  # seconds after a client's last heartbeat when its session ends


def load_engine(settings: TinkerSettings) -> Engine:
    from reinforge.engine import Engine

    lora = settings.policy.lora or LoRAConfig()
    rank = settings.max_rank
    policy = settings.policy.model_copy(update={"lora": lora.model_copy(update={"r": rank, "lora_alpha": rank})})
    adapters = list_slots(settings.max_models, settings.max_samplers)
    return Engine.load(policy, seed=settings.seed, device=settings.device, adapters=adapters)


class TinkerApi(Feature):
    def __init__(
        self,
        models: ServedModels,
        settings: TinkerSettings,
        load: Callable[[TinkerSettings], Engine] = load_engine,
        now: Callable[[], float] = time.monotonic,
    ):
        self._models, self.settings, self._load, self._now = models, settings, load, now
        self._checkpoints = CheckpointStore(settings.data_dir / "tinker")
        self.futures = TinkerFutures(now)
        self._sweeper: asyncio.Task[None] | None = None
        self._slots: AdapterSlots | None = None

    async def start(self) -> None:
        require_protobuf()
        engine = await asyncio.to_thread(self._load, self.settings)
        self._slots = slots = AdapterSlots(engine)
        self.base = _describe_base(self.settings, engine)
        self.sessions = TinkerSessions(slots, self._now, self.settings.session_timeout_s)
        shared = (self.base, slots, self.sessions, self.futures, self._checkpoints)
        self.training, self.sampling = TinkerTraining(*shared), TinkerSampling(*shared)
        if self.settings.name not in self._models:
            self._models.add(self.settings.name, engine.policies[BASE])
        self._models.add_finder(self._find_policy)
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        if self._slots is not None:
            await self.sessions.close()
            await self._slots.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except Exception:  # the next one may succeed: a checkpoint may be in use, or a disk away
                logger.exception("expired sessions, results or checkpoints could not be removed")

    async def sweep(self) -> None:
        """Drops what is over: sessions without a heartbeat, old results, checkpoints after their time to live."""
        await self.sessions.sweep()
        self.futures.sweep()
        await asyncio.to_thread(self._checkpoints.sweep)

    def _find_policy(self, name: str) -> PolicyServer | None:
        if not name.startswith(SCHEME) or self._slots is None:
            return None
        return SnapshotPolicy(self._slots, self.sampling.find_snapshot(TinkerPath.parse(name)))

    def routes(self) -> list[web.RouteDef]:
        posts = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": self._telemetry,
            "create_model": self.training.create_model,
            "get_info": self.training.get_info,
            "forward_backward": self.training.forward_backward,
            "optim_step": self.training.optim_step,
            "save_weights": self.training.save_weights,
            "save_weights_for_sampler": self.training.save_for_sampler,
            "save_weights_external": self.training.save_external,
            "load_weights": self.training.load_weights,
            "create_sampling_session": self.sampling.create_session,
            "join_sampling_session": self._join_sampling_session,
            "asample": self.sampling.sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "weights_info": self._weights_info,
            "sessions/{session}/finish": self._finish_session,
        }
        gets = {
            "healthz": self._healthz,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self.sampling.describe,
            "sessions": self._list_sessions,
            "sessions/{session}": self._get_session,
            "training_runs": self._list_runs,
            "training_runs/{run}": self._get_run,
            "training_runs/{run}/checkpoints": self._list_checkpoints,
            "checkpoints": self._list_checkpoints,
        }
        checkpoint = f"{API}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}"
        return [
            *(web.post(f"{API}/{path}", handler) for path, handler in posts.items()),
            *(web.get(f"{API}/{path}", handler) for path, handler in gets.items()),
            web.delete(checkpoint, self._delete_checkpoint),
        ]

    async def _healthz(self, request: web.Request) -> web.Response:
        return write_json({"status": "ok"})

    async def _client_config(self, request: web.Request) -> web.Response:
        limit = min(MAX_CHUNK_BYTES, request.config_dict[LIMITS].max_training_bytes // 2)
        return write_json(
            {
                "pjwt_auth_enabled": False,
                "proto_compress_fwdbwd": False,
                "fwdbwd_max_chunk_bytes_count": limit,
                "sample_join_sampling_session": True,
                "use_pyqwest_transport": False,
            }
        )

    async def _dynamic_config(self, request: web.Request) -> web.Response:
        return write_json({"sample_cancel_enabled": True})

    async def _capabilities(self, request: web.Request) -> web.Response:
        model = {"max_context_length": self.base.max_model_len, "trainable": True, "sampleable": True}
        return write_json({"supported_models": [{"model_name": name, **model} for name in self.base.names]})

    async def _create_session(self, request: web.Request) -> web.Response:
        body = await requests.read(requests.CreateSession, request)
        key = request.headers.get("x-idempotency-key")
        session = self.sessions.open(body.user_metadata, body.display_name, key)
        return write_json({"type": "create_session", "session_id": session.id, "info_message": NOTICE})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self.sessions.find((await requests.read(requests.OfSession, request)).session_id)
        return write_json({"type": "session_heartbeat"})

    async def _finish_session(self, request: web.Request) -> web.Response:
        await requests.read(requests.FinishSession, request)
        await self.sessions.end(request.match_info["session"])
        return write_json({})

    async def _telemetry(self, request: web.Request) -> web.Response:
        await read_bytes(request)  # what it says about the client is not used
        return write_json({"status": "accepted"})

    async def _list_sessions(self, request: web.Request) -> web.Response:
        return write_json({"sessions": self.sessions.ids})

    async def _get_session(self, request: web.Request) -> web.Response:
        session = self.sessions.find(request.match_info["session"])
        ids = {"training_run_ids": list(session.models), "sampler_ids": list(session.samplers)}
        metadata = {key: str(value) for key, value in session.metadata.items()}
        return write_json({**ids, "user_metadata": metadata, "display_name": session.display_name})

    async def _join_sampling_session(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        sampler = self.sessions.find_sampler(str(body.get("sampling_session_id")))
        sampler.num_clients += 1
        return write_json({"type": "join_sampling_session", "client_counter": sampler.num_clients})

    @abortable
    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await requests.read(requests.RetrieveFuture, request)
        result = await self.futures.wait(body.request_id, POLL_S)
        if result is None:  # with 408 the SDK asks again at once, and says nothing
            waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return write_json(waiting, 408)
        return web.Response(body=result.body, content_type=result.content_type)

    async def _cancel(self, request: web.Request) -> web.Response:
        self.futures.cancel((await requests.read(requests.RetrieveFuture, request)).request_id)
        return write_json({})

    async def _weights_info(self, request: web.Request) -> web.Response:
        path = TinkerPath.parse((await requests.read(requests.WeightsPath, request)).tinker_path)
        note = await asyncio.to_thread(self._checkpoints.read, path)
        trained = {"train_unembed": False, "train_mlp": True, "train_attn": True}
        return write_json({"base_model": note.base_model, "is_lora": True, "lora_rank": note.rank, **trained})

    async def _list_checkpoints(self, request: web.Request) -> web.Response:
        found = await asyncio.to_thread(list, self._checkpoints.find(request.match_info.get("run")))
        chosen, cursor = _choose_page(request, found)
        described = [self._checkpoints.describe(path, note) for path, note in chosen]
        return write_json({"checkpoints": described, "cursor": cursor})

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        named = request.match_info
        path = TinkerPath.parse(f"{SCHEME}{named['run']}/{named['kind']}/{named['name']}")
        await asyncio.to_thread(self._checkpoints.delete, path)
        return write_json({})

    async def _list_runs(self, request: web.Request) -> web.Response:
        runs = await self._describe_runs()
        chosen, cursor = _choose_page(request, list(runs.values()))
        return write_json({"training_runs": chosen, "cursor": cursor})

    async def _get_run(self, request: web.Request) -> web.Response:
        runs, run_id = await self._describe_runs(), request.match_info["run"]
        if run_id not in runs:
            raise ApiError(404, f"there is no training run {run_id[:100]!r}", param="training_run_id")
        return write_json(runs[run_id])

    async def _describe_runs(self) -> dict[str, dict[str, Any]]:
        runs: dict[str, dict[str, Any]] = {}
        for path, note in await asyncio.to_thread(list, self._checkpoints.find()):
            run = runs.setdefault(path.run_id, _describe_run(path.run_id, note.base_model, note.rank))
            kind = "last_checkpoint" if path.kind == "weights" else "last_sampler_checkpoint"
            run |= {kind: self._checkpoints.describe(path, note), "last_request_time": format_time(note.created_s)}
            run["user_metadata"] = note.run_metadata
        for model in self.sessions.list_models():
            run = runs.setdefault(model.id, _describe_run(model.id, model.note.base_model, model.note.rank))
            run |= {"last_request_time": format_time(model.used_s), "user_metadata": model.note.run_metadata}
        return runs


def _describe_run(run_id: str, base_model: str, rank: int) -> dict[str, Any]:
    run = {"training_run_id": run_id, "base_model": base_model, "model_owner": "local"}
    return {**run, "is_lora": True, "lora_rank": rank, "corrupted": False}


def _describe_base(settings: TinkerSettings, engine: Engine) -> TinkerBase:
    model = settings.policy.model or ""
    names, tokenizer = [settings.name, model], settings.policy.tokenizer or model
    if Path(model).is_dir():
        names.append(str(Path(model).resolve()))
    if Path(tokenizer).is_dir():
        tokenizer = str(Path(tokenizer).resolve())
    return TinkerBase(
        tuple(dict.fromkeys(name.rstrip("/") for name in names)),
        engine.model.config.model_type,
        tokenizer,
        engine.model.vocab_size,
        engine.model.max_model_len,
        settings.max_rank,
    )


def _choose_page(request: web.Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    try:
        offset, limit = (max(0, int(request.query.get(name, default))) for name, default in _PAGE)
    except ValueError:
        raise ApiError(400, "limit and offset must be whole numbers") from None
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


_PAGE = (("offset", "0"), ("limit", "100"))


KEY_PREFIX = "tml-"  # what every key of Tinker's SDK begins with


async def make_tinker(host: TrainingHost) -> TinkerApi:
    options, sources, token = host.options, host.options.sources, host.options.token
    if token is not None and not token.startswith(KEY_PREFIX):
        message = f"the key in the file does not begin with {KEY_PREFIX}, as the keys of Tinker's SDK do"
        raise ConfigError(Problem("--token_file", message, f"put {KEY_PREFIX} in front of it"))
    if len(sources) != 1:
        message = f"found {len(sources)} models, but Tinker's clients train adapters of one base model"
        raise ConfigError(Problem("--tinker", message, "name one"))
    name, path, settings = await find_source(sources[0], options.output_dir)
    if (Path(path) / ADAPTER_CONFIG).is_file():
        fix = "merge it first: reinforge export RUN --format merged, or name its base model"
        raise ConfigError(Problem(MODEL, f"{path} is an adapter; adapters are trained on a whole model", fix))
    lora = LoRAConfig(r=options.max_rank, lora_alpha=options.max_rank)
    policy = PolicyConfig(
        **{**settings, **options.overrides, "model": path, "lora": lora, "max_num_seqs": options.max_num_seqs}
    )
    chosen = TinkerSettings(
        policy, name, options.data_dir, options.device, max_models=options.max_models, max_rank=options.max_rank
    )
    problems = [*check_policy(policy), *check_packages(lora=True)]
    problems += check_adapters(policy, list_slots(chosen.max_models, chosen.max_samplers), critic=False)
    if problems:
        raise ConfigError([Problem(MODEL, each.message, each.fix) for each in problems])
    return TinkerApi(host.models, chosen)
