"""Jobs, versions, rollback, checkpoints."""

import asyncio
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.model.loading import load_model, load_tokenizer
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.errors import ConfigError, EngineError
from reinforge.runs.checkpoints import copy_model
from reinforge.types.sample import Needs
from tests.engines import CLIPPED, load_engine
from tests.engines import train as make_job
from tests.models import make_tiny_model
from tests.samples import ask, hold_steps, make_sample, random_samples, request


def load(folder, **settings) -> Engine:
    return load_engine(folder, **{"batch": {"steps_per_job": 2}, "max_num_seqs": 8, **settings})


def train(engine: Engine, seed: int = 0, ends: bool = True):
    return make_job(engine, random_samples(6, seed), ends=ends)


@pytest.fixture(scope="module")
def loaded(tiny_model_dir):
    with load(tiny_model_dir, keep_initial=True) as engine:
        yield engine


@pytest.fixture
def engine(loaded):
    """An engine as it was loaded."""
    loaded.begin_job()
    loaded.reset()
    loaded.end_job()
    asyncio.run(loaded.policy.publish(0))
    return loaded


def test_a_job_changes_weights_and_publish_their_version(engine):
    before = engine.fingerprint()
    assert before == engine.fingerprint() == asyncio.run(engine.policy.fingerprint())
    report = train(engine)
    assert report.num_updates == 2
    assert {"loss", "grad_norm", "lr", "entropy", "clip_fraction", "ratio", "approx_kl"} <= set(report.metrics)
    assert engine.fingerprint() != before
    asyncio.run(engine.policy.publish(7))
    reply = ask(engine.policy, [request()])[0]
    assert (engine.policy.version, reply.tokens.policy_version) == (7, 7)


def test_begin_job_waits_for_replies_and_requests_wait_for_publish(engine):
    async def run() -> None:
        with hold_steps(engine) as held:
            early = [asyncio.create_task(engine.policy.sample(request(f"{i}", max_tokens=40))) for i in range(8)]
            assert await asyncio.to_thread(held.wait, 60)
            assert engine.policy.stats().running == 8
            beginning = asyncio.create_task(asyncio.to_thread(engine.begin_job))
            while "default" not in engine._sampler._admission.paused:
                await asyncio.sleep(0.001)
        await beginning
        assert engine.policy.stats().running == 0
        late = asyncio.create_task(engine.policy.sample(request("late")))
        await asyncio.sleep(0.05)
        assert all(task.done() for task in early)
        assert not late.done()
        await asyncio.to_thread(engine.update, random_samples(4), CLIPPED, progress_start=0, progress_end=1)
        assert not late.done()
        with pytest.raises(EngineError, match="job is still open"):
            await engine.policy.publish(1)
        engine.end_job()  # without publish, the waiting request opens admission
        assert (await late).tokens.policy_version == 1
        assert {task.result().tokens.policy_version for task in early} == {0}

    asyncio.run(run())


@pytest.mark.parametrize("ended", [False, True])
def test_rollback_restores_weights_optimizer_and_version(engine, ended):
    train(engine)
    asyncio.run(engine.policy.publish(1))
    before = engine.fingerprint()
    moments = {name: value.clone() for name, value in engine.learner.state().items()}
    train(engine, seed=1, ends=ended)
    assert engine.fingerprint() != before
    engine.rollback()
    assert engine.fingerprint() == before
    assert engine.learner.num_steps == 2
    assert all(torch.equal(value, moments[name]) for name, value in engine.learner.state().items())
    assert ask(engine.policy, [request()])[0].tokens.policy_version == 1
    with pytest.raises(EngineError, match="rollback"):
        engine.rollback()


def test_jobs_are_opened_and_ended_once(engine):
    with pytest.raises(EngineError, match="no job is open"):
        engine.update([], CLIPPED, progress_start=0, progress_end=1)
    with pytest.raises(EngineError, match="no job is open"):
        engine.end_job()
    engine.begin_job()
    with pytest.raises(EngineError, match="a job is already open"):
        engine.begin_job()
    engine.rollback()


def test_score_sets_what_the_algorithm_needs(tiny_model_dir):
    with load(tiny_model_dir, keep_reference=True) as engine:
        replies = ask(engine.policy, [request(f"{i}", temperature=0.7) for i in range(6)])
        samples = [make_sample(reply.tokens) for reply in replies]
        train(engine)
        engine.score(samples, Needs(old_logprobs=True, ref_logprobs=True))
        for sample in samples:
            assert np.abs(sample.ref_logprobs - sample.sampling_logprobs).max() <= 1e-5
            assert np.abs(sample.old_logprobs - sample.sampling_logprobs).max() > 1e-4
            assert not sample.old_logprobs[~sample.loss_mask].any()
        with pytest.raises(EngineError, match="critic"):
            engine.score(samples, Needs(values=True))


def test_ref_logprobs_need_a_reference(engine):
    with pytest.raises(EngineError, match="keep_reference"):
        engine.score(random_samples(1), Needs(ref_logprobs=True))


def test_a_checkpoint_loads_in_transformers_and_with_its_version(engine, tiny_model_dir, tmp_path):
    train(engine)
    folder = tmp_path / "step-000001"
    engine.save(folder, version=3)
    engine.save(folder, version=3)  # replaces
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    saved = engine.fingerprint()
    module = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(p, engine.learner.parameters[name].cpu()) for name, p in module.named_parameters())
    assert AutoTokenizer.from_pretrained(folder).chat_template == engine.tokenizer.chat_template
    assert json.loads((folder / "training/state.json").read_text())["version"] == 3
    with load(tiny_model_dir) as other:
        other.load_weights(folder)
        assert other.fingerprint() == saved
        assert ask(other.policy, [request()])[0].tokens.policy_version == 3


def test_load_weights_within_a_job_can_be_rolled_back(engine, tiny_model_dir, tmp_path):
    before = engine.fingerprint()
    other = make_tiny_model(tmp_path / "other", seed=9)
    engine.begin_job()
    engine.load_weights(other)
    assert engine.fingerprint() != before
    engine.rollback()
    assert engine.fingerprint() == before
    wrong = make_tiny_model(tmp_path / "wrong", hidden_size=32)
    with pytest.raises(EngineError, match="a different model"):
        engine.load_weights(wrong)
    assert engine.fingerprint() == before
    assert ask(engine.policy, [request()])[0].tokens.policy_version == 0


def test_copy_model_leaves_the_training_files(engine, tmp_path):
    engine.save(tmp_path / "checkpoint", version=0)
    copy_model(tmp_path / "checkpoint", tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert "training" not in names


def test_random_weights_depend_on_the_seed(tiny_model_dir, tmp_path):
    for path in tiny_model_dir.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    policy = PolicyConfig(model=str(tmp_path), init="random")
    modules = [load_model(policy, seed, "cpu").module for seed in (0, 0, 1)]
    first, again, other = (torch.cat([p.flatten() for p in module.parameters()]) for module in modules)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_invalid_configurations_are_refused(tiny_model_dir):
    with pytest.raises(ConfigError, match="the model supports at most 256 tokens"):
        load(tiny_model_dir, max_model_len=999)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"finetuning\.device"):
            load(tiny_model_dir, device="cuda")


def test_a_chat_template_can_be_given(tiny_model_dir, tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    for given in (template, str(tmp_path / "t.jinja")):
        tokenizer = load_tokenizer(PolicyConfig(model=str(tiny_model_dir), chat_template=given))
        assert tokenizer.decode(PromptRenderer(tokenizer).render(request("hello"))) == "hello"
