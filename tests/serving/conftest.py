"""What the tests of servers share: an engine over the tiny model."""

import gc
import sys

import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine


@pytest.fixture(scope="module", autouse=True)
def _counts_no_frozen_objects():
    """`tests/conftest.py` froze all objects; each server would count them anew, for 0.07 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: sys.maxsize)
        yield


@pytest.fixture(scope="package")
def engine(tiny_model_dir):
    with Engine.load(PolicyConfig(model=str(tiny_model_dir)), seed=0, device="cpu", frozen=True) as loaded:
        yield loaded
