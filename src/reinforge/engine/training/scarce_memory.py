"""How a process that trains manages with little memory: it returns what it freed, and keeps copies in files."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from reinforge.files import storage_boundary

M_MMAP_THRESHOLD = -3  # of glibc's mallopt
KEPT_BYTES = 2**18


def return_freed_memory() -> None:
    """Lets this process return every block of 256 KiB and more to the system as soon as it is freed.

    glibc keeps blocks of up to 32 MiB, in pieces that later layers do not fit into: nearly half of what it takes to
    train SmolLM's shape in two shards. Without them a step takes about a fifth longer, so this is for scarce memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


ALIGNMENT = 64


def allocate_file(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of the same shapes and dtypes whose memory is a file of their own in the temporary folder.

    The file has no name, so it is gone with the last of them, also after `kill -9`.
    """
    starts, size = {}, 0
    for name, tensor in like.items():
        starts[name] = size
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    size = max(size, ALIGNMENT)  # none has no memory
    with storage_boundary(Path(tempfile.gettempdir()), size), tempfile.NamedTemporaryFile(prefix="reinforge-") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk would kill the process later
        content = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    return {
        name: content[starts[name] : starts[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, tensor in like.items()
    }


def copy_elsewhere(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of an accelerator's tensors in the host's memory, and of the host's in a file without a name.

    The kernel may write such a file to disk and free its memory. It exists as long as one of its copies.
    """
    on_host = [name for name, tensor in tensors.items() if tensor.device.type == "cpu"]
    found = allocate_file({name: tensors[name] for name in on_host})
    for name in on_host:
        found[name].copy_(tensors[name].detach())
    return {name: found[name] if name in found else tensor.detach().cpu() for name, tensor in tensors.items()}
