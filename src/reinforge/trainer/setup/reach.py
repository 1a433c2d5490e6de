"""What a configuration reaches beyond its own file, listed without importing any of it.

imports      workflow.function: task:agent (task.py)
commands     workflow: node agent.js (/usr/bin/node)
variables    JUDGE_KEY in llms.judge.api_key, sent to https://judge.example/v1
hosts        https://judge.example/v1 (llms.judge)
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from reinforge.config.document import PLACEHOLDER, KeyPath, format_path
from reinforge.config.imports import SPEC
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import load_config
from reinforge.config.schema_walk import iterate_models, iterate_values
from reinforge.errors import ConfigError
from reinforge.registry import REGISTRY, Registry
from reinforge.rollout.models.endpoint_config import OPENAI_URL, EndpointConfig, resolve_endpoint
from reinforge.trainer.provenance import HUB_ID, MODEL_KEYS

HUB = "https://huggingface.co"
BUNDLED = "bundled:"


@dataclass(frozen=True, slots=True)
class NamedImport:
    """Python code that a configuration names."""

    path: str
    spec: str  # `package.module:name`, or the `_type` of a component of a plugin
    file: str  # the module's file, or the plugin's module; empty: there is none

    def __str__(self) -> str:
        return f"{self.path}: {self.spec}" + (f" ({self.file})" if self.file else " (not found)")


@dataclass(frozen=True, slots=True)
class NamedCommand:
    """A program that a configuration runs."""

    path: str
    command: str
    program: str  # its file; in a container, the image; empty: not found

    def __str__(self) -> str:
        return f"{self.path}: {self.command} ({self.program or 'not found'})"


@dataclass(frozen=True, slots=True)
class NamedVariable:
    """An environment variable that a configuration uses."""

    name: str
    path: str  # path of the key; empty: the value is read without being named
    host: str  # the URL that the component sends its settings to; empty: none

    def __str__(self) -> str:
        return f"{self.name} in {self.path}" + (f", sent to {self.host}" if self.host else "")


@dataclass
class Reach:
    """Code, variables and hosts that a configuration reaches."""

    imports: list[NamedImport] = field(default_factory=list)
    commands: list[NamedCommand] = field(default_factory=list)
    variables: list[NamedVariable] = field(default_factory=list)
    hosts: dict[str, list[str]] = field(default_factory=dict)  # URL -> paths of the components that call it

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def format_rows(self) -> list[tuple[str, str]]:
        return [
            *(("imports", str(each)) for each in self.imports),
            *(("command", str(each)) for each in self.commands),
            *(("variable", str(each)) for each in self.variables),
            *(("host", f"{url} ({', '.join(paths)})") for url, paths in self.hosts.items()),
        ]

    def format_sent_variables(self) -> list[tuple[str, str]]:
        """Returns the variables that leave the machine, as a setting to print when a run starts."""
        sent = [str(each) for each in self.variables if each.host]
        return [("variables", "; ".join(sent))] if sent else []


def list_reach(loaded: LoadedConfig, registry: Registry | None = None) -> Reach:
    """Returns what a configuration reaches, and the validation file that it names; imports nothing of the project."""
    reach = Reach()
    for path, endpoint, url in _iterate_hosts(loaded):
        reach.hosts.setdefault(url, []).append(path)
        if isinstance(endpoint, EndpointConfig) and endpoint.base_url is None and endpoint.api_key is None:
            reach.variables.append(NamedVariable("OPENAI_API_KEY", f"{path}.api_key", url))
    reach.imports += _list_imports(loaded, registry or REGISTRY)
    reach.commands += _list_commands(loaded)
    reach.variables += _list_variables(loaded, reach.hosts)
    if (other := _load_validation_file(loaded, registry)) is not None:
        further = list_reach(other, registry)
        reach.imports += further.imports
        reach.commands += further.commands
        reach.variables += further.variables
        for url, paths in further.hosts.items():
            reach.hosts.setdefault(url, []).extend(f"{other.path}: {path}" for path in paths)
    return reach


def _list_imports(loaded: LoadedConfig, registry: Registry) -> Iterator[NamedImport]:
    for path, value in iterate_values(loaded.config):
        match = SPEC.fullmatch(value) if isinstance(value, str) and not value.startswith(BUNDLED) else None
        if match is not None:
            file = _find_module(match["module"], loaded.project_root)
            if file is not None or str(path[-1]).endswith("function"):
                yield NamedImport(format_path(path), str(value), _shorten(file, loaded.project_root))
    for path, model in iterate_models(loaded.config):
        module, name = type(model).__module__, loaded.types.get(path)
        if name is not None and module.partition(".")[0] != "reinforge":
            yield NamedImport(format_path((*path, "_type")), name, module)


def _list_commands(loaded: LoadedConfig) -> Iterator[NamedCommand]:
    for path, model in iterate_models(loaded.config):
        command = getattr(model, "command", None)  # a block that has one runs it as a program
        if isinstance(command, list) and command:
            written = shlex.join(read_command(loaded.placeholders, path, command))
            container = getattr(model, "container", None)
            yield NamedCommand(format_path(path), written, _find_file(model, loaded.project_root, container))


def read_command(placeholders: Mapping[KeyPath, str], path: KeyPath, command: Sequence[str]) -> list[str]:
    """Returns a command as it is written, with `${VAR}` in place of values."""
    whole = placeholders.get((*path, "command"))
    if whole is not None:
        return shlex.split(whole)
    return [placeholders.get((*path, "command", index), part) for index, part in enumerate(command)]


def _find_file(model: Any, root: Path, container: Any) -> str:
    if container is not None:
        return f"in {container.image}"
    from reinforge.rollout.workflows.command_workflow import find_folder, find_program

    try:
        return find_program(model.command[:1], find_folder(getattr(model, "cwd", None), root))
    except ConfigError:
        return ""


def _find_module(name: str, root: Path) -> Path | None:
    """Returns the file of a module, found without importing its packages; None: there is none."""
    places: list[str] | None = [str(root), *sys.path]
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        if places is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _shorten(file: Path | None, root: Path) -> str:
    if file is None:
        return ""
    return str(file.relative_to(root)) if file.is_relative_to(root) else str(file)


def _list_variables(loaded: LoadedConfig, hosts: dict[str, list[str]]) -> Iterator[NamedVariable]:
    by_component = {path: url for url, paths in hosts.items() for path in paths}
    for path, raw in loaded.placeholders.items():
        above = (format_path(path[:end]) for end in range(len(path), 0, -1))
        host = next((by_component[each] for each in above if each in by_component), "")
        for match in PLACEHOLDER.finditer(raw):
            if match["name"]:
                yield NamedVariable(match["name"], format_path(path), host)


def _iterate_hosts(loaded: LoadedConfig) -> Iterator[tuple[str, Any, str]]:
    for path, model in iterate_models(loaded.config):
        if isinstance(model, EndpointConfig):
            yield format_path(path), model, _find_url(model)
            continue
        url = getattr(type(model), "url", None)
        if isinstance(url, property):  # a block that makes it from other settings; empty: it calls nothing
            if made := str(url.__get__(model)):
                yield format_path(path), model, made
            continue
        for name in type(model).model_fields:
            value = getattr(model, name)
            if isinstance(value, str) and value.startswith(("http://", "https://")) and "\n" not in value:
                yield format_path(path), model, value
            elif name in MODEL_KEYS and isinstance(value, str) and HUB_ID.fullmatch(value) and not Path(value).exists():
                yield format_path((*path, name)), model, HUB


def _find_url(endpoint: EndpointConfig) -> str:
    try:
        return resolve_endpoint(endpoint)[0]
    except ConfigError:  # no key, which `check` reports
        return endpoint.base_url or OPENAI_URL


def _load_validation_file(loaded: LoadedConfig, registry: Registry | None) -> LoadedConfig | None:
    run = loaded.config.finetuning.run_configuration
    if run is None or run.validation_config_file is None:
        return None
    try:
        return load_config(run.validation_config_file, registry=registry)
    except ConfigError:  # which `check` reports
        return None
