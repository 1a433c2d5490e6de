"""Servers of Tinker's protocol and of ART's over a tiny model, and no pauses between attempts."""

from collections.abc import Iterator

import pytest
import stamina

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.protocols.tinker.server.slots import list_slots
from tests.protocols.art_client import ARTServer
from tests.protocols.tinker import TinkerClient, serve_tinker
from tests.serving.conftest import _counts_no_frozen_objects, engine

__all__ = ["_counts_no_frozen_objects", "engine"]


@pytest.fixture(autouse=True)
def _no_backoff() -> Iterator[None]:
    with stamina.set_testing(True, attempts=10, cap=True):
        yield


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


@pytest.fixture
async def art(tiny_model_dir, tmp_path):
    """A server of ART's protocols that keeps its models in `tmp_path`."""
    async with ARTServer(tiny_model_dir, tmp_path) as server:
        yield server


@pytest.fixture
async def model(art):
    """The model `agent` of that server."""
    return await art.create()
