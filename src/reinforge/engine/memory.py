"""Recognizes out-of-memory errors, which torch raises in four forms, and frees what an accelerator's cache holds."""

from __future__ import annotations

import torch

NO_CPU_MEMORY = "DefaultCPUAllocator"
"""Part of the message of the plain RuntimeError that torch raises where a CPU has no memory left."""

NO_MPS_MEMORY = "MPS backend out of memory"
"""The same on Apple's GPUs."""


def is_out_of_memory(cause: BaseException) -> bool:
    return isinstance(cause, MemoryError | torch.OutOfMemoryError) or any(
        part in str(cause) for part in (NO_CPU_MEMORY, NO_MPS_MEMORY)
    )


def free_cached_memory(device: torch.device) -> None:
    """Returns memory that torch keeps for later tensors of an accelerator, so that larger ones find room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
