"""What a job trains which adapter on, what it says of that, and which samples are looked at again after it."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from reinforge.adapters.training import Trained, parts_of, totals_of, watched_samples
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
    ("groups", "siblings", "watched"),
    [(8, 8, [8]), (1, 20, [8]), (1, 5, [5]), (128, 8, [8] * 16), (1024, 4, [4] * 64)],
    ids=["whole groups", "one group is cut", "all of a small job", "an eighth", "at most 256"],
)
def test_an_eighth_of_a_job_is_watched_in_whole_groups(groups, siblings, watched):
    chosen = watched_samples(make_samples(groups, siblings), random.Random(0))
    assert sorted(Counter(sample.group_id for sample in chosen).values()) == watched
    assert len({id(sample) for sample in chosen}) == len(chosen)


def test_the_seed_decides_which():
    samples = make_samples(8, 8)
    first, again, other = ([id(s) for s in watched_samples(samples, random.Random(seed))] for seed in (1, 1, 2))
    assert first == again != other


def group(group_id, model_group):
    return [Trajectory(episode=[], reward=0.0, group_id=group_id, model_group=model_group)]


def parts(groups, names, **settings):
    collection = TrajectoryCollection(trajectories=groups, run_id="r", **settings)
    return {name: [group.group_id for group in found] for name, found in parts_of(collection, names).items()}


def test_groups_go_to_the_adapter_that_they_name():
    groups = [group("0", "b"), group("1", None), group("2", "a"), group("3", "b")]
    assert parts(groups, ["a", "b", "c"]) == {"a": ["1", "2"], "b": ["0", "3"]}
    assert parts(groups, ["a", "b"], model_group="b") == {"a": ["2"], "b": ["0", "1", "3"]}
    assert parts(groups, ["default"]) == {"default": ["0", "1", "2", "3"]}, "one policy learns from all"
    with pytest.raises(JobFailed, match="the group 0 is to train b, and there are only a, c"):
        parts(groups, ["a", "c"])


def test_siblings_of_two_models_are_no_group():
    with pytest.raises(TrajectoryError, match=r"its members train \['a', 'b'\]"):
        parts([group("0", "a") + group("0", "b")], ["a", "b"])


def test_a_jobs_totals_are_sums_and_means_over_its_steps():
    first = Trained(UpdateReport(3, 1, 8, 40, {"loss": 1.0, "kl": 0.5}), ["e/1"], moved=4.0, num_watched=10)
    second = Trained(UpdateReport(1, 0, 2, 10, {"loss": 5.0}), ["e/1", "e/2"], moved=1.0, num_watched=10)
    assert totals_of([first]) is first
    assert totals_of([first, second]).as_dict() == {
        "num_updates": 4,
        "num_skipped_steps": 1,
        "num_samples": 10,
        "num_tokens": 50,
        "direction": 0.25,
        "skipped_episodes": ["e/1", "e/2"],
        "loss": 2.0,
        "kl": 0.5,
    }
