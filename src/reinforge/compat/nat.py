"""Makes the import paths of the NeMo Agent Toolkit lead to reinforge's objects, so that its components run unchanged.

    from reinforge.compat import nat

    nat.install()
    from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter    # is reinforge.finetuning.TrainerAdapter

The objects are the same ones, so `isinstance` and registration work. Importing this module changes nothing; `install`
does, for the process. Where the toolkit itself is installed, `install` leaves its modules alone unless told not to.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from reinforge.errors import describe_error
from reinforge.rollout.isolation.worker_pool import WORKER_SETUP

logger = logging.getLogger(__name__)

PACKAGE = "nat"
ENTRY_POINT_GROUP = "nat.components"
ORIGIN = "<reinforge.compat.nat>"
PAGE = "docs/coming-from-nat.md"
MODULES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("nat_names.json").read_text(encoding="utf-8"))
"""Module of the toolkit -> name in it -> `module:name` of the object here that it is."""
INSTALL = "reinforge.compat.nat:install"  # what a worker process calls, to do the same


def install(*, over_installed: bool = False) -> bool:
    """Makes `import nat...` lead to reinforge, also in the worker processes of `isolation: process`.

    Args:
        over_installed: Also replace the modules of an installed toolkit that have a counterpart here; all other modules
            are then the toolkit's own.

    Returns:
        False: The toolkit is installed, and nothing was changed.
    """
    if any(isinstance(finder, NatFinder) for finder in sys.meta_path):
        return True
    is_installed = PACKAGE in sys.modules or importlib.util.find_spec(PACKAGE) is not None
    if is_installed and not over_installed:
        logger.warning(
            "the NeMo Agent Toolkit is installed, so `import nat` stays its own; its components do not run here unless "
            "you call reinforge.compat.nat.install(over_installed=True) before they are imported"
        )
        return False
    finder = NatFinder(is_installed=is_installed)
    for name in [name for name in sys.modules if finder.serves(name)]:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    WORKER_SETUP[INSTALL] = {"over_installed": over_installed}
    return True


def uninstall() -> None:
    """Undoes `install`; modules that have imported names keep them."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, NatFinder)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders]
    WORKER_SETUP.pop(INSTALL, None)
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == ORIGIN:
            del sys.modules[name]


def load_plugins() -> list[str]:
    """Imports the installed packages that register components for the toolkit; returns the names of their entries.

    A plugin that cannot be imported is logged with its error and does not affect the others.
    """
    loaded = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
            loaded.append(entry.name)
        except Exception as error:  # noqa: BLE001  a broken plugin must not affect the others
            logger.warning('plugin "%s" (%s) cannot be imported: %s', entry.name, entry.value, describe_error(error))
    return loaded


class NatFinder(MetaPathFinder, Loader):
    """Finds and makes the modules of the toolkit that have a counterpart here; others are an installed toolkit's."""

    def __init__(self, *, is_installed: bool):
        self.is_installed = is_installed
        parts = [name.split(".") for name in MODULES]
        self._packages = {".".join(each[:end]) for each in parts for end in range(1, len(each))}

    def serves(self, name: str) -> bool:
        return name in MODULES or (name in self._packages and not self.is_installed)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.serves(fullname):
            return ModuleSpec(fullname, self, origin=ORIGIN, is_package=fullname in self._packages)
        if fullname.partition(".")[0] == PACKAGE and not self.is_installed:
            raise ModuleNotFoundError(f"{fullname} has no counterpart in reinforge; see {PAGE}", name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return NatModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Marks the module; an installed package keeps its folder for its other modules."""
        module.__file__ = ORIGIN
        if self.is_installed and module.__name__ in self._packages:
            module.__path__ = _find_folders(module.__name__)


def _find_folders(package: str) -> list[str]:
    parent, _, _ = package.rpartition(".")
    path = list(sys.modules[parent].__path__) if parent else None
    for finder in sys.meta_path:
        if not isinstance(finder, NatFinder) and (spec := finder.find_spec(package, path)) is not None:
            return list(spec.submodule_search_locations or [])
    return []


class NatModule(ModuleType):
    """A module of the toolkit with reinforge's objects in it."""

    def __getattr__(self, name: str) -> Any:
        names = MODULES.get(self.__name__, {})
        if name == "__all__":
            return sorted(names)
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise AttributeError(
                f"{self.__name__}.{name} has no counterpart in reinforge (names that have: {known}); see {PAGE}"
            )
        module, _, attribute = names[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES.get(self.__name__, {})})
