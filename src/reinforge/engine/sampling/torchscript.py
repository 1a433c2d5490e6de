"""Runs functions of many small tensor operations without Python's lock between the operations."""

import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)


def compile_torchscript(
    function: Callable[..., Any], device: torch.device, *, enabled: bool = True
) -> Callable[..., Any]:
    """Returns the function compiled by TorchScript on a CPU; unchanged on other devices, where it is untested.

    Between any two operations a thread that runs Python waits for the lock, up to 5 ms each time while agents run;
    TorchScript releases the lock once for all of them. torch calls TorchScript deprecated: without it the function
    stays unchanged.

    Args:
        device: Where its tensors are.
        enabled: False: return the function unchanged.
    """
    return _compile(function) if enabled and device.type == "cpu" else function


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.jit.script(function)
        except Exception as cause:  # noqa: BLE001  the plain function is as correct, whatever the reason
            logger.info("sampling without TorchScript (slower): %s", cause)
            return function
