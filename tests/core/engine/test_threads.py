"""The number of threads that sampling uses: one less while agents keep a core busy."""

import pytest
import torch

from reinforge.engine.sampling.threads import BUSY_SHARE, ThreadLoad, leave_core_to_agents


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
