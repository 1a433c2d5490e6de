"""PEFT, and bitsandbytes where weights are quantized: both are imported late, and neither downloads anything."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from functools import cache

from reinforge.engine.packages import BITSANDBYTES, is_installed

logger = logging.getLogger(__name__)

_IMPORTING = threading.Lock()


@cache
def import_peft() -> None:
    """Imports PEFT without bitsandbytes, which takes 4 s to import.

    Where weights are quantized, `import_bitsandbytes` has imported it before, and PEFT then uses its layers.
    """
    with _IMPORTING:
        is_hidden = BITSANDBYTES not in sys.modules
        if is_hidden:
            sys.modules[BITSANDBYTES] = None  # type: ignore[assignment]
        try:
            from peft.tuners.lora import model
        finally:
            if is_hidden:
                del sys.modules[BITSANDBYTES]
    model.is_bnb_available = model.is_bnb_4bit_available = _is_imported  # type: ignore[assignment]


def _is_imported() -> bool:
    return sys.modules.get(BITSANDBYTES) is not None


@cache
def import_bitsandbytes() -> None:
    """Imports the package, where it is installed, before PEFT does.

    It downloads machine code from the hub as it is imported, if the package `kernels` is installed, and warns if not;
    here it finds no such package and says nothing.
    """
    with _IMPORTING:
        if BITSANDBYTES not in sys.modules and is_installed(BITSANDBYTES):
            _import_without_kernels()


def _import_without_kernels() -> None:
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
