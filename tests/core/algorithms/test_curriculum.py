"""The curriculum by hand: when its share grows, and which groups it keeps."""

import random
from collections import Counter

import pytest

from reinforge.algorithms.curriculum import (
    ExampleFilter,
    Levels,
    find_excluded,
    split_by_share,
    split_by_signal,
    subsample,
)
from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.expert_iteration import ExpertIteration
from reinforge.algorithms.samples import balance_agents
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.config.schema import CurriculumLearningConfig, LevelsConfig
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryGroup
from tests.core.algorithms.test_algorithms import group, turn


def test_groups_without_signal_are_dropped():
    untrainable = TrajectoryGroup(
        group_id="u",
        trajectories=[Trajectory(episode=[EpisodeItem(role="assistant", content="x")], reward=r) for r in (0, 1)],
    )
    groups = [group(1, 1, name="equal"), group(0.5, 0.45, name="close"), group(1, 0, name="good"), untrainable]
    selection = split_by_signal(groups, 0.1, needs_groups=True)
    names = {
        field: [g.group_id for g in getattr(selection, field)]
        for field in ("kept", "zero_variance", "low_spread", "untrainable")
    }
    assert names == {"kept": ["good"], "zero_variance": ["equal"], "low_spread": ["close"], "untrainable": ["u"]}


def test_an_algorithm_that_compares_nothing_keeps_equal_groups():
    assert len(split_by_signal([group(1, 1), group(0)], 0.1, needs_groups=False).kept) == 2


def test_a_spread_of_exactly_the_bound_is_signal():
    assert len(split_by_signal([group(0.3, 0.2)], 0.1, needs_groups=True).kept) == 1


def test_groups_that_the_algorithm_cannot_use_are_dropped():
    groups = [group(1, 0, name="solved"), group(0.5, 0, name="not")]
    selection = split_by_signal(groups, 0.1, needs_groups=False, has_signal=ExpertIteration().has_signal)
    assert ([g.group_id for g in selection.kept], [g.group_id for g in selection.unused]) == (["solved"], ["not"])
    assert SFT(SFTConfig(min_reward=0.5)).has_signal(groups[1])
    assert not SFT(SFTConfig(min_reward=0.6)).has_signal(groups[1])
    assert [DPO(DPOConfig(min_margin=0.6)).has_signal(group) for group in groups] == [True, False]


def test_a_level_is_added_when_the_mean_of_the_window_reaches_the_threshold():
    levels = Levels(LevelsConfig(threshold=0.7, window=2), {"a": 0, "b": 1, "d": 4})
    assert [name for name in "abcd" if levels.includes(name)] == ["a", "c"]  # c has no level
    rises = [levels.record_rewards([("a", reward), ("c", 0.0)]) for reward in (0.9, 0.4, 0.8, 0.6)]
    assert rises == [False, False, False, True]  # of 0.9 alone; 0.65, 0.6 and 0.7
    assert levels.as_dict() == {"level": 1, "level_rewards": []}
    assert [name for name in "abcd" if levels.includes(name)] == ["a", "b", "c"]
    assert not levels.record_rewards([("a", 1.0)])  # nothing of level 1
    assert not levels.record_rewards([("a", 0.0), ("b", 1.0)])
    again = Levels(levels.config, levels.by_example)
    again.restore(levels.as_dict())
    assert again == levels
    assert again.record_rewards([("a", 0.0), ("b", 0.5)])
    assert again.highest == 4
    assert not again.record_rewards([("d", 1.0)])  # there is no higher one


@pytest.mark.parametrize(("hardest_first", "expected"), [(False, ["easy", "middle"]), (True, ["hard", "middle"])])
def test_the_share_is_taken_by_difficulty(hardest_first, expected):
    groups = [group(0.5, 0.6, name="middle"), group(1, 0.9, name="easy"), group(0, 0.1, name="hard")]
    included, outside = split_by_share(groups, 0.5, hardest_first=hardest_first)
    assert [g.group_id for g in included] == expected
    assert len(outside) == 1


def test_a_small_share_keeps_at_least_one_group():
    assert len(split_by_share([group(1, 0), group(0, 1)], 0.01, hardest_first=False)[0]) == 1
    assert split_by_share([], 0.5, hardest_first=False) == ([], [])


def test_subsampling_is_within_the_group():
    whole = TrajectoryGroup(group_id="g", trajectories=[Trajectory(episode=[turn(5)], reward=r) for r in range(8)])
    half = subsample(whole, 0.5, random.Random(0))
    assert len(half.trajectories) == 4
    assert half.rewards == sorted(half.rewards), "the order stays"
    assert len(subsample(whole, 0.01, random.Random(0)).trajectories) == 2, "fewer than two cannot be compared"


@pytest.mark.parametrize(
    ("rewards", "share", "kept"),
    [
        ([0.0, 0.5, 0.4, 1.0], 0.5, [0.0, 1.0]),
        ([1.0, 0.0, 0.9, 0.1], 0.75, [1.0, 0.0, 0.9]),
        ([0.0, 0.0, 0.0, 0.0, 1.0, 0.0], 0.5, [0.0, 1.0, 0.0]),
        ([0.2, 1.0, 1.0, 1.0], 0.5, [0.2, 1.0]),
        ([0.3, 0.7], 0.1, [0.3, 0.7]),
    ],
)
def test_those_whose_rewards_vary_most_are_kept_in_their_order(rewards, share, kept):
    """Of 1, 0, 0.9 and 0.1, both 0, 0.9, 1 and 0, 0.1, 1 have the variance 0.202; more of the highest are taken."""
    trajectories = [Trajectory(episode=[turn(5)], reward=reward) for reward in rewards]
    assert subsample(TrajectoryGroup(group_id="g", trajectories=trajectories), share).rewards == kept


def test_only_examples_with_a_known_reward_are_excluded():
    known = {"a": 0.9, "b": 0.2, "c": 0.5, "elsewhere": 1.0}
    assert find_excluded(["a", "b", "c", "d"], known, 0.5, hardest_first=False) == {"b"}
    assert find_excluded(["a", "b", "c", "d"], known, 0.5, hardest_first=True) == {"a"}
    assert find_excluded(["a", "b", "c", "d"], known, 0.1, hardest_first=False) == {"b", "c"}
    assert find_excluded(["a", "b", "c", "d"], known, 1.0, hardest_first=False) == set()
    assert find_excluded(["d"], known, 0.1, hardest_first=False) == set()


def test_the_share_counts_skipped_groups_too():
    """4 of 10 were collected since the share was 0.4: all 4 are inside, not 0.4 of them."""
    groups = [group(1, n / 10, name=str(n)) for n in range(4)]
    assert len(split_by_share(groups, 0.4, hardest_first=False)[0]) == 2
    assert len(split_by_share(groups, 0.4, hardest_first=False, num_skipped=6)[0]) == 4


def test_an_example_whose_group_lost_its_signal_is_collected_again():
    config = CurriculumLearningConfig(enabled=True, initial_percentile=0.5, collect_only_included=True)
    example_filter = ExampleFilter(config)
    groups = [group(1, 0.8, name="easy"), group(0.3, 0, name="hard")]
    example_filter.record_rewards(groups, groups)
    assert example_filter.find_skipped(["easy", "hard"], 0) == {"hard"}
    example_filter.record_rewards([groups[1]], [])
    assert example_filter.find_skipped(["easy", "hard"], 0) == set()
    assert ExampleFilter(config.model_copy(update={"collect_only_included": False})).find_skipped(["easy"], 0) == set()
    assert ExampleFilter().find_skipped(["easy"], 0) == set()


def make_groups(agent, count, weight=1.0, text="{}"):
    episodes = [[EpisodeItem(role="assistant", content=text.format(number))] for number in range(count)]
    return [[Trajectory(episode=each, reward=1.0, agent=agent, agent_weight=weight)] for each in episodes]


def counts(groups):
    return dict(Counter(siblings[0].agent for siblings in groups))


def test_agents_with_more_groups_are_subsampled():
    assert counts(balance_agents(make_groups("prover", 9) + make_groups("verifier", 3), 0)) == {
        "prover": 3,
        "verifier": 3,
    }
    assert counts(balance_agents(make_groups("prover", 9, 2.0) + make_groups("verifier", 3), 0)) == {
        "prover": 6,
        "verifier": 3,
    }
    assert counts(balance_agents(make_groups("prover", 4, 2.0) + make_groups("verifier", 3), 0)) == {
        "prover": 4,
        "verifier": 2,
    }
    assert counts(balance_agents(make_groups("prover", 9), 0)) == {"prover": 9}
    assert counts(balance_agents(make_groups("prover", 9) + make_groups("verifier", 3, 0.0), 0)) == {"prover": 9}, (
        "a weight of 0 is nothing"
    )
    assert balance_agents([], 0) == []


def test_duplicate_groups_count_once():
    assert counts(balance_agents(make_groups("prover", 9, text="same") + make_groups("verifier", 3), 0)) == {
        "prover": 1,
        "verifier": 1,
    }


def test_the_subset_depends_on_the_seed_and_keeps_its_order():
    groups = make_groups("prover", 40) + make_groups("verifier", 10)
    kept = [siblings[0].turns[0].content for siblings in balance_agents(groups, 1) if siblings[0].agent == "prover"]
    again = [siblings[0].turns[0].content for siblings in balance_agents(groups, 1) if siblings[0].agent == "prover"]
    other = [siblings[0].turns[0].content for siblings in balance_agents(groups, 2) if siblings[0].agent == "prover"]
    assert kept == again == sorted(kept, key=int)
    assert kept != other
