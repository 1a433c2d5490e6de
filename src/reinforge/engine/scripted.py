"""Functions of many small tensor operations, run without Python's lock between them."""

import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)


@cache
def scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as TorchScript runs it; as it is, where torch, which calls that deprecated, has none.

    Between any two operations a thread that runs Python waits for the lock, up to 5 ms each time while agents run;
    TorchScript takes it once.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.jit.script(function)
        except Exception as cause:  # noqa: BLE001  an unscripted function is as right, whatever the reason
            logger.info("sampling holds Python's lock, which is slower: no TorchScript: %s", cause)
            return function
