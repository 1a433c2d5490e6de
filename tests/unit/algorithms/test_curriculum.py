"""The curriculum by hand: when it widens, what it keeps, what goes first."""

import random

import pytest

from reinforge.algorithms.curriculum import (
    Sparing,
    outside_curriculum,
    percentile_at,
    subsample,
    with_signal,
    within_curriculum,
)
from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.expert_iteration import ExpertIteration
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.config.schema import CurriculumLearningConfig
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryGroup
from tests.unit.algorithms.test_algorithms import group, turn


def test_the_first_epoch_uses_the_initial_share():
    """The reference expands an interval of 1 in the first epoch already, and one of 5 at epoch 4."""
    every = CurriculumLearningConfig(initial_percentile=0.2, increment_percentile=0.2, expansion_interval=1)
    assert [percentile_at(every, epoch) for epoch in range(6)] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    fifth = CurriculumLearningConfig(initial_percentile=0.3, increment_percentile=0.2, expansion_interval=5)
    assert [percentile_at(fifth, epoch) for epoch in (0, 4, 5, 9, 10)] == [0.3, 0.3, 0.5, 0.5, 0.7]


def test_groups_without_signal_go():
    untrainable = TrajectoryGroup(
        group_id="u",
        trajectories=[Trajectory(episode=[EpisodeItem(role="assistant", content="x")], reward=r) for r in (0, 1)],
    )
    groups = [group(1, 1, name="equal"), group(0.5, 0.45, name="close"), group(1, 0, name="good"), untrainable]
    selection = with_signal(groups, 0.1, compares=True)
    names = {
        field: [g.group_id for g in getattr(selection, field)]
        for field in ("kept", "zero_variance", "low_spread", "untrainable")
    }
    assert names == {"kept": ["good"], "zero_variance": ["equal"], "low_spread": ["close"], "untrainable": ["u"]}
    assert selection.num_dropped == 3


def test_an_algorithm_that_compares_nothing_keeps_equal_groups():
    assert len(with_signal([group(1, 1), group(0)], 0.1, compares=False).kept) == 2


def test_a_spread_of_exactly_the_bound_is_signal():
    assert len(with_signal([group(0.3, 0.2)], 0.1, compares=True).kept) == 1


def test_groups_of_which_the_algorithm_takes_nothing_go_too():
    groups = [group(1, 0, name="solved"), group(0.5, 0, name="not")]
    selection = with_signal(groups, 0.1, compares=False, teaches=ExpertIteration().teaches)
    assert ([g.group_id for g in selection.kept], [g.group_id for g in selection.not_taken]) == (["solved"], ["not"])
    assert selection.num_dropped == 1
    assert SFT(SFTConfig(min_reward=0.5)).teaches(groups[1])
    assert not SFT(SFTConfig(min_reward=0.6)).teaches(groups[1])
    assert [DPO(DPOConfig(min_margin=0.6)).teaches(group) for group in groups] == [True, False]


@pytest.mark.parametrize(("hardest_first", "expected"), [(False, ["easy", "middle"]), (True, ["hard", "middle"])])
def test_the_share_is_taken_by_difficulty(hardest_first, expected):
    groups = [group(0.5, 0.6, name="middle"), group(1, 0.9, name="easy"), group(0, 0.1, name="hard")]
    included, outside = within_curriculum(groups, 0.5, hardest_first=hardest_first)
    assert [g.group_id for g in included] == expected
    assert len(outside) == 1


def test_a_small_share_keeps_at_least_one_group():
    assert len(within_curriculum([group(1, 0), group(0, 1)], 0.01, hardest_first=False)[0]) == 1
    assert within_curriculum([], 0.5, hardest_first=False) == ([], [])


def test_subsampling_is_within_the_group():
    whole = TrajectoryGroup(group_id="g", trajectories=[Trajectory(episode=[turn(5)], reward=r) for r in range(8)])
    half = subsample(whole, 0.5, random.Random(0))
    assert len(half.trajectories) == 4
    assert half.rewards == sorted(half.rewards), "the order stays"
    assert len(subsample(whole, 0.01, random.Random(0)).trajectories) == 2, "fewer than two cannot be compared"


def test_known_examples_outside_the_share_are_named_and_unknown_ones_never():
    known = {"a": 0.9, "b": 0.2, "c": 0.5, "elsewhere": 1.0}
    assert outside_curriculum(["a", "b", "c", "d"], known, 0.5, hardest_first=False) == {"b"}
    assert outside_curriculum(["a", "b", "c", "d"], known, 0.5, hardest_first=True) == {"a"}
    assert outside_curriculum(["a", "b", "c", "d"], known, 0.1, hardest_first=False) == {"b", "c"}
    assert outside_curriculum(["a", "b", "c", "d"], known, 1.0, hardest_first=False) == set()
    assert outside_curriculum(["d"], known, 0.1, hardest_first=False) == set()


def test_the_share_is_of_the_spared_groups_too():
    """4 of 10 were collected since the share was 0.4: all 4 are inside, not 0.4 of them."""
    groups = [group(1, n / 10, name=str(n)) for n in range(4)]
    assert len(within_curriculum(groups, 0.4, hardest_first=False)[0]) == 2
    assert len(within_curriculum(groups, 0.4, hardest_first=False, num_spared=6)[0]) == 4


def test_an_example_whose_group_lost_its_signal_is_collected_again():
    config = CurriculumLearningConfig(enabled=True, initial_percentile=0.5, collect_only_included=True)
    sparing = Sparing(config)
    groups = [group(1, 0.8, name="easy"), group(0.3, 0, name="hard")]
    sparing.learn(groups, groups)
    assert sparing.begin(["easy", "hard"], 0) == ["easy"]
    sparing.learn([groups[1]], [])
    assert sparing.begin(["easy", "hard"], 0) == ["easy", "hard"]
    assert Sparing(config.model_copy(update={"collect_only_included": False})).outside(["easy"], 0) == set()
    assert Sparing().begin(["easy"], 0) == ["easy"]
