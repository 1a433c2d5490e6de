"""How much memory this process has used at most, on the device that a model is on."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from reinforge.engine.machine import measure_machine

KIB = 1024


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of a device, in bytes.

    Attributes:
        device: Its name: `cpu`, `cuda:0`.
        peak: The most that this process has used; None: unknown.
        total: All there is for this process; None: unknown.
    """

    device: str
    peak: int | None
    total: int | None


def measure_memory(device: torch.device) -> MemoryUse:
    """Returns the peak of this process so far: of the accelerator's memory, or of the machine's for a CPU."""
    if device.type == "cuda":
        return MemoryUse(
            str(device), torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
        )
    if device.type == "mps":
        return MemoryUse(str(device), torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory())
    return MemoryUse("cpu", _measure_peak(), measure_machine())


def _measure_peak() -> int | None:
    try:
        import resource
    except ImportError:  # on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB
