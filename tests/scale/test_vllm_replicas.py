"""Several vLLM servers sample for one run: all have each version, and one that is lost takes no reply along."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig, VLLMLaunchConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.errors import BackendUnavailable
from tests.scale.jobs import build_run_config, sample_group, train
from tests.scale.vllm_server import VLLMServer

KEY = "k-1234567890"


@pytest.fixture
def servers(tiny_model_dir):
    with VLLMServer(tiny_model_dir, key=KEY) as first, VLLMServer(tiny_model_dir, key=KEY) as second:
        yield [first, second]


@asynccontextmanager
async def start(servers, model, **policy):
    urls = [server.url for server in servers]
    config = LocalAdapterConfig(sampler={"_type": "vllm", "url": urls, "api_key": KEY, "max_retries": 0})
    adapter = LocalAdapter(config, GRPO(GRPOConfig()))
    await adapter.initialize(build_run_config(model, **policy))
    try:
        yield adapter
    finally:
        await adapter.cleanup()


def list_prompts(server):
    """Returns the prompts that `sample_group` sent, without those that check new weights."""
    bodies = [body for path, body in server.calls if path == "/inference/v1/generate"]
    return {tuple(body["token_ids"]) for body in bodies if body["sampling_params"]["max_tokens"] == 12}


async def sample_groups(policy, job=0):
    return await asyncio.gather(*(sample_group(policy, number, job) for number in range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
async def test_siblings_share_a_server_and_each_version_is_sent_to_all(servers, tiny_model_dir, lora):
    async with start(servers, tiny_model_dir, **lora) as adapter:
        for job in range(2):
            groups = await sample_groups(adapter.policy(), job)
            replies = [each.episode[1].logprobs for group in groups for each in group]
            assert {each.policy_version for each in replies} == {job}
            await train(adapter, groups, job)
        first, second = map(list_prompts, servers)
        assert first
        assert second
        assert not first & second
        assert servers[0].label == servers[1].label == adapter._sampler.label
        assert adapter._sampler.label.endswith("-2")


@pytest.mark.slow
async def test_a_lost_server_takes_no_reply_along_and_gets_the_next_version_when_it_is_back(servers, tiny_model_dir):
    async with start(servers, tiny_model_dir) as adapter:
        policy = adapter.policy()
        expected = await sample_groups(policy)
        assert list_prompts(servers[1])
        servers[1].is_away = True
        found = await sample_groups(policy)
        for before, after in zip(expected, found, strict=True):
            assert [each.episode[1].logprobs.token_ids for each in before] == [
                each.episode[1].logprobs.token_ids for each in after
            ]
        await train(adapter, found, 0)
        assert servers[0].label.endswith("-1")
        assert servers[1].label.endswith("-0")
        servers[1].is_away = False
        await train(adapter, await sample_groups(policy, 1), 1)
        assert servers[0].label == servers[1].label
        assert servers[1].label.endswith("-2")


async def test_without_any_server_the_run_stops(servers, tiny_model_dir):
    async with start(servers, tiny_model_dir) as adapter:
        for server in servers:
            server.is_away = True
        with pytest.raises(BackendUnavailable, match="503"):
            await sample_group(adapter.policy(), 1)


@pytest.mark.slow
async def test_a_server_that_is_busy_is_not_lost(servers, tiny_model_dir):
    async with start(servers, tiny_model_dir) as adapter:
        for server in servers:
            server.is_busy = True
        with pytest.raises(BackendUnavailable, match="503"):
            await sample_group(adapter.policy(), 1)
        for server in servers:
            server.is_busy = False
        await train(adapter, await sample_groups(adapter.policy()), 0)
        assert servers[0].label == servers[1].label


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 2, "gpus": ["0"]}, "gpus has 1 entries, one for each replica, but replicas is 2"),
        (
            {"replicas": 1, "gpus": ["0"], "environment": {"CUDA_VISIBLE_DEVICES": "1"}},
            "environment sets CUDA_VISIBLE_DEVICES, which gpus sets",
        ),
    ],
)
def test_gpus_name_those_of_each_replica(settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMLaunchConfig(python="python", **settings)


@pytest.mark.parametrize("urls", [[], ["http://127.0.0.1:1", "http://127.0.0.1:1"]])
def test_urls_are_different_servers(urls):
    with pytest.raises(ValueError, match="expected one URL or several different ones"):
        LocalAdapterConfig(sampler={"_type": "vllm", "url": urls, "api_key": KEY})
