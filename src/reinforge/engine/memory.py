"""Recognising that memory ran out, which torch says in three ways."""

from __future__ import annotations

import torch

NO_CPU_MEMORY = "DefaultCPUAllocator"
"""Stands in what torch says where the machine has no memory left; it is a plain RuntimeError."""


def is_out_of_memory(cause: BaseException) -> bool:
    """True for `MemoryError`, `torch.OutOfMemoryError` and what torch's allocator on the CPU raises."""
    return isinstance(cause, MemoryError | torch.OutOfMemoryError) or NO_CPU_MEMORY in str(cause)
