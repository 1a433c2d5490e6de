"""A run that is killed at any time and resumed reaches the same end, bit for bit.

Compared: weights, optimizer, random state, metrics file, validations, and the scores, counts and verdict of
`summary.json`. Without `deterministic` each episode and each optimizer step counts exactly once.
"""

import collections
import json
import random
import re

import pytest

from reinforge.crash import SITES
from tests.fault import mutations
from tests.fault.kit import KILLED, Toy, damaged, differences, killed_at
from tests.fault.sizes import scaled
from tests.models import make_tiny_model

CHECKPOINT = ("ckpt.after_tensor:3", "ckpt.after_manifest", "ckpt.after_rename")
CHAINS = (
    CHECKPOINT,
    ("rollout.after_journal:30", "batch.sealed", "submit.after_intent"),
    ("reward.after:40", "submit.after_send", "submit.after_id"),
    ("step.after_optim:3", "step.after_optim", "step.after_backward"),
    ("publish.mid:2", "publish.before", "export.mid", "gc.mid_delete", "manifest.before:2"),
    ("db.before_commit:12", "db.after_commit:12", "rollout.before_journal:9"),
)
PASSINGS = {
    **dict.fromkeys(("rollout.before_journal", "rollout.after_journal", "reward.after"), 127),
    **dict.fromkeys(("batch.sealed", "submit.after_intent", "submit.after_send", "submit.after_id"), 4),
    **dict.fromkeys(("step.after_backward", "step.after_optim"), 8),
    **{"ckpt.after_tensor": 6, "ckpt.after_manifest": 6, "ckpt.after_rename": 5, "gc.mid_delete": 2},
    **{
        "manifest.before": 6,
        "publish.before": 4,
        "publish.mid": 4,
        "export.mid": 4,
        "db.before_commit": 40,
        "db.after_commit": 40,
    },
}
"""How often a whole run passes each site; the journal's groups depend on the machine, and are a few more."""
SPARSE = {"trainers.trainer.save_every": 3, "finetuning.run_configuration.validation_interval": 9}
"""Settings by which the base, version 3 and the last have a checkpoint."""


def test_every_crash_point_has_its_kill():
    assert {site.partition(":")[0] for chain in CHAINS for site in chain} == set(SITES)


@pytest.mark.slow
def test_a_run_killed_while_it_writes_a_checkpoint_ends_as_if_undisturbed(toy, whole):
    """No episode in the journal runs again; nor do the steps of the renamed checkpoint, which the journal lacks."""
    assert differences(toy.end_after(*CHECKPOINT).run, whole.run) == []
    assert toy.num_run == whole.num_run
    assert resumed_after(toy) == [None, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("sites", CHAINS[1:], ids="->".join)
def test_a_run_killed_at_crash_points_ends_as_if_undisturbed(toy, whole, sites):
    """Each kill but the first hits the process that resumed after the last kill, once at the same crash point."""
    assert differences(toy.end_after(*sites).run, whole.run) == []


@pytest.mark.fault
@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("site", SITES)
def test_a_run_killed_at_one_crash_point_ends_as_if_undisturbed(toy, whole, site, share):
    number = max(1, round(share * PASSINGS[site]))
    killed_at(toy, f"{site}:{number}")
    assert differences(toy.run, whole.run) == []


@pytest.mark.fault
@pytest.mark.parametrize("num_kills", [4, scaled(200)])
def test_kills_at_random_times(make_toy, whole, num_kills):
    rng, kills = random.Random(num_kills), 0
    while kills < num_kills:
        toy = make_toy()
        kills += toy.end_with_kills(rng)
        assert differences(toy.run, whole.run) == []


@pytest.mark.slow
def test_a_kill_before_the_run_has_started(toy, whole):
    """Nothing exists yet: the file must be given again, and the message says so if it is not."""
    assert toy.start(crash_at="db.after_commit").wait() == KILLED
    refused = toy.resume()
    assert (refused.wait(), "reinforge finetune FILE --resume" in refused.said) == (2, True)
    assert toy.resume_or_start().wait() == 0
    assert differences(toy.run, whole.run) == []


@pytest.mark.slow
def test_kills_in_the_final_stages(toy, whole):
    """In the comparison on `confirm`, while model/ is written, and before the summary counts as written."""
    assert toy.start(crash_at="rollout.after_journal:125").wait() == KILLED
    assert toy.resume(crash_at="ckpt.after_manifest").wait() == KILLED
    assert not (toy.run / "model").exists()
    assert toy.resume().wait() == 0
    assert differences(toy.run, whole.run) == []
    assert (toy.run / "model" / "model.safetensors").exists()


@pytest.mark.fault
@pytest.mark.parametrize("site", ["batch.sealed:3", "publish.mid:4"])
def test_epochs_without_a_checkpoint_are_trained_again(make_toy, finished, site):
    """Their episodes do not run again, their optimizer steps do."""
    toy = make_toy(SPARSE).end_after(site)
    assert differences(toy.run, finished(SPARSE).run) == []


def resumed_after(toy):
    return [row[0] for row in toy.rows_of("SELECT resumed_after FROM sessions ORDER BY id")]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("site", "mutation"),
    [
        ("ckpt.after_rename:3", mutations.forget_the_rng),
        ("ckpt.after_rename:3", mutations.forget_the_optimizer),
        ("ckpt.after_rename:3", mutations.forget_the_counters),
        ("export.mid:3", mutations.keep_old_metrics),
    ],
)
def test_what_is_not_restored_makes_a_difference(toy, whole, site, mutation):
    """Mutation check."""
    assert differences(toy.end_after(site, mutation=mutation).run, whole.run) != []


@pytest.mark.fault
def test_a_journal_ahead_of_the_checkpoint_makes_a_difference(toy):
    """Mutation check: with the two commits in the wrong order the run cannot resume."""
    assert toy.start(crash_at="ckpt.after_manifest:3", mutation=mutations.record_before_the_checkpoint).wait() == KILLED
    child = toy.resume(mutation=mutations.trust_the_journal)
    assert child.wait() == 4, child.said
    assert "cannot load the model" in child.said
    assert "/checkpoints/step-000002: " in child.said


@pytest.mark.fault
def test_a_checkpoint_that_is_copied_into_place_makes_a_difference(toy):
    """Mutation check."""
    assert toy.start(crash_at="ckpt.after_tensor:5", mutation=mutations.rename_by_copying).wait() == KILLED
    assert damaged(toy.run) == ["step-000000"]


@pytest.mark.fault
def test_episodes_that_run_again_make_a_difference(toy, whole):
    """Mutation check."""
    assert toy.end_after("batch.sealed:2", mutation=mutations.recall_nothing).num_run > whole.num_run


@pytest.mark.fault
def test_a_checkpoint_that_is_not_adopted_makes_a_difference(toy):
    """Mutation check."""
    toy.end_after("ckpt.after_rename:3", mutation=mutations.adopt_no_orphan)
    assert resumed_after(toy) == [None, 0]


STAGGERED = """
import asyncio, hashlib

def number_of(text):
    return hashlib.sha256(text.encode()).digest()[0]

async def agent(item, llm, context):
    await asyncio.sleep(0.04 * (number_of(item.id) % 5))
    content = item.input_obj * (1 + number_of(item.id) % 8)
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": content}], max_tokens=8)
    return reply.choices[0].message.content

def vowels(output, expected):
    return sum(letter in "aeiou" for letter in output) / max(1, len(output))
"""


@pytest.fixture(scope="session")
def wider_model(tmp_path_factory):
    """Wide enough that the blocking of matrix products depends on the batch."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "wider", hidden_size=128, intermediate_size=256)


def killed_while_collecting(folder, model, *, deterministic):
    """Returns what differs after kills between siblings: some are in the journal, the others run in other batches."""

    def staggered(name):
        toy = Toy(folder / name, model)
        toy.write("task.py", STAGGERED)
        return toy.set("finetuning.deterministic", deterministic).set("finetuning.num_epochs", 3)

    whole = staggered("whole")
    assert whole.start().wait() == 0
    sites = [f"rollout.after_journal:{number}" for number in (20, 47, 71)]
    return [name for site in sites for name in differences(staggered(site).end_after(site).run, whole.run)]


@pytest.mark.fault
def test_samples_in_other_batches_after_a_kill_are_the_same(tmp_path, wider_model):
    assert killed_while_collecting(tmp_path, wider_model, deterministic=True) == []


@pytest.mark.fault
def test_samples_that_depend_on_their_batch_make_a_difference(tmp_path, wider_model):
    """Mutation check: without `deterministic` the last bits differ."""
    assert killed_while_collecting(tmp_path, wider_model, deterministic=False) != []


DEFAULT = {"finetuning.deterministic": False}


@pytest.mark.fault
@pytest.mark.parametrize("sites", [CHAINS[1], CHECKPOINT], ids="->".join)
def test_each_episode_and_each_step_counts_once_by_default(make_toy, finished, sites):
    toy = make_toy(DEFAULT).end_after(*sites)
    assert_counted_once(toy, finished(DEFAULT))


@pytest.mark.fault
def test_each_episode_and_each_step_counts_once_after_kills_at_random_times(make_toy, finished):
    rng, kills = random.Random(7), 0
    while kills < scaled(50):
        toy = make_toy(DEFAULT)
        kills += toy.end_with_kills(rng)
        assert_counted_once(toy, finished(DEFAULT))


def list_keys(toy):
    """Returns the episodes, without the epoch of the best checkpoint: weights differ a little from run to run."""
    keys = [key for (key,) in toy.rows_of("SELECT key FROM episodes ORDER BY key")]
    return sorted(re.sub(r"^confirm_tuned/\d+", "confirm_tuned", key) for key in keys)


def assert_counted_once(toy, whole):
    summary = toy.summary
    assert list_keys(toy) == list_keys(whole)
    outcomes = collections.Counter(outcome for (outcome,) in toy.rows_of("SELECT outcome FROM episodes"))
    assert summary["episodes"] == outcomes
    assert toy.rows_of("SELECT epoch, status FROM jobs ORDER BY epoch") == [(i, "completed") for i in range(4)]
    assert [row["version"] for row in summary["policy_versions"]] == [0, 1, 2, 3, 4]
    steps = [row["num_updates"] for row in summary["policy_versions"]]
    assert steps == [0, 2, 2, 2, 2]
    assert json.loads((toy.run / "checkpoints/step-000004/training/state.json").read_text())["num_steps"] == sum(steps)
    assert [row["epoch"] for row in read_metrics(toy)] == [0, 1, 2, 3]


def read_metrics(toy):
    return [json.loads(line) for line in (toy.run / "training_metrics.jsonl").read_text().splitlines()]
