"""Kernels that libraries look for elsewhere: told in one line each, and never downloaded."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from functools import cache

from reinforge.engine.installed import BITSANDBYTES, is_installed

logger = logging.getLogger(__name__)

FALLBACK = re.compile(r"falling back to its reference PyTorch implementation because `([\w-]+)` is not installed")
HUB_KERNELS = "transformers.integrations.hub_kernels"


class MissingKernelFilter(logging.Filter):
    """Replaces transformers' warnings by one line of ours for each library."""

    def __init__(self) -> None:
        super().__init__()
        self._named: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns False for a warning that a kernel is missing."""
        found = FALLBACK.search(record.getMessage())
        if found is None:
            return True
        if found[1] not in self._named:
            self._named.add(found[1])
            logger.info("%s is not installed: its layers run in plain torch (exact, but slower)", found[1])
        return False


def shorten_kernel_warnings() -> None:
    """Installs the filter, once in a process."""
    source = logging.getLogger(HUB_KERNELS)
    if not any(isinstance(each, MissingKernelFilter) for each in source.filters):
        source.addFilter(MissingKernelFilter())


@cache
def import_bitsandbytes() -> None:
    """Imports the package, where it is installed, before PEFT does.

    It downloads machine code from the hub as it is imported, if the package `kernels` is installed, and warns if not;
    here it finds no such package and says nothing.
    """
    if BITSANDBYTES in sys.modules or not is_installed(BITSANDBYTES):
        return
    source, hidden = logging.getLogger("bitsandbytes.backends.cpu.ops"), object()
    found, level = sys.modules.get("kernels", hidden), source.level
    sys.modules["kernels"] = None  # type: ignore[assignment]
    source.setLevel(logging.ERROR)
    try:
        importlib.import_module(BITSANDBYTES)
    except (ImportError, OSError, RuntimeError) as error:  # PEFT does without it, and `quantization` says that it fails
        logger.info("bitsandbytes cannot be imported: %s", error)
    finally:
        source.setLevel(level)
        if found is hidden:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = found  # type: ignore[assignment]
