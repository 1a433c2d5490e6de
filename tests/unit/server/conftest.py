"""An engine over the tiny model, shared by the tests of the server, and a server of Tinker's protocol."""

import pytest

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.protocols.tinker.server.slots import list_slots
from tests.tinker import TinkerClient, serve_tinker


@pytest.fixture(scope="package")
def engine(tiny_model_dir):
    with Engine.load(PolicyConfig(model=str(tiny_model_dir)), seed=0, device="cpu", frozen=True) as loaded:
        yield loaded


@pytest.fixture(scope="package")
def tuned(tiny_model_dir):
    """An engine with two slots for adapters that are trained, and two for those that are sampled."""
    policy = PolicyConfig(model=str(tiny_model_dir), lora=LoRAConfig(r=4, lora_alpha=4), max_num_seqs=16)
    with Engine.load(policy, seed=0, device="cpu", frozen=True, adapters=list_slots(2, 2)) as engine:
        yield engine


@pytest.fixture
async def served(tuned, tmp_path):
    """A server of Tinker's protocol, and the API behind it."""
    async with serve_tinker(tuned, tmp_path) as (app, api):
        yield app, api


@pytest.fixture
async def client(served):
    async with TinkerClient(served[0]) as client:
        yield client
