"""Runs of other methods (LoRA, SFT, DPO from a file, PPO) that are killed at any time reach the same end."""

import random

import pytest

from reinforge.crash import SITES
from tests.fault import mutations
from tests.fault.conftest import METHODS
from tests.fault.kit import KILLED, differences, facts, killed_at
from tests.fault.sizes import scaled

CHAINS = {
    "lora": ("rollout.after_journal:70", "step.after_optim:3", "ckpt.after_rename:1"),
    "sft": ("rollout.after_journal:70", "step.after_optim:3", "publish.mid"),
    "sft of a file": ("step.after_backward:3", "ckpt.after_manifest:2"),
    "answers of a file": ("step.after_backward:3", "ckpt.after_manifest:2"),
    "dpo of a file": ("step.after_optim:3", "ckpt.after_rename:2"),
    "two adapters": ("rollout.after_journal:70", "step.after_optim:7", "ckpt.after_rename:1"),
    "ppo": ("step.after_optim:6", "ckpt.after_rename:1", "publish.before:1"),
    "pipeline": ("ckpt.after_rename:3", "step.after_optim:1", "batch.sealed:2", "step.after_optim:1"),
}
"""One place in the middle of a job at least, and one around what the next process begins from. Two adapters make two
steps each in a job: at the seventh step one has learnt already, and the other has not. A pipeline is killed at the
border of its stages, in the first step of the second one, and in its second epoch, which needs that stage's optimizer.
"""
PLACES = [(method, site) for method in METHODS for site in SITES if (site, "file" in method) != ("export.mid", True)]
"""Rows of a file, and its answers, are not episodes that could be exported."""


LONG = ("sft", "dpo of a file", "pipeline")
"""The long run's: test_pipeline.py kills pipelines at the border of their stages."""


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=pytest.mark.fault if each in LONG else pytest.mark.slow) for each in METHODS]
)
def test_a_run_killed_at_crash_points_ends_as_if_undisturbed(make_toy, finished, method):
    toy = make_toy(METHODS[method]).end_after(*CHAINS[method])
    assert differences(toy.run, finished(METHODS[method]).run) == []


@pytest.mark.fault
@pytest.mark.parametrize(("method", "site"), PLACES, ids=[": ".join(place) for place in PLACES])
def test_a_run_killed_at_one_crash_point_ends_as_if_undisturbed(make_toy, finished, method, site):
    toy = make_toy(METHODS[method])
    killed_at(toy, f"{site}:2")
    assert differences(toy.run, finished(METHODS[method]).run) == []


@pytest.mark.fault
@pytest.mark.parametrize("method", METHODS)
def test_kills_at_random_times(make_toy, finished, method):
    rng, kills, whole = random.Random(method), 0, finished(METHODS[method])
    while kills < scaled(50):
        toy = make_toy(METHODS[method])
        kills += toy.end_with_kills(rng)
        assert differences(toy.run, whole.run) == []


@pytest.mark.fault
def test_everything_that_a_method_trains_is_compared(finished):
    """The critic and its optimizer state, the adapters: what is not compared could not differ."""
    assert {"critic.safetensors", "model.safetensors", "optimizer.safetensors"} <= set(
        facts(finished(METHODS["ppo"]).run)
    )
    assert "adapter_model.safetensors" in facts(finished(METHODS["lora"]).run)
    both = facts(finished(METHODS["two adapters"]).run)
    assert {f"{name}/{kind}.safetensors" for name in "ab" for kind in ("adapter_model", "optimizer")} <= set(both)
    assert both["a/adapter_model.safetensors"] != both["b/adapter_model.safetensors"]
    assert both["num_steps"] == {"a/state.json": 8, "b/state.json": 8}, "four jobs of two steps each"


@pytest.mark.fault
@pytest.mark.parametrize(
    ("method", "mutation", "shows"),
    [
        ("ppo", mutations.forget_the_critic, "critic.safetensors"),
        ("lora", mutations.forget_the_adapters, "adapter_model.safetensors"),
        ("two adapters", mutations.forget_the_second_adapter, "b/adapter_model.safetensors"),
    ],
)
def test_what_is_not_restored_makes_a_difference(make_toy, finished, method, mutation, shows):
    """Mutation check."""
    toy = make_toy(METHODS[method])
    assert toy.start(crash_at="ckpt.after_rename:3").wait() == KILLED
    child = toy.resume(mutation=mutation)
    assert child.wait() != 0 or shows in differences(toy.run, finished(METHODS[method]).run)
