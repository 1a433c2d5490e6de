"""The accelerators that torch can use on this machine, in words, for bug reports."""

from __future__ import annotations

import torch


def list_accelerators() -> list[str]:
    """Returns one line per accelerator: name, memory, capability; none: torch sees the CPU only.

    Example: `["cuda:0 NVIDIA L4, 22.0 GiB, compute capability 8.9"]`.
    """
    found = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            memory, capability = about.total_memory / 2**30, f"{about.major}.{about.minor}"
            found.append(f"cuda:{index} {about.name}, {memory:.1f} GiB, compute capability {capability}")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def count_gpus() -> int:
    """Returns the number of CUDA devices that this process may use, without starting any of them."""
    return torch.cuda.device_count()
