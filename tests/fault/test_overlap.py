"""A run that samples while it trains is killed anywhere and resumed: nothing is trained twice, and nothing too old.

Which version samples a token depends on the time that a job takes, so such a run is never bit-identical to another.
"""

import random

import pytest

from reinforge.crash import SITES
from reinforge.runs.journal.packing import unpack_episode
from tests.fault import mutations
from tests.fault.kit import KILLED, damaged
from tests.fault.sizes import scaled
from tests.fault.test_kill_anywhere import assert_counted_once, read_metrics

AHEAD = {
    "finetuning.deterministic": False,
    "finetuning.limits.max_staleness": 1,
    "finetuning.limits.max_refills": 0,  # what is sampled differs from run to run, and the number of refills with it
}
LORA = {**AHEAD, "finetuning.policy.lora": {"r": 4, "lora_alpha": 8}}
MAX_IN_FLIGHT = 16
"""`max_concurrency` of a toy: a kill costs at most these episodes."""
CHAINS = (
    ("rollout.after_journal:60", "batch.sealed", "submit.after_id"),
    ("step.after_optim:3", "ckpt.after_manifest:1", "publish.mid", "rollout.before_journal:20", "submit.after_intent"),
    ("ckpt.after_rename:2", "publish.before", "export.mid", "step.after_backward:2"),
)


def list_ages(toy):
    """Returns by how many versions the tokens of all epochs are older than the weights that train on them."""
    ages = set()
    for epoch, data in toy.rows_of("SELECT epoch, data FROM episodes WHERE phase = 'collect'"):
        ages |= {epoch - call["policy_version"] for call in unpack_episode(data)["calls"]}
    return ages


def assert_sound(toy, whole):
    """Each episode, job and step counts once, and no token is too old or of a version that came later."""
    assert_counted_once(toy, whole)
    assert list_ages(toy) <= {0, 1}
    rows = read_metrics(toy)
    assert [row["num_groups_stale"] for row in rows] == [0, 0, 0, 0]
    assert all(row["staleness_max"] <= 1 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("sites", CHAINS)
def test_a_run_that_is_killed_while_it_samples_ahead_trains_nothing_twice(make_toy, finished, sites):
    toy = make_toy(AHEAD).end_after(*sites)
    assert_sound(toy, finished(AHEAD))
    assert toy.num_run <= finished(AHEAD).num_run + len(sites) * MAX_IN_FLIGHT, "those in the journal do not run again"


@pytest.mark.fault
@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("site", SITES)
def test_a_run_killed_at_one_crash_point_trains_nothing_twice(make_toy, finished, site, share):
    toy = make_toy(LORA)
    passings = {"rollout": 127, "reward": 127, "batch": 4, "submit": 4, "step": 8, "ckpt": 5, "gc": 2, "db": 40}
    number = max(1, round(share * passings.get(site.partition(".")[0], 4)))
    assert toy.start(crash_at=f"{site}:{number}").wait() == KILLED
    assert damaged(toy.run) == []
    child = toy.resume_or_start()
    assert child.wait() == 0, child.said
    assert_sound(toy, finished(LORA))


@pytest.mark.fault
def test_kills_at_random_times_train_nothing_twice(make_toy, finished):
    rng, kills = random.Random(3), 0
    while kills < scaled(50):
        toy = make_toy(AHEAD)
        kills += toy.end_with_kills(rng)
        assert_sound(toy, finished(AHEAD))


@pytest.mark.fault
def test_episodes_that_are_counted_before_their_turn_make_a_difference(make_toy, finished):
    """Mutation check: the snapshot of an earlier epoch counts them, and the run that resumes from it once more."""
    assert any(miscounts(make_toy(AHEAD), f"publish.mid:{number}", finished(AHEAD)) for number in (3, 2, 1))


def miscounts(toy, crash_at, whole):
    """Returns True if a run that counts early episodes at once is not sound; it is if none had finished by then."""
    mutation = mutations.count_early_episodes_at_once
    assert toy.start(crash_at=crash_at, mutation=mutation).wait() == KILLED
    assert toy.resume(mutation=mutation).wait() == 0
    try:
        assert_sound(toy, whole)
    except AssertionError:
        return True
    return False
