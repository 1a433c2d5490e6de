"""The value head belongs to the job: it is saved, restored and rolled back with it."""

import shutil

import pytest
import torch

from reinforge.engine.model.heads import ValueHead
from reinforge.errors import EngineError
from reinforge.types.sample import LossSpec
from tests.core.numerics.test_ppo import with_returns
from tests.engines import load_engine
from tests.engines import train as make_job
from tests.samples import random_samples


def load(folder, critic=True):
    return load_engine(folder, batch={"steps_per_job": 2}, critic=critic)


def train(engine, seed=0, ends=True):
    loss = LossSpec("ppo" if engine.critic is not None else "clipped_pg")
    make_job(engine, with_returns(random_samples(6, seed)), loss, ends=ends)


def head(engine):
    return {name: value.clone() for name, value in engine.critic.state_dict().items()}


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def engine(tiny_model_dir):
    with load(tiny_model_dir) as engine:
        yield engine


def test_a_checkpoint_resumes_bit_by_bit_with_its_critic(engine, tiny_model_dir, tmp_path):
    train(engine)
    engine.save(tmp_path / "c", version=1)
    assert (tmp_path / "c" / "training" / "critic.safetensors").is_file()
    saved = head(engine)
    assert saved["weight"].any()
    train(engine, seed=1)
    with load(tiny_model_dir) as other:
        other.load_weights(tmp_path / "c")
        assert equal(head(other), saved)
        train(other, seed=1)
        assert equal(head(other), head(engine))
        assert other.fingerprint() == engine.fingerprint()
        other.load_weights(tiny_model_dir)
        assert not other.critic.weight.any(), "a plain model has no critic, so a new one starts"


def test_a_rollback_restores_the_critic(engine):
    train(engine)
    before = head(engine)
    train(engine, seed=1, ends=False)
    assert not equal(head(engine), before)
    engine.rollback()
    assert equal(head(engine), before)


def test_a_checkpoint_of_another_algorithm_is_used_without_its_critic(engine, tiny_model_dir, tmp_path):
    train(engine)
    engine.save(tmp_path / "c", version=1)
    with load(tiny_model_dir, critic=False) as plain:
        plain.load_weights(tmp_path / "c")
        train(plain)
        plain.save(tmp_path / "p", version=2)
    assert not (tmp_path / "p" / "training" / "critic.safetensors").exists()
    engine.load_weights(tmp_path / "p")
    assert not engine.critic.weight.any()


def test_a_damaged_critic_is_rejected_and_changes_nothing(engine, tmp_path):
    train(engine)
    engine.save(tmp_path / "c", version=1)
    shutil.copy(tmp_path / "c" / "config.json", tmp_path / "c" / "training" / "critic.safetensors")
    train(engine, seed=1)
    before, weights = head(engine), engine.fingerprint()
    with pytest.raises(EngineError, match=r"critic\.safetensors"):
        engine.load_weights(tmp_path / "c")
    assert equal(head(engine), before)
    assert engine.fingerprint() == weights


def test_the_critic_has_its_own_learning_rate(tiny_model_dir):
    with load(tiny_model_dir) as engine:
        groups = engine.learner.optimizer.param_groups
        assert isinstance(engine.critic, ValueHead)
        assert [group["peak"] for group in groups] == [1e-3, 1e-3, engine.config.critic.learning_rate]
