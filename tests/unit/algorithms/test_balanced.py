"""Shares of agents in data that cannot be weighed."""

from collections import Counter

from reinforge.algorithms.samples import balanced
from reinforge.types.trajectory import EpisodeItem, Trajectory


def said(agent, count, weight=1.0, text="{}"):
    episodes = [[EpisodeItem(role="assistant", content=text.format(number))] for number in range(count)]
    return [[Trajectory(episode=each, reward=1.0, agent=agent, agent_weight=weight)] for each in episodes]


def counts(groups):
    return dict(Counter(siblings[0].agent for siblings in groups))


def test_who_has_more_gives_up_the_rest():
    assert counts(balanced(said("prover", 9) + said("verifier", 3), 0)) == {"prover": 3, "verifier": 3}
    assert counts(balanced(said("prover", 9, 2.0) + said("verifier", 3), 0)) == {"prover": 6, "verifier": 3}
    assert counts(balanced(said("prover", 4, 2.0) + said("verifier", 3), 0)) == {"prover": 4, "verifier": 2}
    assert counts(balanced(said("prover", 9), 0)) == {"prover": 9}
    assert counts(balanced(said("prover", 9) + said("verifier", 3, 0.0), 0)) == {"prover": 9}, (
        "a weight of 0 is nothing"
    )
    assert balanced([], 0) == []


def test_what_is_equal_counts_once():
    assert counts(balanced(said("prover", 9, text="same") + said("verifier", 3), 0)) == {"prover": 1, "verifier": 1}


def test_which_ones_stay_depends_on_the_seed_alone_and_they_keep_their_order():
    groups = said("prover", 40) + said("verifier", 10)
    kept = [siblings[0].turns[0].content for siblings in balanced(groups, 1) if siblings[0].agent == "prover"]
    again = [siblings[0].turns[0].content for siblings in balanced(groups, 1) if siblings[0].agent == "prover"]
    other = [siblings[0].turns[0].content for siblings in balanced(groups, 2) if siblings[0].agent == "prover"]
    assert kept == again == sorted(kept, key=int)
    assert kept != other
