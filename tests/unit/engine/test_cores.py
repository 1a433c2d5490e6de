"""How many threads sampling takes: one less while agents keep a core busy."""

from __future__ import annotations

import pytest
import torch

from reinforge.config.schema import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.sampling.fast_llama import DirectLlama
from reinforge.engine.sampling.threads import BUSY, Load, sampling_threads
from tests.samples import ask, draw, request


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_share_is_that_of_the_time_between_two_looks():
    seconds = {"wall": 0.0, "computed": 0.0}
    load = Load(lambda: seconds["wall"], lambda: seconds["computed"])
    assert load.share == 0.0
    seconds.update(wall=0.1, computed=0.05)
    assert load.look() == pytest.approx(0.5)
    seconds.update(wall=0.11, computed=0.05)
    assert load.look() == pytest.approx(0.5)  # too soon to tell
    seconds.update(wall=1.1, computed=0.15)
    assert load.look() == pytest.approx(0.1)


def test_a_busy_thread_is_left_a_core(two_threads):
    with sampling_threads(BUSY - 0.01):
        assert torch.get_num_threads() == 2
    with sampling_threads(BUSY):
        assert torch.get_num_threads() == 1
        with sampling_threads(1.0):
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.fixture
def seen(tiny_model_dir, monkeypatch):
    """An engine on two threads, and the number of threads of each of its decode steps."""
    threads: list[int] = []
    right = DirectLlama.step

    def step(self, *args):
        threads.append(torch.get_num_threads())
        return right(self, *args)

    monkeypatch.setattr(DirectLlama, "step", step)
    with Engine.load(PolicyConfig(model=str(tiny_model_dir), max_batch=8), seed=0, device="cpu") as engine:
        before = engine.policy.sampler.call(torch.get_num_threads)
        engine.policy.sampler.call(lambda: torch.set_num_threads(2))
        threads.clear()
        yield engine, threads
        engine.policy.sampler.call(lambda: torch.set_num_threads(before))


@pytest.mark.parametrize(("share", "expected"), [(0.1, 2), (0.9, 1)])
def test_agents_that_compute_all_the_time_are_left_a_core(seen, monkeypatch, share, expected):
    """What else the engine computes has all of them again."""
    engine, threads = seen
    monkeypatch.setattr(Load, "look", lambda self: share)
    ask(engine.policy, [request("who is busy", max_tokens=4, seed=1)])
    assert set(threads) == {expected}
    assert engine.policy.sampler.call(torch.get_num_threads) == 2


def test_callers_without_a_loop_are_no_load(seen):
    engine, threads = seen
    draw(engine, [(5, 6, 7)], 3)
    assert set(threads) == {2}
