"""The real vLLM, on the CPU: `make vllm` installs it in an environment of its own and runs this.

With REINFORGE_RECORD=1 its answers are written to tests/data/vllm_answers.json, which the stand-in is compared with.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.errors import ContextOverflow, JobFailed
from reinforge.rollout.models.endpoint_config import EndpointConfig
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RetryableError
from reinforge.scale.vllm.client import VLLMClient
from reinforge.scale.vllm.process import MODULE, PLUGIN, SWITCHES, ServedModelSettings, build_arguments
from reinforge.types.request import Grammar, ModelRequest, SamplingParams
from tests.journal_rows import read_rows
from tests.models import make_tiny_model
from tests.processes import is_alive
from tests.scale.jobs import build_run_config, collect, prompt, sample_group, train
from tests.scale.processes import MARK, finish, torchrun, wait_for_none
from tests.scale.vllm_answers import ANSWERS, record_answers

PYTHON = os.environ.get("REINFORGE_VLLM_PYTHON")
ROOT = Path(__file__).parents[3]
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
"""vLLM's attention on a CPU has heads of 32 numbers and more."""
GONE_S = 15.0
KEY = "k-1234567890"
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="needs vLLM: make vllm"),
]


def build_adapter(replicas=1, **settings):
    launch = {"python": PYTHON, "arguments": {"enforce_eager": True}, "replicas": replicas}
    config = LocalAdapterConfig(sampler={"_type": "vllm", "launch": launch})
    return LocalAdapter(config, GRPO(GRPOConfig()), **settings)


@asynccontextmanager
async def start(adapter, model, **policy):
    await adapter.initialize(build_run_config(model, **policy))
    try:
        yield adapter
    finally:
        await adapter.cleanup()


def report(text):
    """Shows a figure; `make vllm` prints what the tests write."""
    sys.stdout.write(f"{text}\n")


async def run_jobs(adapter, count, first=0):
    """Trains and checks that each reply is of the newest weights, with the learner's log-probs."""
    policy = adapter.policy()
    for job in range(first, first + count):
        temperature = (1.0, 0.7)[job % 2]
        groups = [await sample_group(policy, number, job, temperature) for number in range(3)]
        replies = [each.episode[1].logprobs for group in groups for each in group]
        assert {each.policy_version for each in replies} == {job}
        if temperature == 1.0:
            rows = await policy.score([[*each.prompt_token_ids, *each.token_ids] for each in replies])
            for row, each in zip(rows, replies, strict=True):
                assert row[-len(each.token_ids) :] == pytest.approx(each.logprobs, abs=1e-4)
        status = await train(adapter, groups, job)
        assert status.metadata["mismatch"] < 1e-4, "log-probs after temperature, too"


async def publish_without(adapter, monkeypatch, version, **methods):
    """Publishes the weights of a job with some calls replaced; the canary must find it. Then publishes them again."""
    policy = adapter.policy()
    groups = [await sample_group(policy, number, version - 1) for number in range(3)]
    with monkeypatch.context() as patch:
        for name, method in methods.items():
            patch.setattr(VLLMClient, name, method)
        with pytest.raises(JobFailed) as failure:
            await train(adapter, groups, version - 1)
    await policy.publish(version)
    return str(failure.value)


async def reload_plainly(client, folder):
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    await client.endpoint.call("POST", "/collective_rpc", body=body)


async def pause_and_keep_the_cache(client, mode):
    await client.endpoint.call("POST", "/pause", query={"mode": "wait", "clear_cache": "false"})


async def reset_nothing(client):
    pass


async def test_all_weights_tied(tmp_path, monkeypatch):
    model = make_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=True, **SIZES)
    async with start(build_adapter(), model) as adapter:
        await run_jobs(adapter, 2)
        failure = await publish_without(adapter, monkeypatch, 3, reload_weights=reload_plainly)
        assert "also without its prefix cache" in failure
        report(f"tied output layer by reload_weights: {failure}")
        calls = {"pause": pause_and_keep_the_cache, "reset_prefix_cache": reset_nothing}
        failure = await publish_without(adapter, monkeypatch, 4, **calls)
        assert "prefix cache still holds keys of older weights" in failure
        report(f"stale keys: {failure}")
        await run_jobs(adapter, 1, first=4)
        await check_settings(adapter.policy())
        if os.environ.get("REINFORGE_RECORD"):
            [[folder]] = [sent.values() for sent in adapter._sampler._sent.values()]
            await record_answers(adapter._sampler.servers[0].client.endpoint, folder, model)
            assert json.loads(ANSWERS.read_text())


@pytest.mark.parametrize(
    ("lora", "is_fetched", "is_tied"),
    [(4, False, False), (4, True, False), (None, True, False), (None, True, True)],
    ids=["folder-lora", "network-lora", "network-untied", "network-tied"],
)
async def test_a_server_at_a_url_that_demands_its_key_everywhere(tmp_path, lora, is_fetched, is_tied):
    """Weights reach it through a folder that both see, or over the network."""
    model = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=is_tied, **SIZES)
    settings = ServedModelSettings(model, "float32", 256, 16, 0, lora_rank=lora, kv_cache_bytes=2**30)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    guard = ["--middleware", "reinforge_vllm.KeyGuard", "--host", "127.0.0.1", "--port", str(port)]
    (tmp_path / "tmp").mkdir()
    own = {"VLLM_API_KEY": KEY, "PYTHONPATH": str(PLUGIN), "TMPDIR": str(tmp_path / "tmp")}
    environment = {**os.environ, **SWITCHES, **own}
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen(
        [PYTHON, "-m", MODULE, *build_arguments(settings, {"enforce_eager": True}), *guard],
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await wait_for(url, server)
        way = {"listen": "127.0.0.1:0"} if is_fetched else {"folder": str(tmp_path)}
        sampler = {"_type": "vllm", "url": url, "api_key": KEY, **way}
        made = LocalAdapter(LocalAdapterConfig(sampler=sampler), GRPO(GRPOConfig()))
        async with start(made, model, **({"lora": {"rank": lora}} if lora else {})) as adapter:
            await run_jobs(adapter, 2)
            sent = list(tmp_path.glob("reinforge-*/reinforge-*"))
            assert len(sent) == (0 if is_fetched else 1), "older weights are removed"
        assert not list(tmp_path.glob("reinforge-*"))
        assert not list((tmp_path / "tmp").glob("reinforge-*")), "the server keeps no file"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


LONG_REPLIES = """
async def agent(item, llm, context):
    for turn in range(4):
        messages = [{"role": "user", "content": item.input_obj}]
        reply = await llm.chat.completions.create(messages=messages, max_tokens=120)
    return reply.choices[0].message.content
"""


async def wait_for(url, server):
    endpoint = OpenAIEndpoint(EndpointConfig(), url)
    while True:
        assert server.poll() is None
        try:
            await endpoint.send("GET", "/health")
        except RetryableError:
            await asyncio.sleep(0.5)
        else:
            return await endpoint.close()


async def test_all_weights_untied(tmp_path):
    model = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=False, **SIZES)
    async with start(build_adapter(), model) as adapter:
        await run_jobs(adapter, 3)


async def test_two_adapters(tmp_path):
    model = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=True, **SIZES)
    async with start(build_adapter(adapters=("solver", "critic")), model, lora={"rank": 4}) as adapter:
        policy = adapter.policy()
        solver, critic = policy.get_policy("solver"), policy.get_policy("critic")
        before = [each.episode[1].logprobs.logprobs for each in await sample_group(critic, 1)]
        for job in range(2):
            groups = [await sample_group(solver, number, job) for number in range(3)]
            for trajectory in (each for group in groups for each in group):
                trajectory.model_group = "solver"
            await train(adapter, groups, job)
        after = await sample_group(critic, 1)
        assert {each.episode[1].logprobs.policy_version for each in after} == {2}
        for old, new in zip(before, after, strict=True):
            assert old == pytest.approx(new.episode[1].logprobs.logprobs, abs=1e-4), "this one was not trained"


async def test_one_of_two_servers_dies_and_is_replaced(tmp_path):
    model = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=True, **SIZES)
    async with start(build_adapter(replicas=2), model, lora={"rank": 4}) as adapter:
        await run_jobs(adapter, 1)
        sampler = adapter._sampler
        for process in psutil.Process(sampler.servers[1].process._process.pid).children():
            process.kill()
        started = time.monotonic()
        await asyncio.gather(*(sample_group(adapter.policy(), number, 1) for number in range(4)))
        report(f"16 replies, a server lost meanwhile: {time.monotonic() - started:.1f} s")
        await asyncio.wait_for(asyncio.shield(sampler._replacing[1]), 600)
        report(f"replaced after {time.monotonic() - started:.1f} s")
        await run_jobs(adapter, 2, first=1)
        labels = [await server.client.get_weight_label() for server in sampler.servers.values()]
        assert labels == [sampler.label] * 2


def set_up_two_servers(project, tmp_path, sharding, policy):
    project.model = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=True, **SIZES)
    launch = {
        "python": PYTHON,
        "arguments": {"enforce_eager": True},
        "replicas": 2,
        "environment": {MARK: str(tmp_path)},
    }
    project.set("finetuning.policy.model", str(project.model))
    project.set("trainer_adapters.adapter.sampler", {"_type": "vllm", "launch": launch})
    project.set("trainer_adapters.adapter.sharding", sharding).set("finetuning.limits.max_staleness", 1)
    project.set("finetuning.num_epochs", 4)
    for name, value in policy.items():
        project.set(f"finetuning.policy.{name}", value)


def check_metrics(project):
    assert [row["epoch"] for row in project.metrics] == [0, 1, 2, 3]
    assert max(row["staleness_max"] for row in project.metrics) == 1
    assert project.metrics[0]["mismatch"] < 1e-4


SHARDINGS = pytest.mark.parametrize(
    ("sharding", "policy"), [("full", {}), ("replicate", {"lora": {"rank": 4}})], ids=["full_weights", "lora"]
)


@SHARDINGS
def test_two_processes_train_while_two_servers_sample(project, tmp_path, sharding, policy):
    set_up_two_servers(project, tmp_path, sharding, policy)
    project.write_files()
    output = finish(torchrun(project, "finetune", "run.yml", "--run_name", "r"), codes=(0, 3))
    assert "Traceback" not in output
    check_metrics(project)
    report(output[-1500:])
    wait_for_none(tmp_path)


@SHARDINGS
def test_ray_workers_train_while_two_servers_sample_without_a_wait(project, tmp_path, sharding, policy):
    set_up_two_servers(project, tmp_path, sharding, policy)
    project.settings["trainer_adapters"]["adapter"] |= {"_type": "ray", "num_workers": 2}
    project.set("finetuning.limits.in_flight", "keep")
    project.write_agent(LONG_REPLIES)
    output = project.finetune().output
    assert "Traceback" not in output
    check_metrics(project)
    rows = read_rows(project.run, "SELECT data FROM episodes WHERE phase = 'collect'")
    calls = [call for (data,) in rows for call in json.loads(data)["calls"]]
    later = sum(bool(call.get("later_versions")) for call in calls)
    report(f"{later} of {len(calls)} replies were continued by newer weights")
    report(output[-1500:])
    wait_for_none(tmp_path)


def build_long_requests():
    return [
        ModelRequest(prompt(number % 8), SamplingParams(max_tokens=180, seed=number, ignore_eos=True))
        for number in range(256)
    ]


async def publish_during_replies(adapter, job):
    """Trains, and publishes while replies are sampled; returns these, and how many ended after that."""
    policy = adapter.policy()
    groups = [await sample_group(policy, number, job) for number in range(3)]
    status = await adapter.wait_until_complete(await adapter.submit(collect(groups, job)))
    assert status.status == "completed", status.message
    asked = [asyncio.create_task(policy.sample(each)) for each in build_long_requests()]
    await asyncio.sleep(1.0)  # most of them take longer
    await policy.publish(job + 1)
    num_kept = sum(not task.done() for task in asked)
    return [reply.tokens for reply in await asyncio.gather(*asked)], num_kept


async def test_replies_in_flight_continue_with_the_new_weights(tmp_path):
    """They read keys of the new weights alone, so that these give each later token its log-prob."""
    model = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=True, **SIZES)
    async with start(build_adapter(replicas=2), model, in_flight="keep") as adapter:
        for job in range(2):
            replies, _ = await publish_during_replies(adapter, job)
            rows = await adapter.policy().score([[*each.prompt_token_ids, *each.token_ids] for each in replies])
            for row, each in zip(rows, replies, strict=True):
                is_new = np.array(each.list_versions()) == job + 1
                differences = np.abs(row[-len(each.token_ids) :] - each.logprobs)
                assert is_new.all() or differences[~is_new].max() > 1e-3
                assert differences[is_new].max(initial=0.0) < 1e-3
            num_mixed = sum(bool(each.later_versions) for each in replies)
            report(f"{num_mixed} of {len(replies)} replies were continued by version {job + 1}")
            assert num_mixed


@pytest.mark.parametrize("policy", [{}, {"lora": {"rank": 4}}], ids=["all", "lora"])
async def test_aborted_replies_are_sampled_again_by_the_new_weights(tmp_path, policy):
    model = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=True, **SIZES)
    async with start(build_adapter(replicas=2), model, in_flight="abort", **policy) as adapter:
        for job in range(2):
            replies, num_left = await publish_during_replies(adapter, job)
            assert {tuple(sorted(set(each.list_versions()))) for each in replies} <= {(job,), (job + 1,)}
            fresh = [each for each in replies if each.policy_version == job + 1]
            report(
                f"{num_left} of {len(replies)} replies ended after version {job + 1} was served, {len(fresh)} with it"
            )
            assert len(fresh) >= num_left > 0
            rows = await adapter.policy().score([[*each.prompt_token_ids, *each.token_ids] for each in fresh])
            for row, each in zip(rows, fresh, strict=True):
                np.testing.assert_allclose(row[-len(each.token_ids) :], each.logprobs, atol=1e-3)


async def test_replies_in_flight_keep_the_adapter_of_their_version(tmp_path):
    model = make_tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=True, **SIZES)
    async with start(build_adapter(replicas=2), model, in_flight="keep", lora={"rank": 4}) as adapter:
        policy = adapter.policy()
        for job in range(3):
            expected = [reply.tokens for reply in await asyncio.gather(*map(policy.sample, build_long_requests()))]
            replies, num_kept = await publish_during_replies(adapter, job)
            report(f"{num_kept} of {len(replies)} replies were in flight when version {job + 1} was served")
            assert num_kept
            assert not any(each.later_versions for each in replies)
            assert {each.policy_version for each in replies} <= {job, job + 1}, "those that waited have the newer one"
            pairs = [pair for pair in zip(replies, expected, strict=True) if pair[0].policy_version == job]
            same = [(found, known) for found, known in pairs if found.token_ids == known.token_ids]
            assert len(same) > 0.8 * len(pairs) > 0, "another token is drawn where rounding decides"
            for found, known in same:
                assert found.logprobs == pytest.approx(known.logprobs, abs=1e-3)


async def check_settings(policy):
    """What an agent may ask for is what the embedded sampler would do."""

    async def ask(**settings):
        request = {name: settings.pop(name) for name in ("grammar", "num_top_logprobs", "prompt") if name in settings}
        return await policy.sample(ModelRequest(prompt(2), SamplingParams(**settings), **request))

    greedy = [await ask(temperature=0.0, max_tokens=8, num_top_logprobs=3) for _ in range(2)]
    assert greedy[0].tokens.token_ids == greedy[1].tokens.token_ids
    tops = greedy[0].tokens.top_logprobs
    assert [len(each) for each in tops] == [3] * 8
    assert [each[0].logprob for each in tops] == list(greedy[0].tokens.logprobs)
    seeded = [await ask(seed=5, max_tokens=8) for _ in range(2)]
    assert seeded[0].tokens.token_ids == seeded[1].tokens.token_ids
    text = greedy[0].message["content"]
    stopped = await ask(temperature=0.0, max_tokens=8, stop=(text[2:4],))
    assert stopped.message["content"] == text[: text.index(text[2:4])]
    assert stopped.finish_reason == "stop"
    assert len((await ask(max_tokens=3, logit_bias=((1, -100.0),))).tokens.token_ids) == 3
    biased = await ask(max_tokens=3, logit_bias=((40, 100.0),))
    assert set(biased.tokens.token_ids) == {40}
    assert biased.tokens.restricted
    assert biased.tokens.supports is None
    await ask(max_tokens=3, frequency_penalty=1.0, presence_penalty=0.5)
    chosen = await ask(max_tokens=60, grammar=Grammar("regex", "(yes|no)"), seed=3)
    assert chosen.message["content"] in ("yes", "no")
    assert all(len(each) for each in chosen.tokens.supports.sets)
    with pytest.raises(ContextOverflow):
        await ask(prompt=(7,) * 300)


RUN = """
import asyncio, sys
sys.path.insert(0, {root!r})
from tests.scale.real_vllm import test_real_server as own

async def main():
    adapter = own.build_adapter()
    await adapter.initialize(own.build_run_config({model!r}))
    print(adapter._sampler.servers[0].process._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def list_shared_memory():
    folder = Path("/dev/shm")
    names = {each.name for each in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if "psm" in name or "vllm" in name}


def test_nothing_is_left_when_the_run_is_killed(tmp_path):
    model = make_tiny_model(tmp_path / "model", "llama", **SIZES)
    shared = list_shared_memory()
    code = RUN.format(root=str(ROOT), model=str(model))
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    watcher = psutil.Process(int(run.stdout.readline().split()[0]))
    processes = [watcher, *watcher.children(recursive=True)]
    assert len(processes) >= 4, "the watcher, the server, its engine and its worker"
    run.send_signal(signal.SIGKILL)
    run.wait(10)
    started = time.monotonic()
    while alive := [each for each in processes if is_alive(each)]:
        assert time.monotonic() - started < GONE_S, alive
        time.sleep(0.1)
    report(f"{len(processes)} processes were gone after {time.monotonic() - started:.1f} s")
    left = list_shared_memory() - shared
    assert not left
