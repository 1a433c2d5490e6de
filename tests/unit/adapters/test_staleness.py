"""How a job marks the samples of older versions."""

import numpy as np
import pytest

from reinforge.adapters.training import mark_stale
from reinforge.types.sample import TrainingSample


def make_sample(*versions):
    """A sample of one context token and one trained token of each version."""
    count = len(versions) + 1
    zeros = np.zeros(count, np.float32)
    return TrainingSample(
        token_ids=np.arange(count),
        loss_mask=np.arange(count) > 0,
        sampling_logprobs=zeros,
        temperatures=zeros + 1,
        policy_versions=np.array([-1, *versions]),
        turn_ids=np.zeros(count, np.int64),
    )


def test_a_sample_with_a_token_of_an_older_version_is_stale():
    fresh, old, mixed, given = samples = [make_sample(3, 3), make_sample(1), make_sample(3, 2), make_sample(-1)]
    assert mark_stale(samples, 3) == {"staleness": pytest.approx(3 / 5), "staleness_max": 2.0}
    assert [each.is_stale for each in (fresh, old, mixed, given)] == [False, True, True, False]


def test_without_sampled_tokens_nothing_is_known():
    assert mark_stale([make_sample(-1)], 3) == {}
    assert mark_stale([], 3) == {}
