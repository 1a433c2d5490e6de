"""Devices: how many there are, what fits into their memory, and whether they compute right."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from reinforge.engine.machine import count_cpus, measure_machine


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


NO_CPU_MEMORY = "DefaultCPUAllocator"
"""Part of the message of the plain RuntimeError that torch raises where a CPU has no memory left."""

NO_MPS_MEMORY = "MPS backend out of memory"  # the same on Apple's GPUs


def is_out_of_memory(cause: BaseException) -> bool:
    return isinstance(cause, MemoryError | torch.OutOfMemoryError) or any(
        part in str(cause) for part in (NO_CPU_MEMORY, NO_MPS_MEMORY)
    )


def copy_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    is_staged = device.type == "cuda"  # MPS would read the batch's own arrays after they have changed
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=is_staged)


def free_cached_memory(device: torch.device) -> None:
    """Returns memory that torch keeps for later tensors of an accelerator, so that larger ones find room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def repeat_sums(device: torch.device, *, enabled: bool) -> None:
    """Makes a GPU add in the same order in every run, with the kernels that torch has for this.

    A process asks for it before its first product: cuBLAS reads its variable then.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(enabled, warn_only=True)  # a few operations have no such kernel
        torch.backends.cuda.enable_mem_efficient_sdp(not enabled)  # whose gradient then stays in any order


KIB = 1024


class Destination(NamedTuple):
    """Where weights go, and in which data type."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of a device, in bytes."""

    device: str  # its name: `cpu`, `cuda:0`
    peak: int | None  # the most that this process has used; None: unknown
    total: int | None  # all there is for this process; None: unknown


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


SIZE = 64
TOLERANCE = 1e-2  # accelerators may compute products of float32 with fewer bits


@dataclass(frozen=True, slots=True)
class DeviceTrial:
    """What a device did."""

    name: str  # the device, with its memory
    problem: str = ""  # what went wrong; empty: nothing did


def try_devices() -> list[DeviceTrial]:
    """Returns one trial for each kind of device that torch finds, the CPU first."""
    memory = measure_machine()
    amount = "an unknown amount of memory" if memory is None else f"{memory / 2**30:.1f} GiB"
    names = {"cpu": f"cpu, {count_cpus()} cores, {amount}"}
    if torch.cuda.is_available():
        names["cuda"] = "; ".join(line for line in list_accelerators() if line.startswith("cuda"))
    if torch.backends.mps.is_available():
        names["mps"] = "mps"
    return [DeviceTrial(name, find_wrong_result(device)) for device, name in names.items()]


def describe_torch() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def find_wrong_result(device: str) -> str:
    """Returns what is wrong with a matrix product and its gradient on a device; empty: nothing is."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    try:
        weight = left.to(device).requires_grad_()
        (weight @ right.to(device)).square().mean().backward()
        assert weight.grad is not None  # backward sets it
        found = weight.grad.cpu()
    except Exception as error:  # noqa: BLE001  a driver may fail in any way
        return f"{type(error).__name__}: {error}"
    plain = left.detach()
    expected = 2 * (plain @ right) @ right.T / SIZE**2
    difference = float((found - expected).abs().max())
    return "" if difference <= TOLERANCE else f"a gradient is wrong by {difference:.2g}"
