"""How a job splits groups by adapter, sums up its results and chooses probe samples."""

import random
from collections import Counter

import numpy as np
import pytest

from reinforge.adapters.training import (
    AdapterBatch,
    AdapterResult,
    _choose_probes,
    choose_probe_samples,
    mark_stale,
    split_by_adapter,
    sum_results,
)
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.errors import JobFailed, TrajectoryError
from reinforge.types.sample import TrainingSample, UpdateReport
from reinforge.types.trajectory import Trajectory, TrajectoryCollection


def make_samples(groups, siblings):
    row = np.zeros(2)
    return [
        TrainingSample(row, row.astype(bool), row, row, row, row, group_id=f"g{group}")
        for group in range(groups)
        for _ in range(siblings)
    ]


@pytest.mark.parametrize(
    ("groups", "siblings", "probed"),
    [(8, 8, [8]), (1, 20, [8]), (1, 5, [5]), (128, 8, [8] * 16), (1024, 4, [4] * 64)],
    ids=["whole groups", "part of one group", "all of a small job", "an eighth", "at most 256"],
)
def test_probe_samples_are_an_eighth_of_a_job_in_whole_groups(groups, siblings, probed):
    chosen = choose_probe_samples(make_samples(groups, siblings), random.Random(0))
    assert sorted(Counter(sample.group_id for sample in chosen).values()) == probed
    assert len({id(sample) for sample in chosen}) == len(chosen)


def test_the_seed_decides_which_samples_are_probed():
    samples = make_samples(8, 8)
    first, again, other = ([id(s) for s in choose_probe_samples(samples, random.Random(seed))] for seed in (1, 1, 2))
    assert first == again != other


def group(group_id, model_group):
    return [Trajectory(episode=[], reward=0.0, group_id=group_id, model_group=model_group)]


def split_ids(groups, names, **settings):
    collection = TrajectoryCollection(trajectories=groups, run_id="r", **settings)
    return {name: [group.group_id for group in own] for name, own in split_by_adapter(collection, names).items()}


def test_groups_go_to_the_adapter_that_they_name():
    groups = [group("0", "b"), group("1", None), group("2", "a"), group("3", "b")]
    assert split_ids(groups, ["a", "b", "c"]) == {"a": ["1", "2"], "b": ["0", "3"]}
    assert split_ids(groups, ["a", "b"], model_group="b") == {"a": ["2"], "b": ["0", "1", "3"]}
    assert split_ids(groups, ["default"]) == {"default": ["0", "1", "2", "3"]}, "one policy learns from all"
    with pytest.raises(JobFailed, match="group 0 trains the adapter b, but the adapters are a, c"):
        split_ids(groups, ["a", "c"])


def test_a_group_of_two_adapters_is_refused():
    with pytest.raises(TrajectoryError, match=r"train the models \['a', 'b'\]"):
        split_ids([group("0", "a") + group("0", "b")], ["a", "b"])


def test_a_jobs_totals_are_sums_and_means_over_its_steps():
    first = AdapterResult(
        UpdateReport(3, 1, 8, 40, {"loss": 1.0, "kl": 0.5}), ["e/1"], logprob_gain=4.0, num_probe_tokens=10
    )
    second = AdapterResult(
        UpdateReport(1, 0, 2, 10, {"loss": 5.0}), ["e/1", "e/2"], logprob_gain=1.0, num_probe_tokens=10
    )
    assert sum_results([first]) is first
    assert sum_results([first, second]).as_dict() == {
        "num_updates": 4,
        "num_skipped_steps": 1,
        "num_samples": 10,
        "num_tokens": 50,
        "direction": 0.25,
        "skipped_episodes": ["e/1", "e/2"],
        "loss": 2.0,
        "kl": 0.5,
    }


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
