"""Whether the devices that torch finds compute what they should."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reinforge.engine.accelerators import list_accelerators
from reinforge.engine.machine import count_cpus, measure_machine

SIZE = 64
TOLERANCE = 1e-2
"""Accelerators may compute products of float32 with fewer bits."""


@dataclass(frozen=True, slots=True)
class DeviceTrial:
    """What a device did.

    Attributes:
        name: The device, with its memory.
        problem: What went wrong; empty: nothing did.
    """

    name: str
    problem: str = ""


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
