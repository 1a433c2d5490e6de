"""Recognizes out-of-memory errors, which torch raises in three forms."""

from __future__ import annotations

import torch

NO_CPU_MEMORY = "DefaultCPUAllocator"
"""Part of the message of the plain RuntimeError that torch raises where a CPU has no memory left."""


def is_out_of_memory(cause: BaseException) -> bool:
    """Returns True for `MemoryError`, `torch.OutOfMemoryError` and the error of torch's CPU allocator."""
    return isinstance(cause, MemoryError | torch.OutOfMemoryError) or NO_CPU_MEMORY in str(cause)
