"""Losses of a project reach processes that have not imported its files."""

import subprocess
import sys
import textwrap

import pytest

from reinforge.engine.losses.base import find_loss
from reinforge.engine.packages import is_installed
from reinforge.scale.project_losses import find_module, pack_loss, unpack_loss
from reinforge.types.sample import LossSpec

LOSS = """
import torch
from reinforge.engine import LossOutput, register_loss

import packed_helper

def shift(value):
    return value + packed_helper.AMOUNT

@register_loss("packed_loss")
def packed_loss(batch, logprobs_BT, *, factor=1.0):
    return LossOutput(factor * shift(logprobs_BT))
"""
ELSEWHERE = """
import sys, torch
from reinforge.scale.project_losses import unpack_loss
from reinforge.engine.losses.base import find_loss
from reinforge.types.sample import LossSpec

spec = unpack_loss(LossSpec("packed_loss", {"factor": 2.0}), sys.stdin.buffer.read())
assert "packed" not in sys.modules
print(find_loss(spec)(None, torch.tensor([1.0]), **spec.params).loss.item())
"""


@pytest.fixture
def own_loss(tmp_path, monkeypatch):
    (tmp_path / "packed.py").write_text(textwrap.dedent(LOSS))
    (tmp_path / "packed_helper.py").write_text("AMOUNT = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import packed  # noqa: F401

    yield LossSpec("packed_loss", {"factor": 2.0})
    for name in ("packed", "packed_helper"):
        sys.modules.pop(name, None)


def test_a_built_in_loss_needs_nothing():
    spec = LossSpec("cross_entropy")
    assert (pack_loss(spec), find_module(spec)) == (None, None)
    assert unpack_loss(spec, None) is spec


def test_a_process_on_this_machine_imports_the_module(own_loss):
    assert find_module(own_loss) == "packed"


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`")
def test_a_process_elsewhere_gets_the_function_and_what_it_calls(own_loss, tmp_path):
    packed = pack_loss(own_loss)
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], input=packed, capture_output=True, check=False, cwd="/")
    assert done.stdout.decode().strip() == "8.0", done.stderr.decode()


@pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`")
def test_the_loss_by_module_and_function_is_sent_too(own_loss):
    spec = LossSpec("packed:packed_loss", {"factor": 2.0})
    sent = unpack_loss(spec, pack_loss(spec))
    assert sent.params == spec.params
    assert ":" not in sent.name
    assert callable(find_loss(sent))
