"""One process that holds all shards of its model: the same steps, and no whole weights while it makes them."""

import pytest
import torch

from reinforge.engine.training.data_parallel import DataParallel, choose_backend, listen
from reinforge.engine.training.sharding import ShardedModel
from reinforge.errors import BackendUnavailable, EngineError
from tests.engines import copy_weights, load_engine, measure_difference
from tests.engines import train as make_job
from tests.samples import ask, random_samples, request

LOOPBACK = "127.0.0.1"


@pytest.fixture
def peers():
    listener = listen(LOOPBACK)
    group = DataParallel(0, 1, listener.getsockname(), listener)
    yield group
    group.close()


@pytest.fixture
def load(tiny_model_dir):
    engines = []

    def make(**settings):
        policy = {"optimizer": {"learning_rate": 3e-3}, "batch": {"steps_per_job": 2, "micro_batch_tokens": 64}}
        engines.append(load_engine(tiny_model_dir, device="cpu", keep_initial=True, **policy, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def train(engine, seed=1):
    return make_job(engine, random_samples(9, seed))


def copy(engine):
    return list(copy_weights(engine.model).values())


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4}, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_shards_make_the_steps_of_the_whole_model(load, peers, monkeypatch, lora):
    alone, engine = load(lora=lora), load(lora=lora)
    assert engine.join_peers(peers, "full") == "full"
    before, sizes = copy(engine), []
    compute = ShardedModel.compute

    def look(self, *arguments, **settings):
        sizes.append(sum(p.numel() for p in engine.model.module.parameters()))
        return compute(self, *arguments, **settings)

    monkeypatch.setattr(ShardedModel, "compute", look)
    expected, report = train(alone), train(engine)
    assert measure_difference(copy(alone), copy(engine)) < 1e-5
    assert measure_difference(before, copy(engine)) > 1e-4
    assert report.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-5)
    assert len(sizes) > 2
    assert set(sizes) == {0}, "the whole weights are freed while the shards train"
    replies = [ask(each.policy, [request(seed=3)])[0].tokens for each in (alone, engine)]
    assert replies[0].token_ids == replies[1].token_ids


def test_a_job_is_undone_and_the_first_weights_come_back(load, peers):
    engine = load()
    engine.join_peers(peers, "full")
    first = engine.fingerprint()
    train(engine)
    engine.rollback()
    assert engine.fingerprint() == first
    train(engine)
    assert engine.fingerprint() != first
    engine.begin_job()
    engine.reset()
    engine.end_job()
    assert engine.fingerprint() == first


@pytest.mark.slow
def test_a_checkpoint_has_the_whole_state_and_is_loaded_into_shards(load, peers, tmp_path):
    engine, alone = load(), load()
    engine.join_peers(peers, "full")
    train(engine)
    engine.save(tmp_path / "one", 1)
    trained = engine.fingerprint()
    train(engine, 2)
    expected = copy(engine)
    engine.load_weights(tmp_path / "one")
    assert engine.fingerprint() == trained
    train(engine, 2)
    assert measure_difference(expected, copy(engine)) == 0, "with the optimizer state of the checkpoint"
    alone.load_weights(tmp_path / "one")
    train(alone, 2)
    assert measure_difference(expected, copy(alone)) < 1e-5


def test_a_number_that_is_not_finite_skips_the_step(load, peers):
    engine = load()
    engine.join_peers(peers, "full")
    before = copy(engine)
    with torch.no_grad():
        next(iter(engine.learner.parameters.values())).fill_(torch.nan)
    engine.learner.gather_weights()
    report = train(engine)
    assert (report.num_updates, report.num_skipped_steps) == (0, 2)
    assert any(not torch.equal(a, b) for a, b in zip(before, copy(engine), strict=True))


def test_a_process_that_stops_among_the_passes_sends_nothing_more(load, peers):
    """The others are in a pass: what came next would be taken for weights, and gloo would end their processes."""
    engine = load()
    engine.join_peers(peers, "full")
    engine.learner.stopping.set()
    with pytest.raises(EngineError, match="the engine is closed"):
        train(engine)
    assert peers.is_broken


def test_divided_weights_belong_to_the_processes_that_they_began_with(load, peers):
    engine = load()
    engine.join_peers(peers, "full")
    with pytest.raises(BackendUnavailable, match="resume the run from its last checkpoint"):
        engine.join_peers(None)


def test_what_cannot_be_divided_is_refused_or_replicated(load, peers):
    engine = load(lora={"rank": 2}, adapters=("a", "b"))
    with pytest.raises(EngineError, match="sharding: full is not possible: 2 adapters are trained separately"):
        engine.join_peers(peers, "full")
    assert engine.join_peers(peers, "auto") == "replicate"


def test_gradients_on_a_gpu_go_by_nccl():
    assert choose_backend("cpu") == choose_backend("mps") == "gloo"
    assert choose_backend("cuda") == "cpu:gloo,cuda:nccl"
