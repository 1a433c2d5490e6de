"""A limit of time or tokens stops a run inside a collection, holds for one call, and loses no finished episode."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest

from reinforge.errors import BudgetReached
from reinforge.runs.summary import load_summary
from reinforge.trainer import context
from reinforge.trainer.context import RunContext
from tests.doubles import RecordingAdapter, ScriptedPolicy
from tests.fault import mutations
from tests.fault.kit import differences
from tests.scripted_run import ScriptedRun, ask

TOKENS = len("answer 0")
"""Sampled tokens of one episode of a scripted run."""


class Counting:
    """An agent that counts its episodes; those after the `hang_after`-th never end."""

    def __init__(self, hang_after=None):
        self.hang_after, self.count = hang_after, 0

    async def __call__(self, item, llm, context):
        self.count += 1
        if self.hang_after is not None and self.count > self.hang_after:
            await asyncio.Event().wait()
        return await ask(item, llm, context)


def limited(folder, agent, **limits):
    run = ScriptedRun(folder, workflow=agent)
    run.settings["eval"]["general"]["max_concurrency"] = 4
    run.settings["finetuning"]["limits"] = limits
    return run


@pytest.mark.parametrize("hang_after", [1, 10], ids=["in the baseline", "in the first epoch"])
async def test_the_limit_of_time_ends_a_collection(tmp_path, hang_after):
    agent = Counting(hang_after)
    with pytest.raises(BudgetReached, match=r"limits.max_minutes reached: \d+\.\d of 0.01 minutes") as raised:
        await limited(tmp_path, agent, max_minutes=0.01).run()
    assert raised.value.exit_code == 5


@pytest.mark.fault
async def test_without_that_end_the_collection_goes_on(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(RunContext, "limit_episodes", lambda context: contextlib.nullcontext())
    work = asyncio.create_task(limited(tmp_path, Counting(hang_after=1), max_minutes=0.01).run())
    done, _ = await asyncio.wait({work}, timeout=3)
    assert not done
    work.cancel()
    await asyncio.wait({work})


async def test_the_limit_of_tokens_ends_a_collection(tmp_path):
    agent = Counting()
    with pytest.raises(BudgetReached, match=rf"limits.max_tokens reached: \d+ of {8 * TOKENS} sampled tokens"):
        await limited(tmp_path, agent, max_tokens=8 * TOKENS).run()
    assert agent.count < 25, "the baseline and the first epoch have 51"


class SavingAdapter(RecordingAdapter):
    """Checkpoints hold nothing but their version."""

    async def save(self, folder, version):
        folder.mkdir()
        (folder / "weights").write_text(str(version))
        return True

    async def restore(self, folder, version):
        await self.server.publish(version)
        return True


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"max_minutes": 0.1}, {"max_tokens": 300 * TOKENS}], ids=["time", "tokens"])
@pytest.mark.parametrize("reserved", [True, False])
async def test_a_limit_keeps_what_the_verdict_needs(tmp_path, limit, reserved, monkeypatch):
    async def agent(item, llm, context):
        await asyncio.sleep(0.01)
        return await ask(item, llm, context)

    run = limited(tmp_path, agent, **limit)
    run.settings["eval"]["general"]["dataset"]["rows"] = [{"id": i, "question": f"q{i}"} for i in range(24)]
    run.settings["finetuning"] |= {"num_epochs": 1000, "run_configuration": {"validation_interval": 2}}
    run.adapter = SavingAdapter(ScriptedPolicy(lambda it: f"answer {it.sampling.seed % 3 + min(6, policy.version)}"))
    policy = run.adapter.server
    if not reserved:  # a mutation
        monkeypatch.setattr(RunContext, "_compute_reserve", lambda context, **_: (0.0, 0))
    with pytest.raises(BudgetReached, match=f"limits.{next(iter(limit))} reached") as raised:
        await run.run()
    summary = load_summary(tmp_path / "r")
    assert summary.status == "stopped"
    assert "limits.max_" in summary.reason
    assert (summary.improvement is not None, summary.promoted) == ((True, True) if reserved else (False, None))
    assert any("improvement: +" in note for note in raised.value.__notes__) == reserved


class SlowAdapter(SavingAdapter):
    """A row of a job takes 20 seconds of a clock that stands still meanwhile."""

    trains_stages = True

    def __init__(self, policy):
        super().__init__(policy)
        self.now = time.monotonic()

    async def submit(self, trajectories):
        self.now += 20 * trajectories.num_trajectories
        return await super().submit(trajectories)


async def train_two_sizes(folder, monkeypatch, sizes, minutes):
    """Returns the rows of each job: one epoch of the first number of examples, then as many of the second as fit."""
    run = limited(folder, ask, max_minutes=minutes)
    run.settings["eval"]["general"]["dataset"]["rows"] = [{"id": i, "question": f"q{i}"} for i in range(48)]
    builders = {f"of {size}": {"_type": "group", "num_generations": 4, "examples_per_epoch": size} for size in sizes}
    stages = [{"num_epochs": count, "trajectory_builder": name} for count, name in zip((1, 99), builders, strict=True)]
    run.settings["trajectory_builders"] |= builders
    run.settings["trainers"]["trainer"] = {"_type": "epoch"}
    run.settings["finetuning"] |= {"num_epochs": 100, "pipeline": dict(zip(("one", "two"), stages, strict=True))}
    run.adapter = SlowAdapter(ScriptedPolicy(lambda it: f"answer {it.sampling.seed % 3}"))
    monkeypatch.setattr(context, "time", SimpleNamespace(monotonic=lambda: run.adapter.now))
    with pytest.raises(BudgetReached, match="limits.max_minutes reached"):
        await run.run()
    return [job.num_trajectories for job in run.adapter.jobs]


@pytest.mark.parametrize(
    ("sizes", "minutes", "rows"),
    [((24, 2), 60, [96, *[8] * 10]), ((2, 24), 20, [8])],
    ids=["small jobs after a large one", "no large job after a small one"],
)
async def test_what_is_kept_for_a_job_is_the_time_of_its_own_rows(tmp_path, monkeypatch, sizes, minutes, rows):
    """96 rows take 32 minutes, 8 rows 2.7; a quarter more is kept."""
    assert await train_two_sizes(tmp_path, monkeypatch, sizes, minutes) == rows


async def test_a_job_that_is_not_checked_outlasts_the_limit(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(RunContext, "check_job", lambda context, num_rows: None)
    assert await train_two_sizes(tmp_path, monkeypatch, (2, 24), 20) == [8, 96]


async def test_each_call_gets_further_with_the_same_limit_and_repeats_no_finished_episode(tmp_path):
    whole, agent = Counting(), Counting()
    await limited(tmp_path / "whole", whole).run()
    run, num_calls = limited(tmp_path, agent, max_tokens=20 * TOKENS), 0
    summary, options, most_calls = None, {}, 1 + whole.count // 20
    while summary is None and num_calls <= most_calls:
        num_calls += 1
        with contextlib.suppress(BudgetReached):
            summary = await run.run(**options)
        options = {"resume": tmp_path / "r"}
    assert summary.status == "completed"
    assert whole.count // 24 <= num_calls <= most_calls, "20 episodes a call, and those in flight"
    assert agent.count - whole.count <= 4 * num_calls, "only episodes in flight are lost"


@pytest.mark.slow
def test_a_limit_of_one_resume_does_not_stay(toy, whole):
    """Nor does a run shrink; without tokens for its verdict it names the command."""
    child = toy.start("--max_tokens", "120")
    assert child.wait() == 5
    assert "there is no verdict yet; take it with: reinforge runs verdict runs/r" in child.said
    config = (toy.run / "config.yml").read_bytes()
    child = toy.resume("-o", "finetuning.num_epochs", "2")
    assert (child.wait(), "finetuning.num_epochs: 4 -> 2" in child.said) == (2, True)
    assert toy.resume("--max_tokens", "200", "--max_minutes", "60").wait() == 5
    assert (toy.run / "config.yml").read_bytes() == config
    assert toy.resume("--max_tokens", "100000").wait() == 0
    assert differences(toy.run, whole.run) == []


@pytest.mark.slow
def test_a_run_that_took_its_verdict_early_resumes_to_what_an_undisturbed_run_is(make_toy, whole):
    toy = make_toy({"eval.general.max_concurrency": 2})  # few episodes are in flight when the collection stops
    child = toy.start("--max_tokens", "350")
    assert (child.wait(), "\nimprovement: " in child.said) == (5, True), child.said
    assert toy.resume("--max_tokens", "100000").wait() == 0
    assert differences(toy.run, whole.run) == []


@pytest.mark.fault
def test_a_limit_that_stays_is_in_the_next_call(toy):
    """Mutation check."""
    assert toy.start("--max_tokens", "150").wait() == 5
    assert toy.resume("--max_tokens", "1", mutation=mutations.keep_settings_of_the_last_call).wait() == 5
    child = toy.resume()
    assert (child.wait(), "of 1 sampled tokens" in child.said) == (5, True)


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True], ids=["finished", "stopped"])
def test_a_run_is_extended_to_what_a_longer_run_is(make_toy, whole, is_stopped):
    """Weights, metrics, validations and the verdict are those of a run that had four epochs from the start."""
    toy = make_toy({"finetuning.num_epochs": 2})
    first = toy.start("--max_tokens", "150") if is_stopped else toy.start()
    assert first.wait() == (5 if is_stopped else 0)
    child = toy.resume("--more", "2", *(["--max_tokens", "100000"] if is_stopped else []))
    assert child.wait() == 0, child.said
    assert "2 more epochs than before" in child.said
    assert differences(toy.run, whole.run) == []
    again = toy.resume()
    assert (again.wait(), "epoch" in again.said.partition("improved")[0]) == (0, False), "it is finished"
