"""How a job marks the samples of older versions."""

import numpy as np
import pytest

from reinforge.adapters.training import AdapterBatch, _choose_probes, mark_stale
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.types.sample import TrainingSample


def make_sample(*versions):
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


class ScoringEngine:
    """Scores every token with log p = -1, where the samples have 0."""

    def logprobs(self, samples, adapter):
        return [np.full(len(sample), -1.0, np.float32) for sample in samples]


@pytest.mark.parametrize(
    ("version", "has_old", "before"),
    [
        (3, False, 0.0),  # as sampled
        (2, False, -1.0),  # the weights at the start of the job are others than those that sampled it
        (2, True, 0.5),  # the engine has scored it already
    ],
)
def test_the_direction_of_a_job_is_measured_from_its_own_start(version, has_old, before):
    sample = make_sample(version)
    mark_stale([sample], 3)
    sample.old_logprobs = np.full(2, 0.5, np.float32) if has_old else None
    batch = AdapterBatch("", [], [sample], 0, SFT(SFTConfig()))
    [(_, found)] = _choose_probes(ScoringEngine(), batch, 0, sampled_by_current=True)
    assert found[1] == before
