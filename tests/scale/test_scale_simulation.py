"""The simulation behind docs/scale.md and `preflight --cluster`, on loads whose seconds can be added by hand."""

from dataclasses import replace

import pytest

from benchmarks.scale_simulation import POLICIES, simulate_collection
from reinforge.scale.planning.simulation import (
    Costs,
    DriverCosts,
    Faults,
    SamplerCosts,
    Simulation,
    Spread,
    TrainerCosts,
    Work,
)

COSTS = Costs(
    SamplerCosts(step_s=1.0, sequence_s=0.5, prompt_token_s=0.25, context_token_s=0.01),
    DriverCosts(call_s=0.02, message_s=0.04, episode_s=0.1, token_s=0.001),
    TrainerCosts(token_s=0.1, step_s=2.0, job_s=1.0),
    publish_s=3.0,
    latency_s=0.001,
    bytes_per_s=1e15,
)
WORK = Work(1, 1, 1, 100, Spread(1), prompt=8, reply=Spread(20), message=4)


def simulate(costs=COSTS, num_samplers=1, faults=None, **changes):
    return Simulation(costs, replace(WORK, **changes), num_samplers, faults=faults).run()


def test_one_episode_takes_the_sum_of_its_parts():
    step_s = 1.0 + 0.5 + 0.01 * (8 + 20 / 2)
    parts = [0.03 + 8 * 0.001, 0.001, 8 * 0.25, 20 * step_s, 0.001, 0.03 + 20 * 0.001, 0.1]
    job_s = 1.0 + 2.0 + 0.1 * (8 + 20)
    found = simulate()
    assert found.seconds == pytest.approx(sum(parts) + job_s + 3.0)
    assert (found.num_episodes, found.prompt_tokens, found.sampled_tokens) == (1, 8, 20)


def test_a_prefix_is_computed_once_where_it_is_cached():
    """Two siblings of two calls: 8 tokens of the prompt once, then 4 new ones for each; elsewhere everything again."""
    assert simulate(siblings=2, turns=Spread(2)).prompt_tokens == 8 + 2 * 4
    found = Simulation(COSTS, replace(WORK, siblings=2), 2, key=POLICIES["calls to the least busy"]).run()
    assert found.prompt_tokens == 16


def test_siblings_share_the_prompt_in_a_job_unless_the_trainer_cannot():
    alone = replace(COSTS, trainer=replace(COSTS.trainer, shares_prompts=False))
    assert simulate(alone, siblings=4).trainers > simulate(siblings=4).trainers


def test_the_driver_is_the_limit_once_the_workers_wait_for_it():
    costs = replace(COSTS, sampler=SamplerCosts(1e-4, 0.0, 0.0, slots=1000), trainer=TrainerCosts(0.0), publish_s=0.0)
    found = simulate(costs, 16, examples=2000)
    assert found.driver > 0.95, "apart from the first replies"
    assert found.rate == pytest.approx(1 / (0.02 + 0.04 + 0.028 + 0.1), rel=0.05)


def test_replies_beyond_the_slots_wait():
    one = replace(COSTS, sampler=replace(COSTS.sampler, slots=1))
    assert simulate(one, siblings=3).samplers * simulate(one, siblings=3).seconds > 60 * 1.5


def test_epochs_that_may_be_sampled_ahead_hide_the_job():
    """Alone, an epoch takes its episodes, job and publishing; ahead, the longer of the two."""
    turns = [simulate(num_epochs=6, max_staleness=number).epoch_s for number in (0, 1)]
    whole = simulate().seconds
    assert turns[0] == pytest.approx(whole)
    assert turns[1] == pytest.approx(whole - 5.8 - 3.0, rel=0.1), "of sampling alone, as the job is shorter"


def test_kept_replies_let_new_weights_in_at_once_and_aborted_ones_are_lost_tokens():
    slow = {"num_epochs": 6, "max_staleness": 1, "examples": 8, "reply": Spread(20, seen=(2.0, 400.0))}
    waits, keeps, aborts = (
        Simulation(COSTS, replace(WORK, **slow, in_flight=mode), 2).run() for mode in ("wait", "keep", "abort")
    )
    assert keeps.seconds < waits.seconds
    assert keeps.seconds < aborts.seconds
    assert (waits.lost_tokens, keeps.lost_tokens) == (0, 0)
    assert aborts.lost_tokens > 0
    assert aborts.num_episodes == waits.num_episodes


def test_pauses_between_calls_are_added():
    extra = simulate(turns=Spread(2), tool_s=Spread(50.0)).seconds - simulate(turns=Spread(2)).seconds
    assert extra == pytest.approx(50.0)


@pytest.mark.parametrize("part", ["sampler", "trainer", "driver"])
def test_faults_cost_time_and_lose_no_episode(part):
    faults = Faults(**{f"{part}_every_s": 60.0}, restart_s=5.0)
    work = {"num_epochs": 3, "examples": 4, "siblings": 2, "turns": Spread(2)}
    calm, struck = simulate(num_samplers=2, **work), simulate(num_samplers=2, faults=faults, **work)
    assert struck.num_faults > 3
    assert struck.seconds > calm.seconds
    assert struck.num_episodes == calm.num_episodes == 24
    assert (struck.lost_tokens > 0) == (part != "trainer")


def test_a_spread_has_its_mean():
    import random

    rng = random.Random(0)
    for spread in (Spread(300.0, 0.8), Spread(2.0), Spread(0.0, seen=(1.0, 3.0))):
        values = [spread.draw(rng) for _ in range(20_000)]
        assert sum(values) / len(values) == pytest.approx(spread.mean or 2.0, rel=0.03)
    assert max(Spread(300.0, 0.8, most=400).draw(rng) for _ in range(1000)) == 400


@pytest.mark.parametrize("policy", POLICIES)
def test_every_episode_ends(policy):
    assert simulate_collection(COSTS, 3, policy).num_episodes == 3 * 32 * 6
