"""The number of threads that sampling uses: one less while agents keep a core busy."""

from __future__ import annotations

import pytest
import torch

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.sampling.fast_llama import FastLlama
from reinforge.engine.sampling.threads import BUSY_SHARE, ThreadLoad, leave_core_to_agents
from tests.samples import ask, request, sample_replies


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_share_is_measured_between_two_calls():
    seconds = {"wall": 0.0, "computed": 0.0}
    load = ThreadLoad(lambda: seconds["wall"], lambda: seconds["computed"])
    assert load.share == 0.0
    seconds.update(wall=0.1, computed=0.05)
    assert load.measure() == pytest.approx(0.5)
    seconds.update(wall=0.11, computed=0.05)
    assert load.measure() == pytest.approx(0.5)  # too soon to tell
    seconds.update(wall=1.1, computed=0.15)
    assert load.measure() == pytest.approx(0.1)


def test_sampling_leaves_a_core_to_a_busy_thread(two_threads):
    with leave_core_to_agents(BUSY_SHARE - 0.01):
        assert torch.get_num_threads() == 2
    with leave_core_to_agents(BUSY_SHARE):
        assert torch.get_num_threads() == 1
        with leave_core_to_agents(1.0):
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.fixture
def seen(tiny_model_dir, monkeypatch):
    """An engine on two threads, and the number of threads of each of its decode steps."""
    threads: list[int] = []
    right = FastLlama.decode_step

    def step(self, *args):
        threads.append(torch.get_num_threads())
        return right(self, *args)

    monkeypatch.setattr(FastLlama, "decode_step", step)
    with Engine.load(PolicyConfig(model=str(tiny_model_dir), max_num_seqs=8), seed=0, device="cpu") as engine:
        before = engine.policy.sampler.call(torch.get_num_threads)
        engine.policy.sampler.call(lambda: torch.set_num_threads(2))
        threads.clear()
        yield engine, threads
        engine.policy.sampler.call(lambda: torch.set_num_threads(before))


@pytest.mark.parametrize(("share", "expected"), [(0.1, 2), (0.9, 1)])
def test_sampling_leaves_a_core_to_agents_that_compute_all_the_time(seen, monkeypatch, share, expected):
    """Whatever else the engine computes uses all threads again."""
    engine, threads = seen
    monkeypatch.setattr(ThreadLoad, "measure", lambda self: share)
    ask(engine.policy, [request("who is busy", max_tokens=4, seed=1)])
    assert set(threads) == {expected}
    assert engine.policy.sampler.call(torch.get_num_threads) == 2


def test_callers_without_a_loop_add_no_load(seen):
    engine, threads = seen
    sample_replies(engine, [(5, 6, 7)], 3)
    assert set(threads) == {2}
