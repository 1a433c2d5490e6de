"""Each agent's share of the groups, for backends without sample weights."""

from collections import Counter

from reinforge.algorithms.samples import balance_agents
from reinforge.types.trajectory import EpisodeItem, Trajectory


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
