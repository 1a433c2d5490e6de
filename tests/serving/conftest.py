"""An engine over the tiny model, shared by the tests of servers."""

import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine


@pytest.fixture(scope="package")
def engine(tiny_model_dir):
    with Engine.load(PolicyConfig(model=str(tiny_model_dir)), seed=0, device="cpu", frozen=True) as loaded:
        yield loaded
