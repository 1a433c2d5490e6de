"""Which samples of a job are looked at again after it."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from reinforge.adapters.training import watched_samples
from reinforge.types.sample import TrainingSample


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
