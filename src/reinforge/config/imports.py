"""Objects that a configuration names as `package.module:name`.

A configuration is data that people pass around, so it must not be able to run what happens to be installed: only the
project's own files, reinforge and registered plugins can be named. `os:system` is refused without importing anything.
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
        project_root: Modules whose file lies below this folder may be named; it leads `sys.path` during the import.
        path: Where the spec stands in the configuration, for messages.

    Raises:
        ConfigError: The spec is malformed, names a module that may not be named or is absent, or the import failed.
    """
    match = SPEC.fullmatch(spec)
    if match is None:
        fix = 'write "agent:my_agent" for my_agent in the file agent.py'
        raise ConfigError(Problem(path, f'"{spec}" is not of the form package.module:name', fix))
    project_root = project_root.resolve()
    with _leading(project_root):
        _refuse_foreign(match["module"], spec, project_root, path)
        try:
            module = importlib.import_module(match["module"])
        except Exception as error:
            message = f'importing "{match["module"]}" failed: {describe_error(error)}'
            fix = ""
            if isinstance(error, ModuleNotFoundError) and f"{match['module']}.".startswith(f"{error.name}."):
                package = match["module"].rpartition(".")[0]
                message = f'there is no module "{match["module"]}"{did_you_mean(match["module"], _modules_in(package))}'
                fix = f"modules are looked for below {project_root}"
                if match["module"].endswith(".py"):
                    fix = f'write "{match["module"].removesuffix(".py")}:{match["name"]}", without .py'
            raise ConfigError(Problem(path, message, fix)) from error
        return _attribute(module, match["name"], spec, path)


@contextmanager
def _leading(folder: Path) -> Iterator[None]:
    """Puts a folder first on `sys.path`, and afterwards last: the user's functions may import when they are called."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def _refuse_foreign(module: str, spec: str, project_root: Path, path: str) -> None:
    """Raises unless the top-level package may be named; looks it up without importing anything."""
    top = module.partition(".")[0]
    if top == "reinforge" or top in _plugin_packages():
        return
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module that was put into sys.modules by hand
        found = None
    if found is None:
        names = [info.name for info in pkgutil.iter_modules([str(project_root)])]
        message = f'there is no module "{top}"{did_you_mean(top, names)}'
        raise ConfigError(Problem(path, message, f"modules are looked for below {project_root}"))
    places = _places(found)
    if places and all(_is_own(place, project_root) for place in places):
        return
    where = f"it is {places[0]}" if places else "it is built into Python"
    fix = f"name a function of your own below {project_root} that does what you need"
    if (project_root / f"{top}.py").exists() or (project_root / top).is_dir():
        fix = f'"{top}" is also the name of a module outside the project, which wins; rename your own'
    message = f'"{spec}" is refused: {top} is not part of the project, of reinforge or of a plugin; {where}'
    raise ConfigError(Problem(path, message, fix))


def _plugin_packages() -> set[str]:
    entries = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {entry.module.partition(".")[0] for entry in entries}


def _places(found: ModuleSpec) -> list[Path]:
    if found.has_location and found.origin:
        return [Path(found.origin).resolve()]
    return [Path(place).resolve() for place in found.submodule_search_locations or ()]


def _is_own(place: Path, project_root: Path) -> bool:
    """Returns True for a file below the project that is not of a `.venv` or of Python, which may be there too."""
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    if not place.is_relative_to(project_root) or any(place.is_relative_to(folder) for folder in standard):
        return False
    return not {"site-packages", "dist-packages"}.intersection(place.relative_to(project_root).parts)


def _attribute(module: Any, name: str, spec: str, path: str) -> Any:
    value = module
    for part in name.split("."):
        if not hasattr(value, part):
            names = [known for known in vars(value) if not known.startswith("_")] if hasattr(value, "__dict__") else []
            message = f'"{spec}": {getattr(value, "__name__", value)} has no "{part}"{did_you_mean(part, names)}'
            raise ConfigError(Problem(path, message, f"it has {', '.join(sorted(names)[:20])}" if names else ""))
        value = getattr(value, part)
        if inspect.ismodule(value):
            raise ConfigError(Problem(path, f'"{spec}" reaches through the module {value.__name__}; name it directly'))
    return value


def _modules_in(package: str) -> list[str]:
    """Returns the modules beside the one that is absent, as they are written in a spec."""
    if not package:
        return []
    loaded = sys.modules.get(package)
    return [f"{package}.{info.name}" for info in pkgutil.iter_modules(getattr(loaded, "__path__", None) or ())]
