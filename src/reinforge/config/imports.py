"""Imports the objects that a configuration names as `package.module:name`.

People share configuration files, so a file must not be able to run arbitrary installed code: it can only name the
project's own modules, reinforge and registered plugins. `os:system` is rejected without importing anything.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError, Problem, describe_error, did_you_mean
from reinforge.registry import ENTRY_POINT_GROUP

PYTHON_OBJECT = re.compile(r"<python (?P<name>[^\s<>:]+:\S+)>")  # the name of a local function has <locals>
"""How a resolved configuration names an object that only Python code can pass, such as a function of a notebook."""
SPEC = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")


def import_object(spec: str, project_root: Path, *, path: str = "") -> Any:
    """Returns the object that `package.module:name` names (`module:Class.method` works too).

    Args:
        project_root: Modules in this folder are allowed; it is first on `sys.path` during the import.
        path: Path of the spec in the configuration, for messages.
    """
    match = SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(_explain_spec(spec, path))
    project_root = project_root.resolve()
    with _first_on_path(project_root):
        _check_allowed(match["module"], spec, project_root, path)
        try:
            module = importlib.import_module(match["module"])
        except Exception as error:
            message = f'importing "{match["module"]}" failed: {describe_error(error)}'
            fix = ""
            if isinstance(error, ModuleNotFoundError) and f"{match['module']}.".startswith(f"{error.name}."):
                package = match["module"].rpartition(".")[0]
                message = (
                    f'there is no module "{match["module"]}"{did_you_mean(match["module"], _list_modules(package))}'
                )
                fix = f"check the name; modules are looked up in {project_root}"
                if match["module"].endswith(".py"):
                    fix = f'write "{match["module"].removesuffix(".py")}:{match["name"]}", without .py'
            raise ConfigError(Problem(path, message, fix)) from error
        found = _get_attribute(module, match["name"], spec, path)
        _check_origin(found, spec, project_root, path)
        return found


def _explain_spec(spec: str, path: str) -> Problem:
    """Returns the problem of a malformed spec, with the spelling that was probably meant.

    Example: `my_agent.agent` -> "my_agent:agent"; `tasks/my_agent.py:agent` -> "tasks.my_agent:agent".
    """
    if (passed := PYTHON_OBJECT.fullmatch(spec)) is not None:
        message = f"{passed['name']} was passed to reinforge.finetune in Python; resume the run there"
        return Problem(path, message, "reinforge.finetune(..., resume=FOLDER) with the same agent, dataset and reward")
    module, colon, name = spec.partition(":") if ":" in spec else spec.rpartition(".")
    meant = f"{module.removeprefix('./').removesuffix('.py').replace('/', '.')}:{name}" if colon else ""
    message, fix = f'"{spec}" is not of the form package.module:name', 'write "agent:my_agent" for my_agent in agent.py'
    if meant != spec and SPEC.fullmatch(meant):
        return Problem(path, f'{message}, did you mean "{meant}"?', f'write "{meant}", with a colon before the name')
    return Problem(path, message, fix)


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Puts a folder first on `sys.path`, and last afterwards: the user's functions may import when they are called."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def _check_allowed(module: str, spec: str, project_root: Path, path: str) -> None:
    """Raises unless the top-level package is allowed; finds it without importing anything."""
    top = module.partition(".")[0]
    module_spec = _find_spec(top)
    files = _list_files(module_spec) if module_spec else []
    if (files and all(is_own_file(file, project_root) for file in files)) or _is_trusted_package(top):
        return
    if module_spec is None:
        names = [info.name for info in pkgutil.iter_modules([str(project_root)])]
        message = f'there is no module "{top}"{did_you_mean(top, names)}'
        raise ConfigError(Problem(path, message, f"check the name; modules are looked up in {project_root}"))
    where = f"it is installed at {files[0]}" if files else "it is built into Python"
    fix = f"call it from a function of your own in {project_root}, and name that function"
    if (project_root / f"{top}.py").exists() or (project_root / top).is_dir():
        fix = f'"{top}" is also a module outside the project, which takes precedence; rename yours'
    message = f'"{spec}" is not allowed: {top} is not part of the project, of reinforge or of a plugin; {where}'
    raise ConfigError(Problem(path, message, fix))


def _check_origin(value: Any, spec: str, project_root: Path, path: str) -> None:
    """Raises if a module of the project only passes on a function or class of somewhere else: `from os import system`.

    An object that can be called counts by its class, a `functools.partial` by its function; data is allowed.
    """
    while isinstance(value, functools.partial):
        value = value.func
    if not callable(value):
        return
    owner = value if inspect.isclass(value) or inspect.isroutine(value) else _find_owner(value)
    module = getattr(owner, "__module__", None) or getattr(type(getattr(owner, "__self__", None)), "__module__", "")
    loaded = getattr(sys.modules.get(str(module)), "__file__", None)
    if isinstance(loaded, str) and is_own_file(Path(loaded).resolve(), project_root):
        return
    if _is_trusted_package(str(module).partition(".")[0]):
        return
    message = (
        f'"{spec}" is not allowed: it is {module}.{getattr(owner, "__qualname__", "?")}, which the project imports'
    )
    fix = f"call it from a function of your own in {project_root}, and name that function"
    raise ConfigError(Problem(path, message, fix))


def _find_owner(value: Any) -> Any:
    """Returns what stands for an object that is called: the function that it wraps (`lru_cache`), or its class."""
    wrapped = getattr(value, "__wrapped__", None)
    return wrapped if inspect.isroutine(wrapped) else type(value)


def _is_trusted_package(name: str) -> bool:
    plugins = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return name == "reinforge" or any(entry.module.partition(".")[0] == name for entry in plugins)


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module that was put into sys.modules without a spec
        return None


def _list_files(module_spec: ModuleSpec) -> list[Path]:
    if module_spec.has_location and module_spec.origin:
        return [Path(module_spec.origin).resolve()]
    return [Path(folder).resolve() for folder in module_spec.submodule_search_locations or ()]


def is_own_file(file: Path, project_root: Path) -> bool:
    """Returns True for a file of the project; a `.venv` or Python itself may be in the same folder and is not.

    Both paths are absolute, without symbolic links.
    """
    if not file.is_relative_to(project_root) or any(file.is_relative_to(folder) for folder in _find_standard_library()):
        return False
    return not {"site-packages", "dist-packages"}.intersection(file.relative_to(project_root).parts)


@functools.cache
def _find_standard_library() -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


def _get_attribute(module: Any, name: str, spec: str, path: str) -> Any:
    value = module
    for part in name.split("."):
        if part.startswith("__"):
            message = f'"{spec}" is not allowed: {part} is an attribute of Python itself'
            raise ConfigError(Problem(path, message, "name a function or a class of your own"))
        if not hasattr(value, part):
            names = [known for known in vars(value) if not known.startswith("_")] if hasattr(value, "__dict__") else []
            message = f'"{spec}": {getattr(value, "__name__", value)} has no "{part}"{did_you_mean(part, names)}'
            raise ConfigError(Problem(path, message, f"use one of: {', '.join(sorted(names)[:20])}" if names else ""))
        value = getattr(value, part)
        if inspect.ismodule(value):
            raise ConfigError(
                Problem(path, f'"{spec}" reaches into the module {value.__name__}; name that module before the colon')
            )
    return value


def _list_modules(package: str) -> list[str]:
    if not package:
        return []
    loaded = sys.modules.get(package)
    return [f"{package}.{info.name}" for info in pkgutil.iter_modules(getattr(loaded, "__path__", None) or ())]
