"""Functions of many small tensor operations, run without Python's lock between them."""

import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)


def scripted(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Returns the function as TorchScript runs it on a CPU; as it is on other devices, where nobody has tried it.

    Between any two operations a thread that runs Python waits for the lock, up to 5 ms each time while agents run;
    TorchScript takes it once. Where torch, which calls it deprecated, has none, the function stays as it is, too.
    """
    return _script(function) if device.type == "cpu" else function


@cache
def _script(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.jit.script(function)
        except Exception as cause:  # noqa: BLE001  an unscripted function is as right, whatever the reason
            logger.info("sampling holds Python's lock, which is slower: no TorchScript: %s", cause)
            return function
