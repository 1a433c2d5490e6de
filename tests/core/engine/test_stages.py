"""Stages of a pipeline on the engine: settings, optimizer state, reference, checkpoints, rollback."""

import asyncio

import numpy as np
import pytest

from reinforge.config.policy import BatchConfig, OptimizerConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.errors import EngineError
from reinforge.types.sample import LossSpec, Needs
from tests.device import DEVICE
from tests.samples import random_samples

CLIPPED, IMITATION = LossSpec("clipped_pg"), LossSpec("cross_entropy")


def load(folder, **policy) -> Engine:
    """Two stages: AdamW at 1e-3 by default, and SGD at 0.1."""
    config = PolicyConfig(model=str(folder), batch=BatchConfig(steps_per_job=2), **policy)
    other = config.model_copy(update={"optimizer": OptimizerConfig(name="sgd", learning_rate=0.1)})
    stages = {"sft": (config, IMITATION), "rl": (other, CLIPPED)}
    return Engine.load(config, seed=0, device=DEVICE, keep_reference=True, stages=stages)


@pytest.fixture(params=[{}, pytest.param({"lora": {"r": 4}}, marks=pytest.mark.slow)], ids=["all weights", "lora"])
def policy(request):
    return request.param


def train(engine, stage, version):
    engine.begin_job()
    engine.use_stage(stage)
    report = engine.update(random_samples(6, version), CLIPPED, progress_start=0.0, progress_end=0.1)
    engine.end_job()
    asyncio.run(engine.policy.publish(version))
    return report


def ref_logprobs(engine):
    samples = random_samples(4)
    engine.score(samples, Needs(ref_logprobs=True))
    return np.concatenate([sample.ref_logprobs for sample in samples])


def own_logprobs(engine):
    return np.concatenate(engine.logprobs(random_samples(4)))


def test_the_reference_of_a_stage_is_the_model_that_it_began_with(tiny_model_dir, policy):
    with load(tiny_model_dir, **policy) as engine:
        base = own_logprobs(engine)
        train(engine, "sft", 1)
        assert ref_logprobs(engine) == pytest.approx(base, abs=1e-5)
        began = own_logprobs(engine)
        assert not np.allclose(began, base, atol=1e-3)
        train(engine, "rl", 2)
        assert ref_logprobs(engine) == pytest.approx(began, abs=1e-5)
        train(engine, "rl", 3)
        own = own_logprobs(engine)
        assert ref_logprobs(engine) == pytest.approx(began, abs=1e-5)
        assert own_logprobs(engine).tolist() == own.tolist(), "scoring the reference changes no weight"


def test_a_checkpoint_in_the_middle_of_a_stage_brings_back_all_of_it(tiny_model_dir, tmp_path, policy):
    with load(tiny_model_dir, **policy) as engine:
        train(engine, "sft", 1)
        engine.save(tmp_path / "step-000001", 1)
        train(engine, "rl", 2)
        engine.save(tmp_path / "step-000002", 2)
        train(engine, "rl", 3)
        expected, reference = engine.fingerprint(), ref_logprobs(engine)
    with load(tiny_model_dir, **policy) as engine:
        engine.load_weights(tmp_path / "step-000002")
        assert engine.learner.stage == "rl"
        assert engine.missing_reference == 1
        engine.begin_job()
        with pytest.raises(EngineError, match="the reference of the stage rl is missing: the checkpoint of version 1"):
            engine.use_stage("rl")
        engine.rollback()
        engine.load_reference(tmp_path / "step-000001", 1)
        assert engine.missing_reference is None
        train(engine, "rl", 3)
        assert ref_logprobs(engine) == pytest.approx(reference, abs=1e-5)
        assert engine.fingerprint() == expected


def test_a_rollback_returns_to_the_stage_before(tiny_model_dir):
    with load(tiny_model_dir) as engine:
        train(engine, "sft", 1)
        before, moments = engine.fingerprint(), sorted(engine.learner.state())
        engine.begin_job()
        engine.use_stage("rl")
        engine.update(random_samples(6), CLIPPED, progress_start=0.0, progress_end=0.1)
        engine.rollback()
        assert (engine.learner.stage, engine.fingerprint()) == ("sft", before)
        assert sorted(engine.learner.state()) == moments


def test_an_unknown_stage_is_refused(tiny_model_dir):
    with load(tiny_model_dir) as engine:
        with pytest.raises(EngineError, match="no job is open"):
            engine.use_stage("sft")
        engine.begin_job()
        with pytest.raises(EngineError, match="no stage dpo; the engine was loaded with sft, rl"):
            engine.use_stage("dpo")
