"""One run of a client: an engine of this process, its jobs, and the weights that the client has saved.

DATA/sessions/ID/session.json       what the client asked for
DATA/sessions/ID/saves/SAVE/        weights and optimizer state; the manifest has their version
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.config.finetuning_blocks import LimitsConfig
from reinforge.config.policy import MICRO_BATCH_TOKENS, PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError, EngineError, ReinforgeError, StorageError, describe_error
from reinforge.files import (
    commit_folder,
    find_damage,
    make_private_folder,
    make_staging_path,
    read_json_file,
    remove_folder,
    write_json,
)
from reinforge.interfaces import Algorithm, PolicyServer
from reinforge.limits import get_limits
from reinforge.protocols.sessions.wire import CLIENT_SETTINGS, OpenSession, RestoreCall, SaveCall, SentJob, read_job
from reinforge.registry import REGISTRY
from reinforge.serving.loading import BaseModels
from reinforge.serving.routes import ApiError, refuse_invalid
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.request import ModelRequest, TokenLogprobs
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.engine import Engine

SETTINGS = "session.json"


class TrainingSession:
    def __init__(self, id_: str, folder: Path, opened: OpenSession, config: FinetuneConfig):
        self.id, self.folder, self.opened, self._config = id_, folder, opened, config
        self.seen_s = time.monotonic()
        self._stack = AsyncExitStack()
        self._adapter: LocalAdapter | None = None
        self._jobs: dict[str, TrainingJobRef] = {}
        self._contents: dict[str, str] = {}
        self._continues: set[str] = set()
        self._exclusive = asyncio.Lock()

    async def start(self) -> None:
        algorithm = await self._stack.enter_async_context(make_algorithm(self.opened.algorithm, self._config.seed))
        adapter = LocalAdapter(LocalAdapterConfig(), algorithm)
        self._stack.push_async_callback(adapter.cleanup)
        try:
            await adapter.initialize(self._config)
            make_private_folder(self.folder)
            make_private_folder(self.folder / "saves")
            write_json(self.folder / SETTINGS, self.opened.model_dump(mode="json"))
        except BaseException:
            await self._stack.aclose()
            raise
        self._adapter = adapter

    async def close(self) -> None:
        self._adapter = None
        await self._stack.aclose()
        if self.folder.is_dir() and not any((self.folder / "saves").iterdir()):
            remove_folder(self.folder)

    @property
    def adapter(self) -> LocalAdapter:
        if self._adapter is None:
            raise EngineError("the session has ended")
        return self._adapter

    @property
    def policy(self) -> PolicyServer:
        policy = self.adapter.policy()
        assert policy is not None  # the model is loaded
        return policy

    @property
    def engine(self) -> Engine:
        assert self.adapter.engine is not None  # the model is loaded
        return self.adapter.engine

    def describe(self) -> dict[str, Any]:
        policy = self.policy
        return {
            "id": self.id,
            "model_name": self.opened.model,
            "chat_template": policy.chat_template,
            "history": policy.history,
            "tolerance": policy.tolerance,
            "max_model_len": self.engine.policy.max_model_len,
            "version": policy.version,
        }

    def check_request(self, request: ModelRequest) -> None:
        if isinstance(request.prompt, tuple):
            self._check_tokens("prompt", request.prompt)
        if request.continued is not None:
            self._check_tokens("continued", request.continued.token_ids)

    def _check_tokens(self, name: str, token_ids: Iterable[int]) -> None:
        size = self.engine.model.vocab_size
        if (wrong := next((each for each in token_ids if not 0 <= each < size), None)) is not None:
            raise ApiError(422, f"{name}: the model has the tokens 0 to {size - 1}, found {wrong}", param=name)

    def _check_turn(self, name: str, tokens: TokenLogprobs) -> None:
        self._check_tokens(name, (*tokens.prompt_token_ids, *tokens.token_ids))
        count = len(tokens.token_ids)
        if len(tokens.logprobs) != count or len(tokens.processed_logprobs) not in (0, count):
            message = f"{name}: {count} tokens with {len(tokens.logprobs)} log-probs"
            raise ApiError(422, f"{message} and {len(tokens.processed_logprobs)} processed ones", param=name)
        if tokens.later_versions:
            raise ApiError(422, f"{name}: a reply of a session has one policy_version", param=name)
        if abs(tokens.policy_version) >= 1 << 62:
            raise ApiError(422, f"{name}: there is no policy_version {tokens.policy_version}", param=name)
        if tokens.supports is None:
            return
        size = -(-self.engine.model.vocab_size // 8)
        try:
            fits = len(tokens.supports.sets) == count and all(len(mask) == size for mask in tokens.supports.masks)
            kept = tokens.supports.token_ids
        except (ValueError, IndexError):
            fits = False
        if not fits:
            raise ApiError(422, f"{name}: the supports do not fit {count} tokens", param=name)
        if len(kept):
            self._check_tokens(name, (int(kept.min()), int(kept.max())))

    def read_job(self, body: bytes) -> tuple[TrajectoryCollection, str]:
        collection = read_job(SentJob.model_validate_json(body))
        for index, siblings in enumerate(collection.trajectories):
            for number, trajectory in enumerate(siblings):
                for turn in trajectory.turns:
                    if turn.tokens is not None:
                        self._check_turn(f"groups[{index}][{number}]", turn.tokens)
        _ = collection.groups  # refuses groups that are none
        return collection, hashlib.sha256(body).hexdigest()

    async def submit(self, collection: TrajectoryCollection, content: str) -> TrainingJobStatus:
        """Starts a job; a key that is known already starts none."""
        key = collection.resolve_job_key()
        if self._contents.setdefault(key, content) != content:
            raise ApiError(422, f"the job {key[:100]!r} was submitted with other trajectories", param="job_key")
        if key not in self._jobs:
            states = [await self.adapter.status(ref) for ref in self._jobs.values()]
            if sum(not each.is_terminal for each in states) >= (most := get_limits().waiting_jobs):
                raise ApiError(429, f"{most} jobs of this session wait already", headers={"retry-after": "10"})
            self._jobs[key] = await self.adapter.submit(collection)
        return await self.adapter.status(self._jobs[key])

    async def wait(self, key: str, timeout_s: float) -> TrainingJobStatus:
        """Returns the status of a job, once it has ended or the time is up.

        A job that failed for lack of memory, storage or a teacher raises that error.
        """
        if (ref := self._jobs.get(key)) is None:
            raise ApiError(404, f"this session has no job {key[:100]!r}", param="job_key", code="job_not_found")
        try:
            async with asyncio.timeout(timeout_s):
                return await self.adapter.wait_until_complete(ref)
        except TimeoutError:
            return await self.adapter.status(ref)

    async def publish(self, version: int) -> None:
        async with self._exclusive:
            await self.policy.publish(version)

    async def save(self, name: str, call: SaveCall, find: Callable[[str], Path]) -> None:
        """Keeps the current weights under a name; a name that is known already keeps what it has."""
        target = self.folder / "saves" / name
        async with self._exclusive:
            if await asyncio.to_thread(find_damage, target) is not None:
                staged = make_staging_path(target.parent)
                try:
                    await self.adapter.save(staged, call.version)
                    await asyncio.to_thread(commit_folder, staged, target, version=call.version)
                finally:
                    shutil.rmtree(staged, ignore_errors=True)
            if call.keep is not None:
                kept = {*call.keep, f"{self.id}/{name}"}
                await asyncio.to_thread(_remove_others, [find(each) for each in (self.id, *self._continues)], kept)

    async def restore(self, call: RestoreCall, folder: Path) -> None:
        place = folder / "saves" / call.save
        if (damage := await asyncio.to_thread(find_damage, place)) is not None:
            message = f"the weights {call.session}/{call.save} are not here: {damage}"
            raise ApiError(404, message, param="save", code="save_not_found")
        before = _read_settings(folder)
        if before is None or (before.model, before.policy.get("lora")) != (
            self.opened.model,
            self.opened.policy.get("lora"),
        ):
            message = f"the weights {call.session}/{call.save} are of another model or other adapters"
            raise ApiError(422, message, param="session")
        async with self._exclusive:
            for ref in self._jobs.values():
                await _wait_for_end(self.adapter, ref)
            await self.adapter.restore(place, call.version)
        self._continues.add(call.session)


async def _wait_for_end(adapter: LocalAdapter, ref: TrainingJobRef) -> None:
    try:
        await adapter.wait_until_complete(ref)
    except ReinforgeError:
        return  # its client is told when it asks for the job


def _remove_others(folders: Sequence[Path], kept: set[str]) -> None:
    for folder in folders:
        for path in sorted((folder / "saves").glob("[0-9a-f]*")):
            if f"{folder.name}/{path.name}" not in kept:
                remove_folder(path)


def _read_settings(folder: Path) -> OpenSession | None:
    try:
        return OpenSession(**read_json_file(folder / SETTINGS))
    except (OSError, ValueError, TypeError, StorageError):
        return None


OWN_MODULES = "reinforge.algorithms."
TEACHER = "distill"  # the algorithm with a model of the client's configuration, which is not here


def read_settings(opened: OpenSession, bases: BaseModels, device: str) -> FinetuneConfig:
    policy = read_policy(opened.policy, bases.find(opened.model, "model"))
    limits = LimitsConfig(max_skipped_steps=opened.max_skipped_steps)
    return FinetuneConfig(policy=policy, seed=opened.seed, num_epochs=opened.num_epochs, device=device, limits=limits)


def read_policy(given: Mapping[str, Any], base: PolicyConfig) -> PolicyConfig:
    """Returns the policy: the server's model with a client's settings.

    Example: {"lora": {"r": 4}} -> the base's model, tokenizer, data type and limits, with adapters of rank 4.
    """
    if others := sorted(set(given) - set(CLIENT_SETTINGS)):
        allowed = ", ".join(CLIENT_SETTINGS)
        message = f"policy.{others[0][:100]} is the server's to choose; a client may set: {allowed}"
        raise ApiError(422, message, param="policy")
    try:
        asked = PolicyConfig(**{**given, "model": base.model})
    except ValidationError as error:
        raise refuse_invalid(error, "policy") from None
    except (ConfigError, TypeError) as error:
        raise ApiError(422, f"policy: {describe_error(error)}", param="policy") from None
    chosen = {name: getattr(asked, name) for name in CLIENT_SETTINGS}
    tokens, limit = asked.batch.micro_batch_tokens, base.batch.micro_batch_tokens
    # memory alone; the result is the same
    fitting = limit if tokens is None else min(tokens, limit or MICRO_BATCH_TOKENS)
    chosen["batch"] = asked.batch.model_copy(update={"micro_batch_tokens": fitting})
    limits = [each for each in (asked.max_model_len, base.max_model_len) if each is not None]
    chosen["max_model_len"] = min(limits) if limits else None
    return base.model_copy(update=chosen)


@asynccontextmanager
async def make_algorithm(block: Mapping[str, Any], seed: int) -> AsyncIterator[Algorithm]:
    """Yields the algorithm of a block `{"_type": ..., ...}`; only those that come with reinforge are made."""
    components = {each.name: each for each in REGISTRY.components("algorithm") if each.origin.startswith(OWN_MODULES)}
    components.pop(TEACHER, None)
    name = block.get("_type")
    if name not in components:
        message = f"no algorithm {str(name)[:100]!r} is available to sessions; there are: {', '.join(components)}"
        raise ApiError(422, message, param="algorithm")
    builder = SimpleNamespace(config=SimpleNamespace(finetuning=FinetuneConfig(seed=seed)))
    try:
        config = components[name].config_type(**{key: value for key, value in block.items() if key != "_type"})
        generator = cast("AsyncGenerator[Algorithm]", components[name].factory(config, builder))
        made = await anext(generator)
    except ValidationError as error:
        raise refuse_invalid(error, "algorithm") from None
    except (ReinforgeError, TypeError) as error:
        raise ApiError(422, f"algorithm {name}: {describe_error(error)}", param="algorithm") from None
    try:
        yield made
    finally:
        await generator.aclose()
