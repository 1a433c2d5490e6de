"""Loads the models of a server: folders, hub ids, bundled models, runs and their adapters.

    await loader.open("runs/support-1")            a run: its promoted model, else its best checkpoint, as `support-1`
    await loader.open("Qwen/Qwen2.5-0.5B")         any model that `policy.model` may name
    await loader.load("ft:...", folder, "base")    a model that this server trained

LoRA adapters of one base model share an engine: it holds the base model once, and samples all of them in one batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import filelock

from reinforge.config.loader import build_config
from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine import import_engine
from reinforge.engine.model.model_files import ADAPTER_CONFIG, read_json
from reinforge.engine.model.preflight import check_policy, has_adapters
from reinforge.engine.model.source import find_base_source
from reinforge.engine.packages import check_packages
from reinforge.errors import ConfigError, EngineError, Problem, StorageError, did_you_mean
from reinforge.files import PRIVATE_FILE, make_private_folder
from reinforge.interfaces import PolicyServer
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.runs.run_folder import read_config
from reinforge.runs.saved_model import BUNDLED, SavedModel, find_model
from reinforge.serving.comparison import RunQuestions, list_base_models, read_questions
from reinforge.serving.models import ServedModels
from reinforge.serving.routes import ApiError
from reinforge.serving.version_folder import VERSION
from reinforge.trainer.setup.components import ComponentBuilder

if TYPE_CHECKING:
    from reinforge.engine import Engine


logger = logging.getLogger(__name__)

LOCK = ".lock"
MODEL = "MODEL"
OWN_ADAPTER = "default"  # the adapter with which an engine was loaded
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How models are loaded.

    Attributes:
        dtype: Data type of the weights; None: that of the run, else float32.
        max_model_len: Maximum tokens of prompt and reply; None: the model's limit.
        full_weights: Decode with the weights as they are, not with float16 copies.
        compares: Serve the base model of each run as well, and let `ModelLoader.questions` have its questions.
    """

    output_dir: Path = Path("runs")
    device: str = "auto"
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 96
    takes_adapters: bool = False
    serves_versions: bool = False
    full_weights: bool = False
    compares: bool = False
    seed: int = 0

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings of the policy that replace those of a run."""
        given = {"dtype": self.dtype, "max_model_len": self.max_model_len}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ServeOptions(LoadSettings):
    """What the command line says about the models and about training."""

    sources: tuple[str, ...] = ()
    data_dir: Path = Path(".reinforge/serve")
    token: str | None = None  # the server's key; None: it has none
    max_tokens: int | None = None  # maximum tokens of a reply; None: 1024 in reinforcement jobs
    lora_rank: int = 16  # rank of the adapters; 0: all weights are trained
    max_rank: int = 32
    max_jobs: int = 1
    max_models: int = 4
    allow_python_graders: bool = False


@dataclass(eq=False)
class LoadedEngine:
    engine: Engine
    adapters: dict[str, set[str]] = field(default_factory=dict)
    num_added: int = 0


class ModelLoader:
    def __init__(self, models: ServedModels, settings: LoadSettings | None = None):
        self._models, self._settings = models, settings or LoadSettings()
        self._engines: dict[str, LoadedEngine] = {}
        self._folders: dict[Path, tuple[LoadedEngine, str]] = {}
        self._loading = asyncio.Lock()
        self.questions = RunQuestions()

    async def open(self, source: str) -> list[str]:
        """Serves a model that the user names; returns the names under which it is served."""
        found = find_model(source, self._settings.output_dir, MODEL)
        name, overrides = _choose_name(source, found), read_run_settings(found)
        async with self._loading:
            if found.adapters:
                served = {f"{name}-{each}": str(Path(found.path) / each) for each in found.adapters}
            else:
                served = {name: await _find_bundled(found.path)}
            if self._settings.compares and found.run is not None:
                served |= list_base_models(served, found)
                self.questions.by_model |= dict.fromkeys(served, read_questions(found.run))
            served |= _list_versions(name, found) if self._settings.serves_versions else {}
            for each, path in served.items():
                await self._serve(each, path, overrides)
        return list(served)

    async def load(self, name: str, folder: Path, base: str, settings: Mapping[str, Any] | None = None) -> None:
        """Serves a model from its folder; does nothing if the name is served already.

        Args:
            settings: Those of `PolicyConfig` that the model was trained with.
        """
        async with self._loading:
            if name not in self._models:
                await self._serve(name, str(folder), dict(settings or {}), root=base)

    async def unload(self, name: str) -> None:
        """Stops serving a name; does nothing if it is not served."""
        if name in self._models:
            await self._models.remove(name)

    async def close(self) -> None:
        for loaded in list(self._engines.values()):
            await run_in_daemon_thread(loaded.engine.close, "serve-close")
        self._engines.clear()

    async def _serve(self, name: str, path: str, overrides: dict[str, Any], root: str | None = None) -> None:
        if name in self._models:
            raise ConfigError(Problem(MODEL, f"two models are named {name!r}", "serve one of them"))
        folder = Path(path).expanduser().absolute()
        known = self._folders.get(folder)
        loaded, adapter = known if known is not None else await self._load(name, path, overrides)
        if folder.is_dir():
            self._folders[folder] = loaded, adapter
        loaded.adapters.setdefault(adapter, set()).add(name)
        policy: PolicyServer = loaded.engine.policies[adapter]
        if known is None and (version := _read_version(folder)) is not None:
            await policy.publish(version)
        self._models.add(name, policy, root=root, close=partial(self._release, name, loaded, adapter, folder))

    async def _load(self, name: str, path: str, overrides: dict[str, Any]) -> tuple[LoadedEngine, str]:
        base, is_adapter = _find_base(path), (Path(path) / ADAPTER_CONFIG).is_file()
        if is_adapter and (held := self._engines.get(base)) is not None and held.engine.model.has_adapters:
            held.num_added += 1
            adapter = f"served_{held.num_added}"
            add = partial(held.engine.add_adapter, adapter, path, name)
            if await _try(add) is not None:
                logger.info("%s joins the engine of %s", name, base)
                return held, adapter
        engine = await run_in_daemon_thread(partial(self._load_engine, path, overrides), "serve-load")
        loaded = LoadedEngine(engine)
        self._engines[base if base not in self._engines else f"{base}#{len(self._engines)}"] = loaded
        return loaded, OWN_ADAPTER

    def _load_engine(self, path: str, overrides: dict[str, Any]) -> Engine:
        settings, is_adapter = self._settings, (Path(path) / ADAPTER_CONFIG).is_file()
        chosen = {**overrides, **settings.overrides}
        lora = LoRAConfig(r=1) if settings.takes_adapters and not is_adapter else None
        policy = PolicyConfig(model=path, lora=lora, max_num_seqs=settings.max_num_seqs, **chosen)
        if problems := [*check_policy(policy), *check_packages(lora=has_adapters(policy))]:
            raise ConfigError([Problem(MODEL, each.message, each.fix) for each in problems])
        fast = not settings.full_weights
        return import_engine().load(policy, seed=settings.seed, device=settings.device, frozen=True, serves_only=fast)

    async def _release(self, name: str, loaded: LoadedEngine, adapter: str, folder: Path) -> None:
        async with self._loading:  # an adapter that is being added keeps its engine
            names = loaded.adapters[adapter]
            names.discard(name)
            if names:
                return
            del loaded.adapters[adapter]
            self._folders.pop(folder, None)
            if loaded.adapters:
                if adapter != OWN_ADAPTER:
                    await run_in_daemon_thread(partial(loaded.engine.remove_adapter, adapter), "serve-remove")
                return
            self._engines = {key: each for key, each in self._engines.items() if each is not loaded}
            await run_in_daemon_thread(loaded.engine.close, "serve-close")


async def find_source(source: str, output_dir: Path) -> tuple[str, str, dict[str, Any]]:
    """Returns the name of one model that the user names, its folder or hub id, and its settings."""
    found = find_model(source, output_dir, MODEL)
    return _choose_name(source, found), await _find_bundled(found.path), read_run_settings(found)


async def _try(work: Callable[[], T]) -> T | None:
    """Returns what an addition to an engine returns; None: the adapter needs an engine of its own."""
    try:
        return await run_in_daemon_thread(work, "serve-load")
    except EngineError as error:
        logger.warning("%s; it gets a separate engine", error)
        return None


async def _find_bundled(path: str) -> str:
    if not path.startswith(BUNDLED):
        return path
    async with ComponentBuilder(build_config({})) as builder:
        return await builder.get_bundled(path, MODEL)


def _choose_name(source: str, found: SavedModel) -> str:
    """Returns the name of a model: a run's or a folder's own name, or the hub id as it is written.

    Example: `runs/support-1/` -> `support-1`; `bundled:tickets` -> `bundled:tickets`.
    """
    folder = found.run or Path(source).expanduser()
    return folder.resolve().name if folder.is_dir() or found.path.endswith(".gguf") else source


def _list_versions(name: str, found: SavedModel) -> dict[str, str]:
    """Returns the checkpoints of a run by name, the oldest first: `support-1@3` -> `.../checkpoints/step-000003`."""
    if found.run is None:
        raise ConfigError(Problem("--versions", f"{name} is not a run, so it has no versions", "leave it out"))
    folders = {int(path.name.partition("-")[2]): path for path in sorted((found.run / "checkpoints").glob("step-*"))}
    if whole := [path for path in folders.values() if not (path / ADAPTER_CONFIG).is_file()]:
        message = f"{whole[0]} holds all weights, and each version would need a separate engine"
        raise ConfigError(Problem("--versions", message, "name the folders that you want to serve"))
    return {f"{name}@{version}": str(path) for version, path in folders.items()}


def _read_version(folder: Path) -> int | None:
    """Returns the version of a checkpoint's weights; None: the folder does not say."""
    named = (read_json(folder / VERSION) or {}).get("number")
    version = named or (read_json(folder / "training" / "state.json") or {}).get("version")
    return version if isinstance(version, int) else None


def read_run_settings(found: SavedModel) -> dict[str, Any]:
    policy = read_config(found.run).get("finetuning", {}).get("policy") if found.run is not None else None
    names = ("history", "max_model_len", "dtype", "kv_cache_mb")
    return {name: policy[name] for name in names if policy.get(name) is not None} if policy else {}


def _find_base(path: str) -> str:
    """Returns what identifies the base model of a folder: that of an adapter, else the model itself."""
    folder = Path(path).expanduser()
    if not (folder / ADAPTER_CONFIG).is_file():
        return str(folder.absolute()) if folder.exists() else path
    base = find_base_source(folder, MODEL)
    return path if base is None else _find_base(base.location)


def lock_folder(folder: Path, file: Path | None = None) -> filelock.BaseFileLock:
    """Returns the lock of a folder in which one server writes, taken; it ends with the process at the latest.

    Args:
        file: The file of the lock; None: `.lock` in the folder.

    Raises:
        StorageError: Another server has it, or there can be no lock.
    """
    make_private_folder(folder)
    lock = filelock.FileLock(file or folder / LOCK, mode=PRIVATE_FILE)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        fix = "stop it, or start this one with another folder (--data_dir, --record)"
        raise StorageError(f"another server works on {folder}: {fix}") from None
    except (OSError, NotImplementedError) as error:
        raise StorageError(f"cannot lock {folder}: {error}") from error
    return lock


@dataclass(frozen=True, slots=True)
class TrainingHost:
    """The server that a protocol's part is made for: its models, what loads more, and its options."""

    models: ServedModels
    loader: ModelLoader
    options: ServeOptions


class BaseModels:
    """What the server's owner allows to be trained; a request names one and never a path or a hub id of its own."""

    def __init__(self, policies: Mapping[str, PolicyConfig]):
        self._policies = dict(policies)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._policies)

    def find(self, name: str, param: str = "base_model") -> PolicyConfig:
        if (policy := self._policies.get(name)) is not None:
            return policy
        listed = ", ".join(self._policies) or "none"
        message = (
            f"no model to train is named {name[:200]!r}{did_you_mean(name, self.names)}; this server has: {listed}"
        )
        raise ApiError(404, message, param=param, code="model_not_found")


async def find_bases(options: ServeOptions) -> BaseModels:
    """Returns the models that clients may train."""
    policies, problems = dict[str, PolicyConfig](), list[Problem]()
    for source in options.sources:
        name, path, settings = await find_source(source, options.output_dir)
        policies[name] = policy = _build_policy(path, settings, options)
        found = [*check_policy(policy), *check_packages(lora=has_adapters(policy))]
        problems += [Problem(MODEL, each.message, each.fix) for each in found]
    if problems:
        raise ConfigError(problems)
    return BaseModels(policies)


def _build_policy(path: str, settings: Mapping[str, Any], options: ServeOptions) -> PolicyConfig:
    """Returns a model and how it is trained; `settings` are those of the run that it comes from."""
    folder = Path(path).expanduser()
    chosen = {**settings, **options.overrides}
    chosen["model"] = str(folder.absolute()) if folder.exists() else path  # jobs run in folders of their own
    policy = PolicyConfig(**chosen)
    if options.lora_rank and not has_adapters(policy):
        return policy.model_copy(update={"lora": LoRAConfig(r=options.lora_rank)})
    return policy
