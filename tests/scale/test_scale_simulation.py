"""The simulation behind docs/scale.md, on loads whose seconds can be added by hand."""

import pytest

from benchmarks.scale_simulation import POLICIES, SEED_SPREAD, Costs, Load, simulate

COSTS = Costs(
    step_s=1.0,
    sequence_s=0.5,
    prompt_token_s=0.25,
    call_s=0.02,
    episode_s=0.1,
    journal_s=0.0,
    sync_s=0.0,
    ray_s=0.04,
    latency_s=0.001,
    bytes_per_s=1e12,
)
SIBLINGS, CALLS = "siblings to one worker", "calls to the least busy"


def load(**changes):
    return Load(
        **{"siblings": 1, "turns": 1, "prompt": 8, "answer": 20, "message": 4, "in_flight": 1, "rounds": 1, **changes}
    )


def test_one_episode_takes_the_sum_of_its_parts():
    found = simulate(COSTS, load(), 1, SIBLINGS)
    num_tokens = 20 + hash((0, 0)) % (2 * SEED_SPREAD + 1) - SEED_SPREAD
    parts = [0.03, 0.001, 8 * 0.25, num_tokens * 1.5, 0.001, 0.03, 0.1]
    assert found.seconds == pytest.approx(sum(parts))
    assert (found.num_episodes, found.prompt_tokens) == (1, 8)


def test_a_prefix_is_computed_once_where_it_is_cached():
    """Two siblings of two calls: 8 tokens of the prompt once, then 4 new ones for each; elsewhere everything again."""
    shared = simulate(COSTS, load(siblings=2, turns=2, in_flight=2), 1, SIBLINGS)
    assert shared.prompt_tokens == 8 + 2 * 4 + sum(spread(e, 0) for e in (0, 1))
    assert simulate(COSTS, load(siblings=2, turns=1, in_flight=1), 2, CALLS).prompt_tokens == 16


def spread(episode, turn):
    """Returns by how much the next prompt is longer than the reply before it, whose length varies."""
    return 20 - (20 + hash((episode, turn)) % (2 * SEED_SPREAD + 1) - SEED_SPREAD)


def test_the_driver_is_the_limit_once_the_workers_wait_for_it():
    costs = Costs(**{**{name: getattr(COSTS, name) for name in COSTS.__slots__}, "step_s": 1e-4, "sequence_s": 0.0})
    found = simulate(costs, load(in_flight=8, rounds=20), 16, SIBLINGS)
    assert found.driver > 0.95, "apart from the first replies"
    assert found.rate == pytest.approx(1 / (0.02 + 0.04 + 0.1), rel=0.05)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_episode_ends(policy):
    assert simulate(COSTS, load(siblings=4, turns=3, in_flight=8, rounds=2), 3, policy).num_episodes == 48
