"""Several vLLM servers sample for one run: all have each version, and one that is lost takes no reply along."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig, VLLMLaunchConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.errors import BackendError, BackendUnavailable
from reinforge.scale.vllm.client import GenerateAnswer
from reinforge.scale.vllm.policy import VLLMPolicy
from reinforge.types.request import ModelRequest, SamplingParams
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


LONG = [
    ModelRequest(
        [{"role": "user", "content": f"count from {number}"}], SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
    )
    for number in range(4)
]


async def train_while_replies_wait(adapter, servers):
    """Returns the tokens of replies that had 16 of 40 when the next version was published."""
    policy = adapter.policy()
    groups = await sample_groups(policy)
    for server in servers:
        server.waits_at = 16
    asked = [asyncio.create_task(policy.sample(each)) for each in LONG]
    while sum(server.num_waiting for server in servers) < len(LONG):
        await asyncio.sleep(0.001)
    await train(adapter, groups, 0)
    return [reply.tokens for reply in await asyncio.gather(*asked)]


@pytest.mark.slow
async def test_replies_in_flight_continue_with_the_new_weights(servers, tiny_model_dir):
    async with start(servers, tiny_model_dir, in_flight="keep") as adapter:
        for tokens in await train_while_replies_wait(adapter, servers):
            assert tokens.list_versions() == [0] * 16 + [1] * 24
            [scores] = await adapter.policy().score([[*tokens.prompt_token_ids, *tokens.token_ids]])
            differences = np.abs(scores[-40:] - tokens.logprobs)
            assert differences[16:].max() < 1e-4 < 1e-3 < differences[:16].max()


@pytest.mark.parametrize("policy", [{}, {"lora": {"rank": 4}}], ids=["all", "lora"])
async def test_aborted_replies_are_sampled_again_by_the_new_weights(servers, tiny_model_dir, policy):
    async with start(servers, tiny_model_dir, in_flight="abort", **policy) as adapter:
        for tokens in await train_while_replies_wait(adapter, servers):
            assert tokens.list_versions() == [1] * 40
            [scores] = await adapter.policy().score([[*tokens.prompt_token_ids, *tokens.token_ids]])
            np.testing.assert_allclose(scores[-40:], tokens.logprobs, atol=1e-4)
        long = [body for server in servers for path, body in server.calls if path == "/inference/v1/generate"]
        assert sum(body["sampling_params"]["max_tokens"] == 40 for body in long) == 2 * len(LONG)


@pytest.mark.slow
async def test_replies_in_flight_keep_the_adapter_of_their_version(servers, tiny_model_dir, monkeypatch):
    """A lost server's are sampled again, by what is served then; an adapter goes when no reply can have it."""
    async with start(servers, tiny_model_dir, in_flight="keep", lora={"rank": 4}) as adapter:
        policy, sampled = adapter.policy(), asyncio.Event()
        client = adapter._sampler.servers[0].client
        generate = type(client).generate

        async def wait_for_the_next_version(self, body):
            answer = await generate(self, body)
            if body["sampling_params"]["max_tokens"] == 40:
                await sampled.wait()
            return answer

        monkeypatch.setattr(type(client), "generate", wait_for_the_next_version)
        for job in range(3):
            groups = await sample_groups(policy, job)
            sampled.set()
            expected = await asyncio.gather(*map(policy.sample, LONG))
            sampled.clear()
            asked = [asyncio.create_task(policy.sample(each)) for each in LONG]
            await train(adapter, groups, job)
            assert not any(task.done() for task in asked)
            sampled.set()
            for tokens, known in zip(await asyncio.gather(*asked), expected, strict=True):
                assert tokens.tokens.list_versions() == [job] * 40
                assert tokens.tokens.logprobs == pytest.approx(known.tokens.logprobs, abs=1e-5)
            fresh = await asyncio.gather(*map(policy.sample, LONG))
            assert [each.version for each in fresh] == [job + 1] * 4
            assert fresh[0].tokens.logprobs != pytest.approx(expected[0].tokens.logprobs, abs=1e-3)
            name = next(iter(servers[0].adapters)).rpartition("-")[0]
            expected = [f"{name}-{version}" for version in range(max(0, job), job + 2)]
            assert [list(server.adapters) for server in servers] == [expected] * 2
        paused = [path for server in servers for path, _ in server.calls if path == "/pause"]
        assert paused == []


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        ([("a-3", 0)], ((0, 3),)),
        ([("a-2", 0), ("a-3", 4)], ((0, 2), (4, 3))),
        ([("a-1", 0), ("a-3", 4)], None),
        ([("a-2", 0), ("a-4", 4)], None),
        ([("a-3", 0), ("a-2", 4)], None),
        ([("a-2", 2), ("a-3", 4)], None),
        ([("a-2", 0), ("a-3", 0)], None),
        ([], None),
    ],
    ids=["one", "two", "too old", "unknown", "backwards", "a part", "an empty part", "no label"],
)
def test_labels_say_which_version_sampled_which_part(spans, versions):
    """The reply was asked for when version 2 was served, and version 3 is served now."""
    publisher = SimpleNamespace(version=3, name_version="a-{}".format, keeps_adapters=False)
    own, codec = SimpleNamespace(tolerance=0.0), SimpleNamespace(max_model_len=20)
    policy, sampled = VLLMPolicy(own, codec, None, publisher), SampleRequest((7,), 9)
    choice = {
        "finish_reason": "stop",
        "token_ids": [1] * 9,
        "logprobs": {"content": [{"token_id": 1, "logprob": -1.0}] * 9},
        "weight_versions": [{"version": label, "start": start, "end": 9} for label, start in spans],
    }
    answer = GenerateAnswer.model_validate({"prompt_token_ids": [7], "choices": [choice]})
    if versions is None:
        with pytest.raises(BackendError, match="from other weights than it was sent"):
            policy.fill_in(sampled, answer, 2)
    else:
        policy.fill_in(sampled, answer, 2)
        assert ((0, sampled.version), *sampled.later_versions) == versions


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
