"""`_type: tinker`: what the service is sent, and that its sums make the steps of the embedded engine."""

import math

import numpy as np
import pytest

from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.loader import build_config
from reinforge.config.policy import BatchConfig, LoRAConfig, OptimizerConfig, PolicyConfig, ScheduleConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine import Engine
from reinforge.errors import BackendError, ConfigError
from reinforge.protocols.tinker.adapter import TinkerAdapter
from reinforge.protocols.tinker.engine import TinkerEngine, build_data, translate_loss
from reinforge.protocols.tinker.service import SDK, TinkerAdapterConfig, TinkerService
from reinforge.registry import REGISTRY, TypedConfig
from reinforge.rollout.episode import build_episode_item
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.job import TrainingStatusEnum
from reinforge.types.request import ModelRequest, SamplingParams
from reinforge.types.sample import LossSpec, Needs
from reinforge.types.trajectory import Trajectory, TrajectoryCollection
from tests.protocols.tinker_service import ServiceDouble
from tests.samples import random_samples

CONFIG = TinkerAdapterConfig(base_model="tiny", base_url="http://127.0.0.1:1", rank=4)
CLIPPED = LossSpec("clipped_pg", {"clip_low": 0.2, "clip_high": 0.3, "tis_cap": None})
LOSSES = {
    "clipped_pg": (CLIPPED, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.3}),
    "cispo": (LossSpec("cispo", {"clip_high": 3.0}), "cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "gspo": (LossSpec("gspo"), "gspo", {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
    "cross_entropy": (LossSpec("cross_entropy"), "cross_entropy", {}),
}


def make_policy(folder, **settings):
    return PolicyConfig(
        model=str(folder),
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-8, weight_decay=0.0),
        schedule=ScheduleConfig(name="linear", warmup_steps=2),
        batch=BatchConfig(batch_size=4, num_iterations=2),
        **settings,
    )


def make_samples(count=10):
    made = random_samples(count)
    rng = np.random.default_rng(1)
    for sample in made:
        sample.temperatures[:] = 1.0
        sample.advantages = (rng.normal(size=len(sample)) * sample.loss_mask).astype(np.float32)
    return made


@pytest.fixture
def service(tiny_model_dir):
    double = ServiceDouble(tiny_model_dir)
    yield double
    if not double.is_closed:
        double.close()


@pytest.fixture
def engine(tiny_model_dir, service):
    return TinkerEngine(make_policy(tiny_model_dir), CONFIG, 0, lambda config, seed: service)


@pytest.mark.parametrize(
    "name", ["clipped_pg", *(pytest.param(name, marks=pytest.mark.slow) for name in LOSSES if name != "clipped_pg")]
)
def test_a_job_makes_the_steps_of_the_embedded_engine(tiny_model_dir, engine, service, name):
    """The same samples, weights, optimizer and schedule: the same log-probs after the job, loss by loss."""
    loss, service_loss, settings = LOSSES[name]
    lora = LoRAConfig(r=4, lora_alpha=4)
    with Engine.load(make_policy(tiny_model_dir, lora=lora), seed=0, device="cpu", frozen=True) as local:
        first = local.make_adapter(rank=4, seed=3, alpha=4)
        local.begin_job()
        local.put_adapter(first)
        service.put(first)
        before = local.logprobs(make_samples())
        assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(before, engine.logprobs(make_samples()), strict=True))
        own = local.update(make_samples(), loss, progress_start=0.0, progress_end=0.5)
        engine.begin_job()
        report = engine.update(make_samples(), loss, progress_start=0.0, progress_end=0.5)
        after, there = local.logprobs(make_samples()), engine.logprobs(make_samples())
    assert service.calls[0] == (service_loss, pytest.approx(settings), 3)
    assert (report.num_updates, report.num_tokens) == (own.num_updates, own.num_tokens)
    for key in ("loss", "lr", "grad_norm"):
        assert report.metrics[key] == pytest.approx(own.metrics[key], rel=1e-3, abs=1e-5), key
    assert max(np.abs(a - b).max() for a, b in zip(after, before, strict=True)) > 1e-2
    assert all(np.allclose(a, b, atol=2e-3) for a, b in zip(after, there, strict=True))


def test_what_the_service_is_sent():
    sample = make_samples(1)[0]
    sample.weight, n = 2.0, sample.num_trained
    [datum] = build_data([sample], "ppo")
    assert list(datum.token_ids) == sample.token_ids[:-1].tolist()
    assert list(datum.targets) == sample.token_ids[1:].tolist()
    assert datum.numbers["advantages"] == pytest.approx(sample.advantages[1:] / n)
    assert datum.numbers["logprobs"] == pytest.approx(np.where(sample.loss_mask, sample.sampling_logprobs, 0)[1:])
    [supervised] = build_data([sample], "cross_entropy")
    assert supervised.numbers["weights"] == pytest.approx(sample.loss_mask[1:] / n)
    [sequence] = build_data([sample], "gspo")
    assert sequence.numbers["sequence_ratio_mask"].tolist() == sample.loss_mask[1:].tolist()


def test_losses_are_those_of_the_service_and_others_are_refused():
    for loss, name, settings in LOSSES.values():
        assert translate_loss(loss) == (name, pytest.approx(settings))
    assert translate_loss(LossSpec("clipped_pg", {"clip_low": 1.0, "clip_high": math.inf}))[0] == "importance_sampling"
    with pytest.raises(ConfigError, match="no loss like dpo"):
        translate_loss(LossSpec("dpo"))
    with pytest.raises(ConfigError, match="kl_coef is 0.1, which the losses of Tinker's service do not have"):
        translate_loss(LossSpec("clipped_pg", {"kl_coef": 0.1}))


@pytest.mark.slow
def test_a_job_is_undone_and_a_checkpoint_resumed(engine, service, tmp_path):
    samples = make_samples()
    first = engine.logprobs(samples)
    engine.begin_job()
    engine.update(make_samples(), CLIPPED, progress_start=0, progress_end=0.5)
    assert not np.allclose(first[0], engine.logprobs(samples)[0])
    engine.rollback()
    assert all(np.array_equal(a, b) for a, b in zip(first, engine.logprobs(samples), strict=True))
    engine.begin_job()
    engine.update(make_samples(), CLIPPED, progress_start=0, progress_end=0.5)
    engine.end_job()
    engine.write(tmp_path / "step", 1)
    trained, steps = engine.logprobs(samples), engine._num_steps
    engine.begin_job()
    engine.update(make_samples(), CLIPPED, progress_start=0.5, progress_end=1)
    again = engine.logprobs(samples)
    engine.load_weights(tmp_path / "step")
    assert engine._num_steps == steps
    assert all(np.array_equal(a, b) for a, b in zip(trained, engine.logprobs(samples), strict=True))
    engine.update(make_samples(), CLIPPED, progress_start=0.5, progress_end=1)
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(again, engine.logprobs(samples), strict=True))


async def test_the_policy_samples_what_was_published(engine, service):
    request = ModelRequest([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=6, seed=1))
    reply = await engine.policy.sample(request)
    assert reply.tokens.policy_version == 0
    [row] = await engine.policy.score([[*reply.tokens.prompt_token_ids, *reply.tokens.token_ids]])
    assert row[reply.num_prompt_tokens :] == pytest.approx(reply.tokens.logprobs, abs=1e-5)
    await engine.policy.publish(3)
    assert (await engine.policy.sample(request)).tokens.policy_version == 3
    for wrong in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 4}, {"logit_bias": ((5, 1.0),)}):
        with pytest.raises(ValueError, match="with Tinker's service it must be"):
            await engine.policy.sample(ModelRequest(request.messages, SamplingParams(**wrong)))
    encoded = await engine.policy.encode(request, {"role": "assistant", "content": "yes"})
    assert engine.tokenizer.decode(encoded.token_ids) == "yes<|end|>"


def test_tokens_that_the_service_cannot_train_are_refused(engine):
    samples = make_samples(2)
    samples[0].temperatures[samples[0].loss_mask] = 0.5
    with pytest.raises(BackendError, match="sampled at temperature 1"):
        engine.update(samples, CLIPPED, progress_start=0, progress_end=1)
    engine.score(make_samples(2), Needs(old_logprobs=True))


def make_run(folder, **policy):
    settings = {"model": str(folder), "optimizer": {"learning_rate": 1e-3}, **policy}
    return FinetuneConfig(policy=PolicyConfig(**settings))


def test_settings_are_checked_before_a_request(tiny_model_dir, service):
    adapter = TinkerAdapter(CONFIG, GRPO(GRPOConfig()), open_service=lambda config, seed: service)
    assert adapter.validate(make_run(tiny_model_dir)) == []
    run = make_run(tiny_model_dir, optimizer={"name": "sgd"}, lora={"r": 4})
    run.sampling.temperature = 0.5
    found = {problem.path for problem in adapter.validate(run)}
    assert found == {
        "finetuning.policy.optimizer.learning_rate",
        "finetuning.policy.optimizer.name",
        "finetuning.policy.lora",
        "finetuning.sampling.temperature",
    }
    assert dict(adapter.effective_settings(run))["model"] == "tiny, LoRA of rank 4"


def test_without_the_sdk_the_message_says_what_to_install(tiny_model_dir):
    problems = TinkerAdapter(CONFIG, GRPO(GRPOConfig())).validate(make_run(tiny_model_dir))
    assert [problem.message for problem in problems] == [f"the package tinker {SDK} is not installed"]
    with pytest.raises(ConfigError, match="needs the package tinker"):
        TinkerService(CONFIG, 0)


class TinyModelConfig(TypedConfig, name="tiny_tokenizer"):
    """A bundled model."""


async def test_the_tokenizer_of_a_bundled_model_is_made_and_used(tiny_model_dir, service):
    made, registry = [], REGISTRY.child()

    async def make(config, builder):
        made.append(config)
        yield tiny_model_dir

    registry.add("model", TinyModelConfig, make)
    policy = {"tokenizer": "bundled:tiny_tokenizer", "optimizer": {"learning_rate": 1e-3}}
    adapters = {"service": {"_type": "tinker", "base_model": "tiny"}}
    loaded = build_config({"trainer_adapters": adapters, "finetuning": {"policy": policy}}, registry=registry)
    async with ComponentBuilder(loaded, registry) as builder:
        await builder.get_trainer_adapter("service")
        assert len(made) == 1
        folder = await builder.get_bundled(policy["tokenizer"])
    adapter = TinkerAdapter(CONFIG, GRPO(), open_service=lambda config, seed: service, tokenizer=folder)
    await adapter.initialize(FinetuneConfig(policy=PolicyConfig(**policy)))
    request = ModelRequest([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2))
    assert len((await adapter.policy().sample(request)).tokens.token_ids) <= 2
    await adapter.cleanup()


@pytest.mark.slow
async def test_a_job_of_the_loop_trains_there_and_is_served(tiny_model_dir, service, tmp_path):
    """Two siblings, one with a reward: its reply becomes likelier, and the next version has that."""
    adapter = TinkerAdapter(CONFIG, GRPO(GRPOConfig()), open_service=lambda config, seed: service)
    await adapter.initialize(make_run(tiny_model_dir, schedule={"warmup_steps": 0}))
    policy, asked = adapter.policy(), [{"role": "user", "content": "play"}]
    assert policy.model_name == "tiny"
    replies = [await policy.sample(ModelRequest(asked, SamplingParams(max_tokens=5, seed=seed))) for seed in (1, 2)]
    siblings = [
        Trajectory(
            episode=[build_episode_item(asked[0]), build_episode_item(reply.message, logprobs=reply.tokens)],
            reward=float(i),
            group_id="g",
        )
        for i, reply in enumerate(replies)
    ]
    rows = [[*reply.tokens.prompt_token_ids, *reply.tokens.token_ids] for reply in replies]
    before = [row.sum() for row in await policy.score(rows)]
    ref = await adapter.submit(TrajectoryCollection(trajectories=[siblings], run_id="r", epoch=0, job_key="a"))
    status = await adapter.wait_until_complete(ref)
    assert status.status is TrainingStatusEnum.COMPLETED, status.message
    assert status.metadata["num_updates"] == 1
    assert status.metadata["direction"] > 0
    assert [row.sum() for row in await policy.score(rows)] == pytest.approx(before), "not served yet"
    await policy.publish(1)
    after = [row.sum() for row in await policy.score(rows)]
    assert after[1] - before[1] > 0 > after[0] - before[0]
    assert await adapter.save(tmp_path / "step-000001", 1)
    assert await adapter.restore(tmp_path / "step-000001", 1)
    failed = await adapter.wait_until_complete(
        await adapter.submit(TrajectoryCollection(trajectories=[[siblings[0]]], run_id="r", epoch=1, job_key="b"))
    )
    assert failed.status is TrainingStatusEnum.FAILED
    assert [row.sum() for row in await policy.score(rows)] == pytest.approx(after)
    await adapter.cleanup()
    assert service.is_closed
