"""A vLLM server samples, the embedded engine trains: the same tokens and weights on both sides, or an error.

The server is the stand-in of tests/scale/vllm_server.py; `make vllm` runs tests/scale/real_vllm, with the real one.
"""

import asyncio
import hmac
import tempfile
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.errors import BackendError, ConfigError, JobFailed
from reinforge.scale.vllm.weight_source import WeightSource, _Handler
from reinforge.types.request import ModelRequest, SamplingParams
from tests.models import make_tiny_model
from tests.scale.jobs import build_run_config, collect, sample_group, train
from tests.scale.vllm_server import VLLMServer

KEY = "k-1234567890"
LORA = {"lora": {"rank": 4}}


@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.slow), "qwen2"])
def model(request, tmp_path_factory):
    """An output layer of its own (quick: tests/scale/test_vllm_launch.py), and one that is tied to the embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture
def server(model):
    with VLLMServer(model, key=KEY) as server:
        yield server


@asynccontextmanager
async def start(server, model, listen=None, **policy):
    settings = {"_type": "vllm", "url": server.url, "api_key": KEY, "max_retries": 0, "listen": listen}
    adapter = LocalAdapter(LocalAdapterConfig(sampler=settings), GRPO(GRPOConfig()))
    await adapter.initialize(build_run_config(model, **policy))
    try:
        yield adapter
    finally:
        await adapter.cleanup()


@pytest.mark.parametrize("lora", [{}, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"])
async def test_every_job_is_served_under_its_version(server, model, lora):
    async with start(server, model, **lora) as adapter:
        policy, seen = adapter.policy(), []
        for job in range(2):
            groups = [await sample_group(policy, number, job) for number in range(3)]
            tokens = [each.episode[1].logprobs for group in groups for each in group]
            assert {each.policy_version for each in tokens} == {job}
            assert all(each.prompt_token_ids and len(each.token_ids) == len(each.logprobs) for each in tokens)
            rows = await policy.score([[*each.prompt_token_ids, *each.token_ids] for each in tokens])
            for row, each in zip(rows, tokens, strict=True):
                assert row[-len(each.token_ids) :] == pytest.approx(each.logprobs, abs=1e-4)
            seen.append(tokens[0].logprobs)
            status = await train(adapter, groups, job)
            assert status.metadata["num_updates"] > 0
        assert len(set(seen)) == 2, "a job moved what the server samples"
        assert policy.version == 2
    loads = ["/v1/unload_lora_adapter", "/v1/load_lora_adapter"] if lora else ["/collective_rpc"]
    paths = [path for path, _ in server.calls if path != "/inference/v1/generate"]
    sent = ["/pause", *loads, "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert paths[-len(sent) * 3 :] == sent * 3


async def train_and_publish(adapter, job=0):
    policy = adapter.policy()
    return await train(adapter, [await sample_group(policy, number, job) for number in range(3)], job)


@pytest.mark.slow
async def test_an_output_layer_that_keeps_older_weights_is_found(server, model):
    async with start(server, model) as adapter:
        server.keeps_output_layer = True
        if not server.served.is_tied:
            await train_and_publish(adapter)  # its layer is in the files, so the server loads it
            return
        with pytest.raises(JobFailed, match=r"weights of version 1: .* also without its prefix cache .* a layer kept"):
            await train_and_publish(adapter)
        with pytest.raises(BackendError, match="does not have the newest weights"):
            await adapter.policy().sample(ModelRequest([{"role": "user", "content": "hi"}]))


@pytest.mark.slow
async def test_without_our_extension_a_tied_output_layer_would_be_old(server, model, monkeypatch):
    """The mutation: vLLM's own reload in the place of the extension's."""
    monkeypatch.setattr("reinforge.scale.vllm.client.RELOAD_METHOD", "reload_weights")
    async with start(server, model) as adapter:
        if server.served.is_tied:
            with pytest.raises(JobFailed, match="a layer kept older weights"):
                await train_and_publish(adapter)
        else:
            await train_and_publish(adapter)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"])
async def test_a_prefix_cache_that_keeps_older_keys_is_found(server, model, lora):
    async with start(server, model, **lora) as adapter:
        server.keeps_prefix_cache = True
        with pytest.raises(JobFailed, match="prefix cache still holds keys of older weights"):
            await train_and_publish(adapter)


@pytest.mark.slow
async def test_the_cache_is_found_by_the_long_probe_alone(server, model, monkeypatch):
    """The mutation: short probes, as the run's own canary has them, never reach a block of the cache."""
    monkeypatch.setattr("reinforge.scale.vllm.sampler.build_probe", lambda policy: (5, 6, 7))
    monkeypatch.setattr("reinforge.scale.vllm.policy.NUM_LONGEST", 0)
    async with start(server, model) as adapter:
        server.keeps_prefix_cache = True
        await train_and_publish(adapter)
        stale = await sample_group(adapter.policy(), 2)
        tokens = stale[0].episode[1].logprobs
        row = (await adapter.policy().score([[*tokens.prompt_token_ids, *tokens.token_ids]]))[0]
        assert abs(row[-len(tokens.token_ids) :] - tokens.logprobs).max() > 0.01, "what would have been trained on"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"])
async def test_weights_that_the_server_does_not_take_are_found(server, model, lora):
    async with start(server, model, **lora) as adapter:
        server.ignores_weights = True
        with pytest.raises(JobFailed, match="does not serve the weights of version 1"):
            await train_and_publish(adapter)


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
async def test_a_server_elsewhere_fetches_the_weights(server, model, lora, tmp_path, monkeypatch):
    """Its folder is not the run's: what it is told is an address, and it keeps no file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with start(server, model, "127.0.0.1:0", **lora) as adapter:
        await train_and_publish(adapter)
        policy = adapter.policy()
        tokens = (await sample_group(policy, 1, 1))[0].episode[1].logprobs
        assert tokens.policy_version == 1
        [row] = await policy.score([[*tokens.prompt_token_ids, *tokens.token_ids]])
        assert row[-len(tokens.token_ids) :] == pytest.approx(tokens.logprobs, abs=1e-4)
        fetched = [
            body["args"] for _, body in server.calls if body and body.get("method", "").startswith("reinforge_f")
        ]
        assert len({url for url, _ in fetched}) == len(fetched) == 2, "each version has an address of its own"
        for url, digests in fetched:
            for path in (url, *(f"{url}/{name}" for name in digests), f"{url}/../config.json"):
                found = await asyncio.to_thread(ask, path)
                assert found == (200 if url == fetched[-1][0] and path != url and ".." not in path else 404), path
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(URLError, match="refused"):
        ask(fetched[-1][0])


def ask(url):
    try:
        with urlopen(url, timeout=10) as answer:
            return answer.status
    except HTTPError as error:
        return error.code


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("is_checked", [True, False])
async def test_weights_that_arrive_damaged_are_found(server, model, lora, is_checked, monkeypatch, tmp_path):
    """Mutation check: without the digest the server loads them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with start(server, model, "127.0.0.1:0", **lora) as adapter:
        monkeypatch.setattr(_Handler, "do_GET", send_damaged)
        if not is_checked:
            monkeypatch.setattr(hmac, "compare_digest", lambda found, expected: True)
        with pytest.raises(BackendError, match="arrived damaged") if is_checked else pytest.raises(JobFailed):
            await train_and_publish(adapter)
    assert list(tmp_path.iterdir()) == []


def send_damaged(handler):
    data = bytearray(handler.server.source.find(handler.path).read_bytes())
    if handler.path.endswith(".safetensors"):
        data[-1024:] = bytes(1024)
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(data)


@pytest.mark.slow
async def test_a_server_that_cannot_reach_the_run_says_what_to_set(server, model, monkeypatch):
    monkeypatch.setattr(WeightSource, "find", lambda source, path: None)
    with pytest.raises(BackendError, match=r"404.*must reach http://127.0.0.1:\d+/\w+ \(sampler.listen") as error:
        await start(server, model, "127.0.0.1:0").__aenter__()
    assert "--worker-extension-cls reinforge_vllm.WeightReloader" in str(error.value)


async def test_a_reply_of_weights_with_another_label_is_refused(server, model):
    async with start(server, model) as adapter:
        label, server.label = server.label, "another run's"
        with pytest.raises(BackendError, match=r"from other weights .*another run's instead of reinforge-"):
            await sample_group(adapter.policy(), 1)
        server.label = label
        await sample_group(adapter.policy(), 1)


@pytest.mark.slow
async def test_no_reply_spans_two_versions(server, model):
    """Requests that wait while the weights change get the new ones; those in flight end first."""
    async with start(server, model) as adapter:
        policy = adapter.policy()
        groups = [await sample_group(policy, number) for number in range(3)]
        ref = await adapter.submit(collect(groups, 0))
        assert (await adapter.wait_until_complete(ref)).status == "completed"
        long = ModelRequest([{"role": "user", "content": "a"}], SamplingParams(max_tokens=100, seed=1))
        flying = [asyncio.create_task(policy.sample(long)) for _ in range(3)]
        while policy._server.admission._is_idle.is_set():
            await asyncio.sleep(0)
        publishing = asyncio.create_task(policy.publish(1))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(policy.sample(long)) for _ in range(3)]
        replies = await asyncio.gather(*flying, *waiting)
        await publishing
        assert [reply.version for reply in replies] == [0, 0, 0, 1, 1, 1]
        assert replies[0].tokens.logprobs != replies[3].tokens.logprobs


@pytest.mark.slow
async def test_what_differs_is_corrected_by_importance_weights(server, model, monkeypatch):
    """A server rounds log-probs differently: the old ones are the learner's own, and the weight of a token says so."""
    weights = []
    for corrects in (True, False):  # False: the mutation, as if this engine had sampled
        async with start(server, model) as adapter:
            policy = adapter.policy()
            adapter.engine.samples_elsewhere = corrects
            groups = [await sample_group(policy, number) for number in range(3)]
            for trajectory in (each for group in groups for each in group):
                reply = trajectory.episode[1]
                rounded = tuple(logprob + 0.2 for logprob in reply.logprobs.logprobs)
                reply.logprobs = replace(reply.logprobs, logprobs=rounded)
            weights.append((await train(adapter, groups, 0)).metadata.get("tis_weight"))
    assert weights[0] == pytest.approx(0.8187, abs=1e-3), "exp(-0.2)"
    assert weights[1] in (None, 1.0)


@pytest.mark.slow
async def test_the_server_goes_on_with_the_older_version_while_a_job_trains(server, model):
    async with start(server, model) as adapter:
        policy, trains, may_end = adapter.policy(), threading.Event(), threading.Event()
        update = adapter.engine.update

        def hold(*arguments, **settings):
            trains.set()
            assert may_end.wait(60)
            return update(*arguments, **settings)

        adapter.engine.update = hold
        ref = await adapter.submit(collect([await sample_group(policy, number) for number in range(3)], 0))
        await asyncio.to_thread(trains.wait, 60)
        group = await sample_group(policy, 1)
        may_end.set()
        assert {each.episode[1].logprobs.policy_version for each in group} == {0}
        assert (await adapter.wait_until_complete(ref)).status == "completed"
        await policy.publish(1)
        assert (await sample_group(policy, 1))[0].episode[1].logprobs.policy_version == 1


async def test_a_server_without_our_extension_says_how_to_start_it(model):
    with VLLMServer(model, key=KEY, extension=False) as server:
        with pytest.raises(BackendError, match="--worker-extension-cls reinforge_vllm.WeightReloader") as error:
            await start(server, model).__aenter__()
        assert "VLLM_SERVER_DEV_MODE=1" in str(error.value)
        assert KEY not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "context"), [("0.31.2", 256), ("0.32.0", 64)])
async def test_a_server_that_cannot_serve_the_policy_is_refused(model, version, context):
    with (
        VLLMServer(model, key=KEY, version=version, max_model_len=context) as server,
        pytest.raises(ConfigError) as error,
    ):
        await start(server, model).__aenter__()
    expected = (
        "vLLM 0.31.2, which cannot be sent weights" if context == 256 else "context has 64 tokens, but the policy"
    )
    assert expected in error.value.problems[0].message
