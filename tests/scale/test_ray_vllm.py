"""Ray workers train what vLLM servers sample: the weights of one process with the same servers, also with losses."""

import pytest

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.engine.packages import is_installed
from reinforge.scale.ray.adapter import RayAdapter, RayAdapterConfig
from tests.scale.jobs import measure_distance, train
from tests.scale.ray_jobs import kill, run_config, sample_job, save
from tests.scale.vllm_server import VLLMServer

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`"),
]
KEY = "k-1234567890"
LORA = {"lora": {"rank": 4}}


@pytest.fixture
def servers(tiny_model_dir):
    with VLLMServer(tiny_model_dir, key=KEY) as first, VLLMServer(tiny_model_dir, key=KEY) as second:
        yield [first, second]


async def train_jobs(adapter, model, folder, policy, servers, disturb=lambda job: None):
    """Returns the weights after three jobs, each on what the servers sampled of its version."""
    await adapter.initialize(run_config(model, **policy))
    try:
        for job in range(3):
            groups = await sample_job(adapter.policy(), job)
            assert {each.episode[1].logprobs.policy_version for group in groups for each in group} == {job}
            disturb(job)
            await train(adapter, groups, job)
            assert {server.label for server in servers} == {adapter._sampler.label}
        return await save(adapter, folder, 3)
    finally:
        await adapter.cleanup()


@pytest.mark.parametrize(
    ("policy", "settings"),
    [({}, {}), (LORA, {}), ({}, {"sharding": "full"})],
    ids=["full weights", "lora", "sharded"],
)
async def test_workers_train_what_servers_sample(servers, tiny_model_dir, tmp_path, policy, settings):
    sampler = {"_type": "vllm", "url": [server.url for server in servers], "api_key": KEY}
    here = LocalAdapter(LocalAdapterConfig(sampler=sampler), GRPO(GRPOConfig()))
    expected = await train_jobs(here, tiny_model_dir, tmp_path / "here", policy, servers)
    there = RayAdapter(RayAdapterConfig(num_workers=2, sampler=sampler, **settings), GRPO(GRPOConfig()))
    found = await train_jobs(there, tiny_model_dir, tmp_path / "there", policy, servers)
    assert measure_distance(expected, found) < 1e-5
    assert all(len(list(server.calls)) > 10 for server in servers)


async def test_a_worker_that_dies_costs_no_version(servers, tiny_model_dir, tmp_path):
    sampler = {"_type": "vllm", "url": [server.url for server in servers], "api_key": KEY}
    here = LocalAdapter(LocalAdapterConfig(sampler=sampler), GRPO(GRPOConfig()))
    expected = await train_jobs(here, tiny_model_dir, tmp_path / "here", {}, servers)
    there = RayAdapter(RayAdapterConfig(num_workers=2, sampler=sampler), GRPO(GRPOConfig()))

    def disturb(job):
        if job == 1:
            kill(there.engine.workers[0])  # the one that writes what the servers load

    found = await train_jobs(there, tiny_model_dir, tmp_path / "there", {}, servers, disturb)
    assert measure_distance(expected, found) < 1e-5
