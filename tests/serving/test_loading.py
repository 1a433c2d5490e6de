"""Models are loaded from folders; adapters of one base model share an engine and a batch."""

import asyncio
import json
import shutil
import threading

import pytest

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.errors import ConfigError, EngineError
from reinforge.serving.loading import LoadSettings, ModelLoader
from reinforge.serving.models import ServedModels
from reinforge.types.request import ModelRequest, SamplingParams
from tests.serving.serving import says

ASK = ModelRequest(says("the quick brown"), SamplingParams(temperature=0, max_tokens=12))


def save_adapter(model, folder, *, seed, r=4, scale=0.5):
    import torch

    config = PolicyConfig(model=str(model), lora=LoRAConfig(r=r, lora_alpha=2 * r))
    with Engine.load(config, seed=seed, device="cpu", frozen=True) as engine:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in engine.model.trained_parameters.values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        engine.begin_job()
        engine.end_job()
        engine.save(folder, version=1)


@pytest.fixture(scope="module")
def adapters(tiny_model_dir, tmp_path_factory):
    """Two adapters of other ranks."""
    root = tmp_path_factory.mktemp("adapters")
    for name, seed, r in (("one", 1, 4), ("two", 2, 8)):
        save_adapter(tiny_model_dir, root / name, seed=seed, r=r)
    return root


async def sample_alone(folder):
    """Returns the reply and its log-probs of an engine that has this model alone."""
    with Engine.load(PolicyConfig(model=str(folder)), seed=0, device="cpu", frozen=True) as engine:
        tokens = (await engine.policy.sample(ASK)).tokens
        return tokens.token_ids, tokens.logprobs


@pytest.fixture
async def loader():
    models = ServedModels()
    loading = ModelLoader(models, LoadSettings(device="cpu", takes_adapters=True))
    yield loading
    await models.close()
    assert loading._engines == {}


async def test_adapters_join_the_engine_of_their_base_and_answer_as_if_they_were_alone(
    loader, tiny_model_dir, adapters
):
    alone = {name: await sample_alone(adapters / name) for name in ("one", "two")}
    base = await sample_alone(tiny_model_dir)
    (name,) = await loader.open(str(tiny_model_dir))
    await loader.load("ft:one", adapters / "one", name)
    await loader.load("ft:two", adapters / "two", name)
    models = loader._models
    assert models.names == (name, "ft:one", "ft:two")
    assert len({id(model.policy.sampler) for model in models}) == 1
    asked = ["ft:one", name, "ft:two", name, "ft:one"]
    replies = await asyncio.gather(*(models.find(each).policy.sample(ASK) for each in asked))
    expected = {"ft:one": alone["one"], "ft:two": alone["two"], name: base}
    for each, reply in zip(asked, replies, strict=True):
        token_ids, logprobs = expected[each]
        assert reply.tokens.token_ids == token_ids, each
        assert reply.tokens.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert len({tuple(logprobs) for _, logprobs in expected.values()}) == 3
    assert models.find("ft:one").describe()["root"] == name


@pytest.mark.slow
async def test_an_adapter_joins_and_leaves_while_others_answer(loader, tiny_model_dir, adapters):
    (name,) = await loader.open(str(tiny_model_dir))
    models, stop = loader._models, asyncio.Event()
    expected = (await models.find(name).policy.sample(ASK)).tokens.token_ids

    async def chat():
        count = 0
        while not stop.is_set():
            assert (await models.find(name).policy.sample(ASK)).tokens.token_ids == expected
            count += 1
        return count

    chatting = [asyncio.ensure_future(chat()) for _ in range(4)]
    for _ in range(3):
        await loader.load("ft:one", adapters / "one", name)
        tokens = (await models.find("ft:one").policy.sample(ASK)).tokens
        assert tokens.token_ids != expected
        await loader.unload("ft:one")
        assert "ft:one" not in models
    stop.set()
    assert min(await asyncio.gather(*chatting)) > 0


@pytest.mark.slow
async def test_two_names_of_one_folder_share_an_adapter(loader, tiny_model_dir, adapters):
    (name,) = await loader.open(str(tiny_model_dir))
    await loader.load("ft:one", adapters / "one", name)
    await loader.load("ft:one:ckpt-step-3", adapters / "one", name)
    await loader.load("ft:one", adapters / "one", name)  # again: nothing to do
    models = loader._models
    assert models.find("ft:one").policy is models.find("ft:one:ckpt-step-3").policy
    await loader.unload("ft:one")
    assert (await models.find("ft:one:ckpt-step-3").policy.sample(ASK)).num_completion_tokens > 0
    await loader.unload("ft:one")


async def test_the_score_of_an_added_adapter_is_its_own(loader, tiny_model_dir, adapters):
    (name,) = await loader.open(str(tiny_model_dir))
    await loader.load("ft:one", adapters / "one", name)
    policy = loader._models.find("ft:one").policy
    tokens = (await policy.sample(ASK)).tokens
    prompt = tokens.prompt_token_ids
    sampled = await policy.sample(ModelRequest(says("the quick brown"), SamplingParams(seed=1, max_tokens=6)))
    scores = (await policy.score([[*prompt, *sampled.tokens.token_ids]]))[0][len(prompt) :]
    assert sampled.tokens.logprobs == pytest.approx(scores.tolist(), abs=1e-4)
    assert await policy.fingerprint() != await loader._models.find(name).policy.fingerprint()


async def test_an_adapter_of_another_model_gets_no_place(tiny_model_dir, adapters):
    config = PolicyConfig(model=str(tiny_model_dir), lora=LoRAConfig(r=1))
    with Engine.load(config, seed=0, device="cpu", frozen=True) as engine:
        with pytest.raises(EngineError, match="cannot load the adapter"):
            engine.add_adapter("x", adapters / "none")
        with pytest.raises(EngineError, match="taken"):
            engine.add_adapter("default", adapters / "one")
        with pytest.raises(EngineError, match="was not added"):
            engine.remove_adapter("default")
        assert list(engine.model.module.peft_config) == ["default"]
        assert (await engine.policy.sample(ASK)).num_completion_tokens > 0


async def test_what_waits_for_a_removed_adapter_fails(tiny_model_dir, adapters):
    config = PolicyConfig(model=str(tiny_model_dir), lora=LoRAConfig(r=1))
    with Engine.load(config, seed=0, device="cpu", frozen=True) as engine:
        policy = engine.add_adapter("one", adapters / "one")
        engine._sampler.pause("one")
        waiting = asyncio.ensure_future(policy.sample(ASK))
        while not engine._sampler.has_waiting("one"):
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.remove_adapter, "one")
        with pytest.raises(EngineError, match="was removed"):
            await waiting


@pytest.mark.slow
async def test_the_versions_of_a_run_are_names_of_one_engine(tiny_model_dir, adapters, tmp_path):
    run = tmp_path / "support-1"
    shutil.copytree(adapters / "two", run / "model")
    for version, name in ((3, "one"), (12, "two")):
        shutil.copytree(adapters / name, run / "checkpoints" / f"step-{version:06d}")
        state = run / "checkpoints" / f"step-{version:06d}" / "training" / "state.json"
        state.write_text(json.dumps({**json.loads(state.read_text()), "version": version}))
    (run / "run.sqlite").touch()
    models = ServedModels()
    loading = ModelLoader(models, LoadSettings(output_dir=tmp_path, device="cpu", serves_versions=True))
    assert await loading.open("last") == ["support-1", "support-1@3", "support-1@12"]
    replies = [await model.policy.sample(ASK) for model in models]
    assert [reply.version for reply in replies] == [1, 3, 12]
    assert replies[0].tokens.token_ids == replies[2].tokens.token_ids != replies[1].tokens.token_ids
    assert len({id(model.policy.sampler) for model in models}) == 1
    with pytest.raises(ConfigError, match="is not a run, so it has no versions"):
        await loading.open(str(tiny_model_dir))
    await models.close()


async def test_a_name_is_served_once(loader, tiny_model_dir):
    await loader.open(str(tiny_model_dir))
    with pytest.raises(ConfigError, match="two models are named"):
        await loader.open(str(tiny_model_dir))
    with pytest.raises(ConfigError, match='no run and no folder "nothing"'):
        await loader.open("nothing")


@pytest.mark.slow
async def test_an_engine_that_an_adapter_is_joining_is_not_closed(tiny_model_dir, adapters, monkeypatch):
    models = ServedModels()
    loader = ModelLoader(models, LoadSettings(device="cpu"))
    [name] = await loader.open(str(adapters / "one"))
    joining, go, added = threading.Event(), threading.Event(), threading.Event()
    add, close = Engine.add_adapter, Engine.close

    def add_slowly(*args, **settings):
        joining.set()
        assert go.wait(10)
        made = add(*args, **settings)
        added.set()
        return made

    def close_late(engine):
        assert added.wait(10)
        close(engine)

    monkeypatch.setattr(Engine, "add_adapter", add_slowly)
    monkeypatch.setattr(Engine, "close", close_late)
    loading = asyncio.ensure_future(loader.load("other", adapters / "two", name))
    await asyncio.to_thread(joining.wait, 10)
    removal = asyncio.ensure_future(models.remove(name))
    await asyncio.sleep(0.05)
    go.set()
    await asyncio.gather(loading, removal)
    assert (await models.find("other").policy.sample(ASK)).tokens.token_ids
    await loader.close()
