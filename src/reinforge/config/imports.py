"""Imports the objects that a configuration names as `package.module:name`.

People share configuration files, so a file must not be able to run arbitrary installed code: it can only name the
project's own modules, reinforge and registered plugins. `os:system` is rejected without importing anything.
"""

from __future__ import annotations

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

SPEC = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")


def import_object(spec: str, project_root: Path, *, path: str = "") -> Any:
    """Returns the object that `package.module:name` names.

    Args:
        spec: The module, a colon, and a name in it (`module:Class.method` works too).
        project_root: Modules in this folder are allowed; it is first on `sys.path` during the import.
        path: Path of the spec in the configuration, for messages.

    Raises:
        ConfigError: The spec is malformed, its module is not allowed or does not exist, or the import failed.
    """
    match = SPEC.fullmatch(spec)
    if match is None:
        fix = 'write "agent:my_agent" for my_agent in the file agent.py'
        raise ConfigError(Problem(path, f'"{spec}" is not of the form package.module:name', fix))
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
        return _get_attribute(module, match["name"], spec, path)


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
    if top == "reinforge" or top in _list_plugin_packages():
        return
    try:
        module_spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module that was put into sys.modules without a spec
        module_spec = None
    if module_spec is None:
        names = [info.name for info in pkgutil.iter_modules([str(project_root)])]
        message = f'there is no module "{top}"{did_you_mean(top, names)}'
        raise ConfigError(Problem(path, message, f"check the name; modules are looked up in {project_root}"))
    files = _list_files(module_spec)
    if files and all(_is_own(file, project_root) for file in files):
        return
    where = f"it is installed at {files[0]}" if files else "it is built into Python"
    fix = f"call it from a function of your own in {project_root}, and name that function"
    if (project_root / f"{top}.py").exists() or (project_root / top).is_dir():
        fix = f'"{top}" is also a module outside the project, which takes precedence; rename yours'
    message = f'"{spec}" is not allowed: {top} is not part of the project, of reinforge or of a plugin; {where}'
    raise ConfigError(Problem(path, message, fix))


def _list_plugin_packages() -> set[str]:
    entries = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {entry.module.partition(".")[0] for entry in entries}


def _list_files(module_spec: ModuleSpec) -> list[Path]:
    if module_spec.has_location and module_spec.origin:
        return [Path(module_spec.origin).resolve()]
    return [Path(folder).resolve() for folder in module_spec.submodule_search_locations or ()]


def _is_own(file: Path, project_root: Path) -> bool:
    """Returns True for a file of the project; a `.venv` or Python itself may be in the same folder and is not."""
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    if not file.is_relative_to(project_root) or any(file.is_relative_to(folder) for folder in standard):
        return False
    return not {"site-packages", "dist-packages"}.intersection(file.relative_to(project_root).parts)


def _get_attribute(module: Any, name: str, spec: str, path: str) -> Any:
    value = module
    for part in name.split("."):
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
    """Returns the modules of a package, spelled as in a spec."""
    if not package:
        return []
    loaded = sys.modules.get(package)
    return [f"{package}.{info.name}" for info in pkgutil.iter_modules(getattr(loaded, "__path__", None) or ())]
