"""Losses of a project, for processes that have not imported its files.

A loss is named in a job: a built-in one, one that the project has registered, or `package.module:function`. The driver
sends a loss of the project as a function by value, with those functions of its own modules that it calls; torch and
other installed packages are imported where it runs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from reinforge.types.sample import LossSpec

INSTALLED = ("site-packages", "dist-packages")


def pack_loss(spec: LossSpec) -> bytes | None:
    """Returns the function of a loss for `unpack_loss`; None: every installation of reinforge has it."""
    from reinforge.engine.losses.base import find_loss

    loss = find_loss(spec)
    module = sys.modules.get(getattr(loss, "__module__", ""))
    if module is None or not _is_of_project(module):
        return None
    from ray import cloudpickle

    with _pickled_by_value(cloudpickle, [module, *_find_own_imports(module)]):
        packed: bytes = cloudpickle.dumps(loss)
    return packed


def unpack_loss(spec: LossSpec, packed: bytes | None) -> LossSpec:
    """Registers the function and returns a spec that names it; without one, the spec itself."""
    if packed is None:
        return spec
    from ray import cloudpickle

    from reinforge.engine.losses.base import register_loss

    name = f"project:{spec.name}".replace(":", ".")  # a colon would name a module
    register_loss(name)(cloudpickle.loads(packed))
    return LossSpec(name, spec.params)


def _is_of_project(module: ModuleType) -> bool:
    """True for a module of the user's own files, False for reinforge and installed packages."""
    top = module.__name__.partition(".")[0]
    file = getattr(module, "__file__", None)
    if top == "reinforge" or top in sys.stdlib_module_names:
        return top == "__main__"
    return file is None or not any(part in file for part in INSTALLED)


def _find_own_imports(module: ModuleType) -> list[ModuleType]:
    found: dict[str, ModuleType] = {}
    open_ = [module]
    while open_:
        for value in vars(open_.pop()).values():
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            used = sys.modules.get(name) if isinstance(name, str) else None
            if used is not None and used is not module and name not in found and _is_of_project(used):
                found[str(name)] = used
                open_.append(used)
    return list(found.values())


@contextmanager
def _pickled_by_value(cloudpickle: Any, modules: list[ModuleType]) -> Iterator[None]:
    chosen = [each for each in modules if each.__name__ != "__main__"]  # which always is
    for module in chosen:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in chosen:
            cloudpickle.unregister_pickle_by_value(module)


def find_module(spec: LossSpec) -> str | None:
    """Returns the module of a loss of the project, which another process on this machine can import; None: built in."""
    from reinforge.engine.losses.base import find_loss

    module = sys.modules.get(getattr(find_loss(spec), "__module__", ""))
    return module.__name__ if module is not None and _is_of_project(module) else None


def import_module(name: str, search_path: Sequence[str]) -> None:
    """Imports a module by its name, also from the folders in which another process finds its own."""
    if name in sys.modules:
        return
    sys.path += [folder for folder in search_path if folder not in sys.path]
    importlib.import_module(name)
