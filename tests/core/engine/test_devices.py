"""The engine on other devices than the CPU, as far as it can be tested without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reinforge.engine.devices import is_out_of_memory
from reinforge.engine.model.loading import pick_device
from reinforge.errors import ConfigError

ROOT = Path(__file__).parents[3]
PARITY = "tests/core/numerics/test_parity.py"


def run_on_strict_device(*tests):
    environment = {**os.environ, "REINFORGE_TEST_DEVICE": "strict"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.slow
def test_sampler_and_learner_run_on_a_device_that_refuses_tensors_of_the_cpu():
    """See `tests/strict_device.py`; in a process of its own, since torch cannot forget a device."""
    run_on_strict_device("tests/strict_cases.py")


@pytest.mark.slow
def test_parity_holds_on_a_device_that_refuses_tensors_of_the_cpu():
    """Sampler = learner = plain forward, and prompts shared by copies of their keys and values = whole rows."""
    run_on_strict_device(PARITY, "-k", "llama or qwen2 or gemma3_text", "--timeout", "600")


def test_a_device_that_is_missing_is_named():
    if not torch.backends.mps.is_available():
        with pytest.raises(ConfigError, match="this machine has no mps"):
            pick_device("mps")
    with pytest.raises(ConfigError, match="this machine has no abacus"):
        pick_device("abacus")
    assert pick_device("cpu") == torch.device("cpu")


def test_every_device_that_is_out_of_memory_is_recognized():
    message = "MPS backend out of memory (MPS allocated: 5 GiB, max allowed: 6 GiB). Tried to allocate 2 GiB"
    assert is_out_of_memory(RuntimeError(message))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("Expected all tensors to be on the same device"))
