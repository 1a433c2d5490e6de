"""What a run is made of besides its configuration and its examples: code, files, the model, library versions.

    versions    {"python": "3.12.3", "torch": "2.13.0", "org/model": "5f0b3a..."}     a hub model: its revision
    files       {"agent.py": "9a0c...", "prompts/system.txt": "77fe...", "tiny/model.safetensors": "1b2c..."}
    functions   {"__main__.agent": "c41d..."}     of the user, where no file of the project holds them

It is recorded when a run starts, and again after the baseline: by then the agent has imported all that it imports, and
a hub model is in the cache. A run resumes only if none of it has changed. What an agent opens itself is not known.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import hmac
import importlib.metadata
import inspect
import os
import platform
import re
import secrets
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import platformdirs

from reinforge.config.document import KeyPath
from reinforge.config.imports import SPEC, is_own_file
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema_walk import iterate_models, iterate_values
from reinforge.engine.model.source import PIP, find_package_model
from reinforge.errors import ConfigError
from reinforge.files import to_json
from reinforge.rollout.isolation.containment import IMPORTED_FILES
from reinforge.types.evaluation import EvalInputItem
from reinforge.version import __version__

KEY_FILE = "run-seal.key"
KEY_BYTES = 32


def find_key_file() -> Path:
    return Path(os.environ.get("REINFORGE_HOME") or platformdirs.user_data_dir("reinforge")) / KEY_FILE


def seal_run(folder: Path, project_root: Path) -> str | None:
    """Returns the seal of a run of this user; None: the key cannot be read or written."""
    key = _read_key() or _make_key()
    return _sign(key, folder, project_root) if key is not None else None


def is_own_run(folder: Path, project_root: Path, seal: object) -> bool:
    """Returns True if this user made the run in this folder, with its Python files in that folder."""
    key = _read_key()
    if key is None or not isinstance(seal, str):
        return False
    return hmac.compare_digest(_sign(key, folder, project_root).encode(), seal.encode("utf-8", "replace"))


def _sign(key: bytes, folder: Path, project_root: Path) -> str:
    return hmac.new(key, to_json([str(folder.resolve()), str(project_root)]).encode(), hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    try:
        key = find_key_file().read_bytes()
    except OSError:
        return None
    return key if len(key) == KEY_BYTES else None


def _make_key() -> bytes | None:
    """Writes a new key, readable by this user only; if another process writes one at the same time, that one counts."""
    path = find_key_file()
    staged = path.with_name(f".{KEY_FILE}-{os.getpid()}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(staged, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(staged, path)
        staged.unlink(missing_ok=True)
    return _read_key()


LIBRARIES = ("torch", "transformers", "peft", "tokenizers", "safetensors", "jinja2", "numpy")
MODEL_FILES = {".json", ".jinja", ".safetensors", ".model", ".txt", ".tiktoken"}
MODEL_KEYS = {"model", "tokenizer"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

DATA_PATHS: tuple[KeyPath, ...] = (
    ("eval", "general", "dataset"),
    ("finetuning", "output_dir"),
    ("finetuning", "run_configuration", "config_file"),
    ("finetuning", "run_configuration", "dataset"),
    ("finetuning", "run_configuration", "validation_dataset"),
)
"""Values that name no part of the run: the examples have their own hash."""

WHOLE_BYTES = 1 << 26
NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""A larger file counts by its size and by this many blocks, evenly spaced: weights of 100 GB are not read whole."""
MAX_PATH = 1000


@dataclass
class Provenance:
    """What a run is made of; see the head of this module."""

    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, dict[str, str]]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns what `as_dict` returned; further parts, of a later release, are left out."""
        parts = {name: data.get(name) for name in ("versions", "files", "functions")}
        return cls(
            **{
                name: {str(key): str(value) for key, value in part.items()} if isinstance(part, dict) else {}
                for name, part in parts.items()
            }
        )

    def extended_by(self, later: Provenance) -> Provenance:
        """Returns this with what only `later` has."""
        return Provenance(
            {**later.versions, **self.versions}, {**later.files, **self.files}, {**later.functions, **self.functions}
        )

    def find_changes(self, now: Provenance, project_root: Path) -> list[str]:
        """Returns what has changed since this was recorded, by name: `agent.py changed`, `torch 2.12.0 -> 2.13.0`."""
        changes = []
        for path, digest in self.files.items():
            current = now.files.get(path) or _hash(project_root / path)
            if current != digest:
                changes.append(f"{path} changed" if current else f"{path} is gone")
        for name, digest in self.functions.items():
            if now.functions.get(name, digest) != digest:
                changes.append(f"the function {name} changed")
        for name, version in self.versions.items():
            current = now.versions.get(name)
            if current != version and (current is not None or not HUB_ID.fullmatch(name)):
                changes.append(f"{name} {version} -> {current or 'not installed'}")
        added = (name for name in LIBRARIES if name in now.versions and name not in self.versions)
        return changes + [f"{name} not installed -> {now.versions[name]}" for name in added]


def collect_provenance(loaded: LoadedConfig, model_folder: str | None = None) -> Provenance:
    """Returns what a run of this configuration is made of now.

    Args:
        loaded: The configuration, after its modules were imported.
        model_folder: Folder of the model where the configuration does not name it, as for `bundled:NAME`.
    """
    root = loaded.project_root.resolve()
    found = Provenance(versions=_list_versions(loaded))
    for file in _list_imported_files(root):
        _add_file(found, file, root)
    for path, value in iterate_values(loaded.config, without=DATA_PATHS):
        if callable(value):
            _add_function(found, value, root)
        elif (place := _find_path(value, path[-1], root)) is not None:
            for file in [place] if place.is_file() else _list_model_files(place):
                _add_file(found, file, root)
        elif isinstance(value, str) and path[-1] in MODEL_KEYS and value.startswith(PIP):
            for file in _list_package_files(value):
                _add_file(found, file, root)
        elif isinstance(value, str) and path[-1] in MODEL_KEYS:
            named = loaded.config.finetuning.policy.revision if path[-2:] == ("policy", "model") else None
            if revision := _find_revision(value, named):
                found.versions[value] = revision
    for file in _list_model_files(Path(model_folder)) if model_folder else ():
        _add_file(found, file, root)
    return found


def identify_evaluators(loaded: LoadedConfig) -> dict[str, str]:
    """Returns evaluator -> hash of what decides its scores: its code, its settings, its parts and its judge's model.

    Scores of two runs can be compared where the hashes are equal. The code of a function is its source with that of the
    functions and the constants of the project that it uses, so an edit elsewhere in its file does not count.
    """
    config, root = loaded.config, loaded.project_root.resolve()
    evaluators, models = config.eval.evaluators, config.llms

    def describe(model: Any, seen: tuple[str, ...]) -> list[Any]:
        found: list[Any] = [f"{type(model).__module__}.{type(model).__qualname__}"]
        module = inspect.getmodule(type(model))
        with contextlib.suppress(OSError, TypeError):
            found.append(inspect.getsource(module) if module is not None else "")
        for path, value in iterate_values(model):
            names = [path[-1], value] if isinstance(value, str) else [path[-1]]
            if isinstance(value, str) and SPEC.fullmatch(value):
                found.append([*path, *_list_named_code(value, root)])
            else:
                found.append([*path, list(_list_code(value, root)) if callable(value) else repr(value)])
            for name in names:
                for known in (evaluators, models):
                    if isinstance(name, str) and name in known and name not in seen:
                        found.append(describe(known[name], (*seen, name)))
        return found

    return {
        name: hashlib.sha256(to_json(describe(model, (name,))).encode("utf-8", "replace")).hexdigest()
        for name, model in evaluators.items()
    }


def _list_named_code(spec: str, root: Path) -> Iterator[str]:
    """Yields the sources of what `module:name` names; that of its file, if only other processes import the module."""
    yield spec
    module, _, name = spec.partition(":")
    if module in sys.modules:
        with contextlib.suppress(AttributeError):
            yield from _list_code(attrgetter(name)(sys.modules[module]), root)
    elif (file := root.joinpath(*module.split(".")).with_suffix(".py")).is_file():
        yield file.read_text(encoding="utf-8", errors="replace")


def _list_code(value: Any, root: Path) -> Iterator[str]:
    """Yields the sources of a function and of what it uses of the project, and the values of its constants."""
    remaining, seen = [value], set()
    while remaining:
        function = remaining.pop()
        function = (
            inspect.unwrap(function) if inspect.isroutine(function) or inspect.isclass(function) else type(function)
        )
        if id(function) in seen:
            continue
        seen.add(id(function))
        try:
            source = textwrap.dedent(inspect.getsource(function))
            used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
        except (OSError, TypeError, SyntaxError):
            continue
        yield source
        known = vars(sys.modules.get(function.__module__, inspect))
        for name in sorted(used & known.keys()):
            each = known[name]
            if inspect.ismodule(each) and _is_of_project(each, root):
                with contextlib.suppress(OSError):  # an empty file has no source
                    yield inspect.getsource(each)
            elif inspect.isfunction(each) or inspect.isclass(each):
                remaining += [each] if each.__module__ == function.__module__ or _is_of_project(each, root) else []
            elif (constant := _describe_constant(each)) is not None:
                yield f"{name} = {constant}"


def _is_of_project(value: Any, root: Path) -> bool:
    try:
        file = inspect.getsourcefile(value)
    except TypeError:  # built in
        return False
    return file is not None and is_own_file(Path(file).resolve(), root)  # a module in C has none


def _describe_constant(value: Any) -> str | None:
    """Returns plain data as text that is the same in every process; None: it is something else."""
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_describe_constant(each) for each in value]
        return str(sorted(map(str, parts)) if isinstance(value, set | frozenset) else parts)
    if isinstance(value, dict):
        return str(sorted((str(_describe_constant(k)), str(_describe_constant(v))) for k, v in value.items()))
    return repr(value) if isinstance(value, str | int | float | None) else None


def _list_versions(loaded: LoadedConfig) -> dict[str, str]:
    versions = {"python": platform.python_version(), "reinforge": __version__}
    packages = {type(model).__module__.partition(".")[0] for _, model in iterate_models(loaded.config)}
    plugins = _map_packages() if packages - {"reinforge"} else {}
    names = [*LIBRARIES, *(each for package in sorted(packages - {"reinforge"}) for each in plugins.get(package, ()))]
    found = {name: find_version(name) for name in names}
    return {**versions, **{name: version for name, version in found.items() if version is not None}}


@cache  # each reads and parses a file, and a run asks twice
def find_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _map_packages() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _list_imported_files(root: Path) -> Iterator[Path]:
    below = os.path.join(root, "")
    files = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    for file in [*files, *IMPORTED_FILES]:  # some thousand, of which few are the project's: paths as text are quick
        if not isinstance(file, str) or not (place := _resolve(file)).startswith(below):
            continue
        if is_own_file(path := Path(place), root):
            yield path


@cache
def _resolve(file: str) -> str:
    """Returns an absolute path without symbolic links, looking at each folder once; a relative one is left out."""
    if not os.path.isabs(file):
        return ""
    folder, name = os.path.split(file)
    place = os.path.join(_resolve_folder(folder), name)
    return os.path.realpath(place) if os.path.islink(place) else place


@cache
def _resolve_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _find_path(value: Any, key: str | int, root: Path) -> Path | None:
    """Returns the file or the folder of a model that a value names; None: it names neither."""
    if not isinstance(value, str | Path) or not 0 < len(str(value)) <= MAX_PATH or "\n" in str(value):
        return None
    if isinstance(value, str) and key not in MODEL_KEYS and not set("/\\.").intersection(value):
        return None
    for place in (Path(os.path.expanduser(value)), root / value):
        try:
            if place.is_file() or (place / "config.json").is_file() or (place / "adapter_config.json").is_file():
                return place.resolve()
        except (OSError, ValueError):
            continue
    return None


def _list_model_files(folder: Path) -> list[Path]:
    """Returns the files of a model: configuration, tokenizer, chat template, weights; those of its adapters too."""
    folders = [folder, *(path.parent for path in folder.glob("*/adapter_config.json"))]
    files = (path for each in folders if each.is_dir() for path in each.iterdir() if path.suffix in MODEL_FILES)
    return sorted(path.resolve() for path in files if path.is_file())


def _list_package_files(name: str) -> list[Path]:
    """Returns the files of a model that a package carries; none: it is not installed."""
    try:
        place = find_package_model(name, "model").path
    except ConfigError:
        return []
    return [place] if place.is_file() else _list_model_files(place)


def _find_revision(name: str, named: str | None) -> str | None:
    """Returns the commit of a hub model in the local cache, at the revision that is named; None: it is not there."""
    if not HUB_ID.fullmatch(name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=named)
    except Exception:  # noqa: BLE001  without the library, or with an odd name or cache, the revision is unknown
        return None
    return Path(found).parent.name if isinstance(found, str) else None


def _add_file(found: Provenance, file: Path, root: Path) -> None:
    digest = _hash(file)
    if digest is not None:
        found.files[file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)] = digest


def _add_function(found: Provenance, value: Any, root: Path) -> None:
    function = inspect.unwrap(value) if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    try:
        file = Path(inspect.getsourcefile(function) or "").resolve()
        known = file.is_relative_to(root) and file.relative_to(root).as_posix() in found.files
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return
    if not known:
        name = f"{function.__module__}.{function.__qualname__}"
        found.functions[name] = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()


def _hash(file: Path) -> str | None:
    """Returns the SHA-256 of a file, of samples if it is large; None: it cannot be read, or is a device or a pipe."""
    try:
        if not file.is_file():
            return None
        size = file.stat().st_size
        with open(file, "rb") as opened:
            if size <= WHOLE_BYTES:
                return hashlib.file_digest(opened, "sha256").hexdigest()
            digest = hashlib.sha256(to_json(["sampled", size]).encode())
            for index in range(NUM_BLOCKS):
                opened.seek((size - BLOCK_BYTES) * index // (NUM_BLOCKS - 1))
                digest.update(opened.read(BLOCK_BYTES))
            return digest.hexdigest()
    except (OSError, ValueError):
        return None


def hash_data(splits: Mapping[str, Sequence[EvalInputItem]]) -> str:
    digest = hashlib.sha256()
    for split, items in splits.items():
        for item in items:
            digest.update(to_json([split, item.id, item.input_obj, item.expected_output_obj]).encode())
    return digest.hexdigest()
