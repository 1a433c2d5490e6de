"""A run that samples while it trains reaches the verdict of one that does not."""

import json
import shutil
import time

import pytest

from reinforge.engine.packages import is_installed
from reinforge.engine.sampling.sampler import ReplySampler
from tests.journal_rows import read_rows

AGENT = """
import asyncio

async def agent(item, llm, context):
    messages = [{"role": "user", "content": item.input_obj}]
    said = ""
    for _ in range(2):
        reply = await llm.chat.completions.create(messages=messages, max_tokens=4)
        said += reply.choices[0].message.content
        await asyncio.sleep(0.02)  # a tool
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
    return said
"""


def finish(project, max_staleness, agent=AGENT, **limits):
    for path in (project.run, project.folder / "run.yml"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    project.write_agent(agent)
    for name, value in {"max_staleness": max_staleness, **limits}.items():
        project.set(f"finetuning.limits.{name}", value)
    project.finetune(code=0)
    return project.summary


def list_ages(project):
    """Returns by how many versions the tokens of each epoch are older than the weights that train on them."""
    ages = {}
    for epoch, data in read_rows(project.run, "SELECT epoch, data FROM episodes WHERE phase = 'collect'"):
        versions = {call["policy_version"] for call in json.loads(data)["calls"]}
        ages.setdefault(epoch, set()).update(epoch - version for version in versions)
    return ages


def assert_bounded(project):
    ages = list_ages(project)
    assert set().union(*ages.values()) == {0, 1}
    rows = project.metrics
    assert [row["staleness_max"] for row in rows] == [max(ages[row["epoch"]]) for row in rows]
    assert all(row["canary_difference"] < 1e-4 for row in rows)
    assert {row["num_groups_stale"] for row in rows} == {0}
    assert all(0 < row["tis_weight"] < 2 for row in rows[1:])
    assert "no trained token is more than 1 version old" in (project.run / "run.log").read_text()


@pytest.mark.slow
def test_a_run_that_samples_while_it_trains_reaches_the_same_verdict(project):
    before, after = finish(project, 0), finish(project, 1)
    assert_bounded(project)
    assert [summary["promoted"] for summary in (before, after)] == [True, True]
    first, second = before["improvement"], after["improvement"]
    assert max(first["ci_low"], second["ci_low"]) < min(first["ci_high"], second["ci_high"]), "their intervals overlap"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_flight", "told"),
    [
        ("keep", "continue with new weights"),
        ("recompute", "continue with new weights once their keys and values are recomputed"),
        ("abort", "are sampled again"),
    ],
)
def test_replies_in_flight_continue_with_new_weights_or_begin_again(project, monkeypatch, in_flight, told):
    exchange = ReplySampler.exchange

    def exchange_during_a_reply(self, *args, **settings):
        end = time.monotonic() + 5
        while not self.stats().running and time.monotonic() < end:  # all agents may be between two calls
            time.sleep(0.001)
        exchange(self, *args, **settings)

    monkeypatch.setattr(ReplySampler, "exchange", exchange_during_a_reply)
    project.set("finetuning.num_epochs", 4)
    agent = AGENT.replace("range(2)", "range(4)").replace("max_tokens=4", "max_tokens=16")
    finish(project, 1, agent, in_flight=in_flight)
    assert_bounded(project)
    assert f"replies in flight {told}" in (project.run / "run.log").read_text()
    rows = read_rows(project.run, "SELECT data FROM episodes WHERE phase = 'collect'")
    later = [call.get("later_versions", []) for (data,) in rows for call in json.loads(data)["calls"]]
    assert any(later) == (in_flight != "abort"), "some replies were in flight"
    assert all(len(each) <= 1 for each in later), "an epoch ends before the next version but one"


@pytest.mark.slow
def test_adapters_are_trained_while_a_copy_of_them_samples(project):
    project.set("finetuning.policy.lora", {"r": 4}).shrink(3)
    finish(project, 1)
    assert_bounded(project)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`")
@pytest.mark.parametrize("in_flight", ["wait", "keep", "abort"])
def test_workers_sample_while_they_train(project, in_flight):
    project.set("trainer_adapters.adapter", {"_type": "ray", "num_workers": 2}).set("finetuning.num_epochs", 3)
    finish(project, 1, in_flight=in_flight)
    assert_bounded(project)
