"""`trainer_adapters._type: http` trains at a `reinforge serve` elsewhere: the same weights as in this process."""

import asyncio
import json
import shutil
import threading

import pytest

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.finetuning_blocks import LimitsConfig
from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.errors import BackendError, BackendUnavailable, ConfigError, ContextOverflow
from reinforge.files import find_damage
from reinforge.protocols.sessions.adapter import HttpAdapter
from reinforge.protocols.sessions.client import HttpAdapterConfig
from reinforge.protocols.sessions.server import session as session_module
from reinforge.protocols.sessions.server.api import SessionLimits, SessionsApi
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RetryableError
from reinforge.runs.checkpoints import is_model_folder
from reinforge.serving.app import ServeApp
from reinforge.serving.loading import BaseModels
from reinforge.serving.models import ServedModels
from reinforge.types.request import ModelRequest, SamplingParams
from tests.scale.jobs import collect, prompt, sample_group, train
from tests.scale.ray_jobs import run_config

NAME = "tiny/base"


@pytest.fixture
async def server(tiny_model_dir, tmp_path):
    api = SessionsApi(BaseModels({NAME: PolicyConfig(model=str(tiny_model_dir))}), tmp_path / "kept", device="cpu")
    async with ServeApp(ServedModels(), [api], token="secretkey") as app:
        app.api = api
        yield app


def config_of(policy=None, **settings):
    policy = dict(policy or {})
    return run_config(policy.pop("model", NAME), **policy).model_copy(update=settings)


async def open_adapter(app, policy=None):
    config = HttpAdapterConfig(url=app.address, api_key="secretkey", max_retries=2)
    adapter = HttpAdapter(config, GRPOConfig())
    await adapter.initialize(config_of(policy))
    return adapter


@pytest.fixture
async def remote(server):
    adapter = await open_adapter(server)
    yield adapter
    await adapter.cleanup()


@pytest.fixture
async def local(tiny_model_dir):
    """The same model in this process."""
    adapter = LocalAdapter(LocalAdapterConfig(), GRPO(GRPOConfig()))
    await adapter.initialize(run_config(tiny_model_dir))
    yield adapter
    await adapter.cleanup()


async def sample_groups(adapter, count=3):
    return [await sample_group(adapter.policy(), number) for number in range(count)]


def same_tokens(first, second):
    """Returns True if two groups have the same tokens; their log-probs depend on what else is sampled meanwhile."""
    pairs = [(one.episode[1].logprobs, other.episode[1].logprobs) for one, other in zip(first, second, strict=True)]
    return all(
        (one.token_ids, one.policy_version) == (other.token_ids, other.policy_version)
        and one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        for one, other in pairs
    )


@pytest.mark.parametrize("lora", [None, pytest.param({"r": 4}, marks=pytest.mark.slow)], ids=["full", "lora"])
async def test_the_same_trajectories_make_the_same_weights_as_here(server, tiny_model_dir, lora):
    policy = {"lora": lora} if lora else {}
    config = run_config(tiny_model_dir, **policy)
    local = LocalAdapter(LocalAdapterConfig(), GRPO(GRPOConfig()))
    await local.initialize(config)
    remote = await open_adapter(server, policy)
    first = await remote.policy().fingerprint()
    assert await local.policy().fingerprint() == first
    for job in range(2):
        here = [await sample_group(local.policy(), number, job) for number in range(3)]
        there = [await sample_group(remote.policy(), number, job) for number in range(3)]
        assert all(map(same_tokens, here, there)), "tokens, log-probs and versions are the same"
        status, expected = await train(remote, here, job), await train(local, here, job)
        assert status.metadata == expected.metadata
        assert await remote.policy().fingerprint() == await local.policy().fingerprint() != first
    await remote.cleanup()
    await local.cleanup()
    assert not server.api._sessions, "the session ends with the adapter"


async def test_what_the_agent_asks_for_comes_back_exactly(local, remote):
    here, there = local.policy(), remote.policy()
    params = SamplingParams(max_tokens=6, seed=3, top_k=5)
    request = ModelRequest(prompt(1), params, num_top_logprobs=2)
    reply = await there.sample(request)
    assert reply.tokens.supports is not None
    assert reply == await here.sample(request), "with supports, texts and other likely tokens"
    given = {"role": "assistant", "content": "the quick"}
    encoded, expected = await there.encode(request, given), await here.encode(request, given)
    assert (encoded.prompt_token_ids, encoded.token_ids) == (expected.prompt_token_ids, expected.token_ids)
    assert all(value != value for value in encoded.logprobs), "not sampled"
    sequence = [*reply.tokens.prompt_token_ids, *reply.tokens.token_ids]
    assert (await there.score([sequence]))[0].tolist() == (await here.score([sequence]))[0].tolist()
    assert (there.chat_template, there.history, there.max_model_len) == (
        local.engine.policy.chat_template,
        "template",
        local.engine.policy.max_model_len,
    )
    with pytest.raises(ContextOverflow, match="max_model_len"):
        await there.sample(ModelRequest(prompt(2000), params))


def lose_first_response(monkeypatch, method, end):
    """Lets the server act on the first such request, and its response get lost; returns the number of such requests."""
    send, seen = OpenAIEndpoint.send, []

    async def lose(self, called, path, **arguments):
        text = await send(self, called, path, **arguments)
        if called == method and path.endswith(end):
            seen.append(path)
            if len(seen) == 1:
                raise RetryableError("the response is lost", wait_s=0.0)
        return text

    monkeypatch.setattr(OpenAIEndpoint, "send", lose)
    return seen


async def train_here(local, groups):
    await train(local, groups, 0)
    return await local.policy().fingerprint()


async def test_a_lost_response_makes_no_second_job(local, remote, monkeypatch):
    groups = await sample_groups(remote)
    seen = lose_first_response(monkeypatch, "POST", "/jobs")
    await train(remote, groups, 0)
    assert len(seen) == 2
    assert await remote.policy().fingerprint() == await train_here(local, groups)


@pytest.mark.slow
async def test_without_the_job_key_a_lost_response_trains_twice(local, remote, monkeypatch):
    keys = (f"key {number}" for number in range(9))
    read = session_module.read_job
    monkeypatch.setattr(session_module, "read_job", lambda sent: read(sent.model_copy(update={"job_key": next(keys)})))
    groups = await sample_groups(remote)
    lose_first_response(monkeypatch, "POST", "/jobs")
    ref = await remote.submit(collect(groups, 0))
    for key in ("key 0", "key 1"):
        await remote.wait_until_complete(ref.model_copy(update={"metadata": {"job_key": key}}))
    await remote.policy().publish(1)
    assert await remote.policy().fingerprint() != await train_here(local, groups)


async def test_a_job_that_is_sent_again_is_not_one_too_many(remote, monkeypatch, set_limit):
    """The one job that may wait is the job itself, whose response was lost."""
    release, update = threading.Event(), Engine.update
    monkeypatch.setattr(Engine, "update", lambda *args, **options: release.wait(12) and update(*args, **options))
    set_limit("waiting_jobs", 1)
    groups = await sample_groups(remote)
    ref = await remote.submit(collect(groups, 0))
    async with asyncio.timeout(9):  # the server would refuse another job for 10 s
        assert await remote.submit(collect(groups, 0)) == ref
    release.set()
    await remote.wait_until_complete(ref)


async def test_a_lost_response_opens_no_second_session(server, monkeypatch):
    seen = lose_first_response(monkeypatch, "POST", "/sessions")
    remote = await open_adapter(server)
    assert len(seen) == 2
    assert len(server.api._sessions) == 1
    await remote.cleanup()


async def test_a_job_key_stands_for_one_job(remote):
    groups = await sample_groups(remote, 2)
    ref = await remote.submit(collect(groups, 0))
    with pytest.raises(BackendError, match="submitted with other trajectories"):
        await remote.submit(collect(groups[:1], 0))
    await remote.wait_until_complete(ref)


@pytest.mark.slow
async def test_another_session_goes_on_from_saved_weights(server, tmp_path):
    config = {"lora": {"r": 4}}
    first = await open_adapter(server, config)
    jobs = [[await sample_group(first.policy(), number, job) for number in range(3)] for job in range(2)]
    await train(first, jobs[0], 0)
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    assert await first.save(folder, 1)
    saved = await first.policy().fingerprint()
    await train(first, jobs[1], 1)
    expected = await first.policy().fingerprint()
    await first.cleanup()
    second = await open_adapter(server, config)
    await second.restore(folder, 1)
    assert (second.policy().version, await second.policy().fingerprint()) == (1, saved)
    await train(second, jobs[1], 1)
    assert await second.policy().fingerprint() == expected, "with the state of the optimizer"
    named = await open_adapter(server, {**config, "model": str(folder)})
    assert await named.policy().fingerprint() == saved, "the folder stands for its weights, as in `reinforge eval`"
    await named.cleanup()
    other = await open_adapter(server, {"lora": {"r": 8}})
    with pytest.raises(BackendError, match="of another model or other adapters"):
        await other.restore(folder, 1)
    await second.cleanup()
    await other.cleanup()


@pytest.mark.slow
async def test_the_server_keeps_the_weights_that_the_run_refers_to(server, tmp_path):
    remote = await open_adapter(server, {"lora": {"r": 4}})
    checkpoints = tmp_path / "run" / "checkpoints"
    for version in (0, 1, 2):
        assert await remote.save(checkpoints / f"step-{version:06d}", version)
        if version == 1:
            names = {json.loads(path.read_text())["model"] for path in checkpoints.glob("*/openai_model.json")}
            shutil.rmtree(checkpoints / "step-000000")
    [folder] = (tmp_path / "kept").iterdir()
    kept = {path.name for path in (folder / "saves").iterdir()}
    referred = {
        json.loads(path.read_text())["model"].partition("/")[2] for path in checkpoints.glob("*/openai_model.json")
    }
    assert kept == referred
    assert len(names) == len(kept) == 2
    assert all(find_damage(folder / "saves" / name) is None for name in kept)
    assert all(is_model_folder(folder / "saves" / name) for name in kept), "what `reinforge serve` takes"
    await remote.cleanup()


@pytest.mark.slow
async def test_a_silent_client_makes_room_and_its_run_is_told_to_resume(tiny_model_dir, tmp_path):
    bases = BaseModels({NAME: PolicyConfig(model=str(tiny_model_dir))})
    api = SessionsApi(bases, tmp_path / "kept", device="cpu", limits=SessionLimits(max_sessions=1, lease_s=1e-3))
    async with ServeApp(ServedModels(), [api], token="secretkey") as app:
        gone = await open_adapter(app, {"lora": {"r": 4}})
        gone._session._beating.cancel()
        present = await open_adapter(app, {"lora": {"r": 4}})
        with pytest.raises(BackendUnavailable, match="resume the run"):
            await gone.policy().sample(ModelRequest(prompt(0), SamplingParams(max_tokens=1)))
        assert await present.is_healthy()
        assert not await gone.is_healthy()
        await gone.cleanup()
        await present.cleanup()


@pytest.mark.parametrize(
    ("path", "settings", "policy"),
    [
        ("finetuning.policy.tokenizer", {}, {"tokenizer": "x"}),
        ("finetuning.policy.dtype", {}, {"dtype": "bfloat16"}),
        ("finetuning.policy.quantization", {}, {"quantization": "nf4", "lora": {"r": 4}}),
        ("finetuning.deterministic", {"deterministic": True}, {}),
        ("finetuning.limits.max_staleness", {"limits": LimitsConfig(max_staleness=1)}, {}),
    ],
)
async def test_what_a_session_cannot_honour_is_refused_before_a_request(path, settings, policy):
    adapter = HttpAdapter(HttpAdapterConfig(url="http://127.0.0.1:1"), GRPOConfig())
    [problem] = adapter.validate(config_of(policy, **settings))
    assert problem.path == path
    with pytest.raises(ConfigError):
        await adapter.initialize(config_of(policy, **settings))


async def test_a_wrong_key_names_the_setting(server):
    adapter = HttpAdapter(HttpAdapterConfig(url=server.address, api_key="wrong"), GRPOConfig())
    with pytest.raises(BackendError, match="check the trainer adapter's api_key"):
        await adapter.initialize(config_of())
    assert adapter.policy() is None


@pytest.mark.slow
async def test_a_server_that_was_stopped_has_the_saved_weights_when_it_is_back(tiny_model_dir, tmp_path):
    bases = BaseModels({NAME: PolicyConfig(model=str(tiny_model_dir))})
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    async with ServeApp(ServedModels(), [SessionsApi(bases, tmp_path / "kept", device="cpu")]) as app:
        before = await open_adapter(app)
        await train(before, await sample_groups(before, 2), 0)
        await before.save(folder, 1)
        saved = await before.policy().fingerprint()
    async with ServeApp(ServedModels(), [SessionsApi(bases, tmp_path / "kept", device="cpu")], port=app.port) as app:
        with pytest.raises(BackendUnavailable, match="resume the run"):
            await before.policy().fingerprint()
        after = await open_adapter(app)
        await after.restore(folder, 1)
        assert await after.policy().fingerprint() == saved
        await after.cleanup()
    await before.cleanup()
