"""How much memory training adds, and what follows from it."""

import errno
import os
import re
import tempfile
from contextlib import ExitStack

import pytest
import torch

from reinforge.engine.devices import MemoryUse
from reinforge.engine.training import memory_need, scarce_memory
from reinforge.engine.training.memory_need import MemoryNeed, estimate_training, measure_need, needs_sharding
from reinforge.engine.training.scarce_memory import allocate_file
from reinforge.errors import StorageError
from tests.engines import load_engine, train
from tests.samples import random_samples

GIB = 2**30


@pytest.fixture(autouse=True)
def _no_micro_batches(monkeypatch):
    monkeypatch.setattr(memory_need, "estimate_token", lambda model: 0)


@pytest.fixture
def load(tiny_model_dir):
    with ExitStack() as engines:
        yield lambda **policy: engines.enter_context(load_engine(tiny_model_dir, device="cpu", **policy))


@pytest.fixture(scope="module")
def learner(tiny_model_dir):
    """That of an engine which never trains."""
    with load_engine(tiny_model_dir, device="cpu") as engine:
        yield engine.learner


@pytest.mark.parametrize(
    ("policy", "per_weight"),
    [
        ({}, 4 + 8 + 4 + 8),  # gradient, two moments, and to undo a job the weight and its moments
        ({"optimizer": {"name": "sgd", "momentum": 0.0}}, 4 + 4),
        ({"dtype": "bfloat16"}, 4 + 8 + 2 + 8 + 4),  # the gradient and the moments belong to the float32 copy
    ],
)
def test_each_weight_counts_with_what_training_keeps_of_it(load, policy, per_weight):
    engine = load(**policy)
    assert estimate_training(engine.learner) == engine.num_parameters * per_weight


def test_lora_adds_little(load, learner):
    assert estimate_training(load(lora={"rank": 2}).learner) < 0.3 * estimate_training(learner)


def test_of_a_micro_batch_one_sample_counts(load, monkeypatch):
    monkeypatch.setattr(memory_need, "estimate_token", lambda model: 10**12)
    learner = load(max_model_len=100, batch={"micro_batch_tokens": 8192}).learner
    assert estimate_training(learner) // 10**12 == 100
    learner.micro_batch_tokens = 64  # as after an error
    assert estimate_training(learner) // 10**12 == 64


def test_processes_share_the_memory_of_a_machine_but_not_a_gpu(learner, monkeypatch):
    monkeypatch.setattr(memory_need, "measure_memory", lambda device: MemoryUse("cpu", 2 * GIB, 8 * GIB))
    assert measure_need(learner, 2).total == 4 * GIB
    assert measure_need(learner, 1).total == 8 * GIB


@pytest.mark.parametrize(
    ("used", "added", "total", "fits"),
    [(2, 4, 8, True), (2, 5, 8, False), (2, 50, None, True)],  # 85 % of 8 GiB are 6.8
)
def test_a_part_of_the_memory_is_left_free(used, added, total, fits):
    assert MemoryNeed(used * GIB, added * GIB, total and total * GIB).fits is fits


class Peers:
    def __init__(self, fits, *, has_trained=False):
        self.found = {"fits": fits, "has_trained": has_trained}

    def collect(self, value):
        return [value, self.found]


@pytest.mark.parametrize(
    ("total", "other", "divided"), [(64 * GIB, True, False), (64 * GIB, False, True), (1, True, True)]
)
def test_one_process_with_too_little_memory_is_enough(learner, monkeypatch, total, other, divided):
    monkeypatch.setattr(learner, "peers", Peers(other))
    monkeypatch.setattr(memory_need, "measure_memory", lambda device: MemoryUse("cpu", 0, total))
    assert needs_sharding(learner, 1) is divided


def test_what_was_trained_whole_is_not_divided_when_a_worker_is_replaced(load, learner, monkeypatch):
    """The most that a process has used contains what training adds already."""
    engine = load()
    monkeypatch.setattr(memory_need, "measure_memory", lambda device: MemoryUse("cpu", 6 * GIB, 6 * GIB))
    engine.learner.peers = Peers(True)
    assert engine._needs_sharding(1), "before its first job"
    engine.learner.peers = None
    train(engine, random_samples(2, 1))
    engine.learner.peers = Peers(True)
    assert not engine._needs_sharding(1)
    monkeypatch.setattr(learner, "peers", Peers(True, has_trained=True))
    assert not needs_sharding(learner, 1), "a new worker joins those that have trained"


def test_tensors_in_a_file_of_their_own_leave_no_name_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    like = {
        "a": torch.zeros(3, 2),
        "count": torch.tensor(7.0),
        "none": torch.zeros(0, 4),
        "b": torch.zeros(5).bfloat16(),
    }
    found = allocate_file(like)
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in like.items()
    }
    for name, number in (("a", 1.5), ("count", 2.5), ("b", 3.5)):
        found[name].fill_(number)
    assert [float(found[name].sum()) for name in ("a", "count", "none", "b")] == [9.0, 2.5, 0.0, 17.5]
    assert list(tmp_path.iterdir()) == []
    assert allocate_file({}) == {}


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the disk cannot be asked for room here")
def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scarce_memory.os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match=rf"cannot write {re.escape(str(tmp_path))} \(64 bytes\).*bytes are free"):
        allocate_file({"a": torch.zeros(3)})
