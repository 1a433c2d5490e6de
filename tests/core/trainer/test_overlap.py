"""Collections that begin before their epoch's turn: when they may, what they collect, and what is refused."""

import asyncio
import json

import pytest

from reinforge.config.finetuning_blocks import LimitsConfig
from reinforge.config.schema import FinetuneConfig, TrainerConfig
from reinforge.errors import JobFailed
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.progress import SilentProgress
from reinforge.runs.rows import EpochSnapshot
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from reinforge.trainer.context import RunContext
from reinforge.trainer.epoch_collection import EarlyCollections, ExampleChoice, check_overlap, is_stale
from reinforge.trainer.loop import EpochTrainer, EpochTrainerConfig
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams, TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection
from tests.doubles import RecordingAdapter, ScriptedPolicy, examples
from tests.journal_rows import read_rows
from tests.scripted_run import ScriptedRun, seeded


def limited(max_staleness, **settings):
    return FinetuneConfig(limits={"max_staleness": max_staleness}, **settings)


@pytest.mark.parametrize(("max_staleness", "due"), [(0, []), (1, [5]), (3, [5, 6, 7]), (9, [5, 6, 7, 8, 9])])
def test_later_epochs_begin_as_far_ahead_as_the_bound_allows(max_staleness, due):
    assert EarlyCollections(limited(max_staleness), num_epochs=10).list_due(4) == due


def test_a_collection_begins_once_and_only_in_a_run():
    early = EarlyCollections(limited(2), num_epochs=10)
    early.started[5] = ExampleChoice()
    assert early.list_due(4) == [6]
    assert EarlyCollections(limited(2)).list_due(4) == []


def test_a_stage_of_a_pipeline_begins_after_the_job_of_the_one_before():
    stages = {"warm_up": {"num_epochs": 3}, "main": {"num_epochs": 4}}
    early = EarlyCollections(limited(2, pipeline=stages), num_epochs=7)
    assert [early.list_due(epoch) for epoch in (0, 1, 2, 3)] == [[1, 2], [2], [], [4, 5]]


def test_the_examples_of_early_collections_survive_a_restart():
    early = EarlyCollections(limited(2))
    early.started = {3: ExampleChoice(), 4: ExampleChoice(["a"], frozenset({"b", "c"}))}
    again = EarlyCollections(limited(2))
    again.restore(json.loads(json.dumps(early.as_dict())))
    assert again.known == early.started


def trajectory(*versions):
    turns = [
        EpisodeItem(role="assistant", content="a", logprobs=TokenLogprobs((1,), (2,), (-0.5,), version), metadata={})
        for version in versions
    ]
    return Trajectory(episode=turns, reward=1.0)


def test_groups_with_a_token_that_is_too_old_are_dropped_whole():
    groups = [[trajectory(3, 4), trajectory(4)], [trajectory(4), trajectory(4, 2)], [trajectory(3), trajectory(-1)]]
    made = TrajectoryCollection(trajectories=groups, run_id="r").groups
    assert [is_stale(group, oldest=3) for group in made] == [False, True, False], "-1: given, not sampled"
    assert not any(is_stale(group, oldest=2) for group in made)


def test_a_group_that_newer_weights_continued_is_as_old_as_its_oldest_token():
    tokens = TokenLogprobs((1,), (2, 3), (-0.5, -0.5), 3, later_versions=((1, 5),))
    turn = EpisodeItem(role="assistant", content="a", logprobs=tokens, metadata={})
    [group] = TrajectoryCollection(trajectories=[[Trajectory(episode=[turn], reward=1.0)]], run_id="r").groups
    assert [is_stale(group, oldest) for oldest in (3, 4)] == [False, True]


class Served(RecordingAdapter):
    """Takes every job; the policy answers meanwhile."""

    serves_during_jobs = True


def problems(trainer=None, adapter=None, builder=None, **settings):
    trainer = trainer or EpochTrainer(EpochTrainerConfig())
    adapter = adapter or Served(ScriptedPolicy())
    builder = builder or GroupTrajectoryBuilder(GroupTrajectoryBuilderConfig())
    config = limited(1, trainer="loop", **settings)
    found = check_overlap(config, trainer, adapter, builder)
    config.limits.max_staleness = 0
    assert check_overlap(config, trainer, adapter, builder) == []
    return [(each.path, each.message) for each in found]


class OwnTrainer(EpochTrainer):
    collects_ahead = False


class OwnBuilder(GroupTrajectoryBuilder):
    collects_ahead = False


LIMIT = "finetuning.limits.max_staleness"


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        ({"trainer": OwnTrainer(TrainerConfig())}, LIMIT, "OwnTrainer collects and trains one after the other"),
        ({"adapter": RecordingAdapter(None)}, LIMIT, "RecordingAdapter does not serve the policy while a job trains"),
        ({"builder": OwnBuilder(GroupTrajectoryBuilderConfig())}, LIMIT, "OwnBuilder collects one epoch at a time"),
        ({"deterministic": True}, "finetuning.deterministic", "depends on how long the job before it takes"),
        (
            {"trainer": EpochTrainer(EpochTrainerConfig(save_every=2))},
            "trainers.loop.save_every",
            "every version that a token names needs a checkpoint",
        ),
    ],
    ids=["trainer", "adapter", "builder", "deterministic", "save_every"],
)
def test_a_run_that_cannot_sample_ahead_is_refused(settings, path, message):
    [(found_path, found)] = problems(**settings)
    assert found_path == path
    assert message in found


def test_a_run_that_can_sample_ahead_is_not_refused():
    assert problems() == []


def test_replies_are_kept_only_where_some_are_in_flight():
    config = FinetuneConfig(limits={"in_flight": "keep"}, trainer="loop")
    [found] = check_overlap(config, EpochTrainer(EpochTrainerConfig()), None, None)
    assert (found.path, found.fix) == ("finetuning.limits.in_flight", f"set it to wait, or {LIMIT} to 1")
    config.limits.max_staleness = 1
    assert check_overlap(config, EpochTrainer(EpochTrainerConfig()), None, None) == []


def make_record(epoch, *versions):
    [item] = examples(1)
    record = EpisodeRecord(EpisodeKey("collect", epoch, item.id), item, seed=0, reward=1.0)
    for version in versions:
        first, last = version if isinstance(version, tuple) else (version, version)
        later = ((1, last),) if last > first else ()
        tokens = TokenLogprobs((1,), (2, 3), (-0.5, -0.5), first, later_versions=later)
        reply = ModelReply({"role": "assistant", "content": "a"}, "stop", tokens, 1, 1)
        request = ModelRequest([{"role": "user", "content": "q"}], SamplingParams())
        record.calls.append(ModelCall("c", "agent", "m", request, reply, (), 0.0, 0.0))
    return record


@pytest.mark.parametrize(
    ("epoch", "versions", "is_used"),
    [
        (5, (4, 5), True),
        (5, (3, 5), False),
        (6, (5, 5), True),
        (6, (4, 5), False),
        (6, (5, 6), False),
        (5, ((4, 5),), True),
        (5, ((3, 5),), False),
        (6, ((5, 6),), False),
    ],
    ids=[
        "recent",
        "too old",
        "recent enough for a later epoch",
        "too old for it",
        "of weights that were lost",
        "continued by newer weights",
        "begun by weights that are too old",
        "continued by weights that were lost",
    ],
)
def test_a_resumed_run_uses_the_episodes_that_its_jobs_may_train_on(tmp_path, epoch, versions, is_used):
    """It resumed from version 5, which epoch 5 trains; the version 6 that the journal names was never saved."""
    context = RunContext("r", RunJournal(tmp_path / "r"), SilentProgress(), LimitsConfig(max_staleness=1))
    record = make_record(epoch, *versions)
    context.record_episode(record)
    context.journal.flush()
    context.recalls, context.policy = {"collect"}, ScriptedPolicy()
    asyncio.run(context.policy.publish(5))
    context.resumed = EpochSnapshot(4, 5, None, {})
    context.begin_stage("COLLECT", 5)
    assert (context.recall(record.key, record.item) is not None) == is_used
    context.journal.close()


def make_run(tmp_path, *, num_epochs=4, adapter=None):
    run = ScriptedRun(tmp_path)
    run.adapter = adapter or Served(ScriptedPolicy(seeded))
    run.settings["finetuning"] |= {"num_epochs": num_epochs, "limits": {"max_staleness": 1, "max_refills": 0}}
    run.settings["trainers"]["trainer"] = {"_type": "epoch"}
    run.settings["trajectory_builders"]["builder"]["examples_per_epoch"] = 4
    return run


def list_versions(folder):
    rows = read_rows(folder, "SELECT epoch, data FROM episodes WHERE phase = 'collect'")
    found = {}
    for epoch, data in rows:
        calls = json.loads(data)["calls"]
        found.setdefault(epoch, set()).update(call["policy_version"] for call in calls)
    return found


async def test_the_next_epoch_is_sampled_while_a_job_trains(tmp_path):
    """Each token keeps the version that sampled it; counts, stages and jobs are those of a run without overlap."""
    run = make_run(tmp_path)
    summary = await run.run()
    assert summary.status == "completed"
    versions = list_versions(tmp_path / "r")
    assert [min(versions[epoch]) for epoch in range(4)] == [0, 0, 1, 2], "each epoch begins before the job of the last"
    assert all(versions[epoch] <= {epoch - 1, epoch} for epoch in range(4))
    stages = "SELECT stage FROM stages WHERE epoch = 2 AND stage != 'VALIDATE' ORDER BY id"
    assert [row[0] for row in read_rows(tmp_path / "r", stages)] == ["COLLECT", "SELECT", "SUBMIT", "AWAIT", "ADOPT"]
    rows = [json.loads(line) for line in (tmp_path / "r" / "training_metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert {row["num_groups"] for row in rows} == {rows[0]["num_trajectories"] // 4}
    assert {row["num_groups_stale"] for row in rows} == {0}
    assert all(row["reward_std"] > 0 for row in rows), "an epoch's figures are those of its own episodes"
    other = ScriptedRun(tmp_path / "sequential")
    other.settings["finetuning"]["num_epochs"] = 4
    other.settings["trajectory_builders"] = run.settings["trajectory_builders"]
    whole = await other.run()
    assert summary.episodes == whole.episodes
    assert summary.tokens["completion"] == whole.tokens["completion"]


async def wait_in_the_second_epoch(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
    if context.is_training and context.epoch == 1:
        await asyncio.Event().wait()
    return reply.choices[0].message.content


async def test_a_run_that_fails_leaves_no_collection_behind(tmp_path):
    run = make_run(tmp_path, adapter=Served(ScriptedPolicy(seeded), outcome="failed"))
    run.settings["workflow"]["function"] = wait_in_the_second_epoch
    with pytest.raises(JobFailed, match="ended with status failed"):
        await run.run()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
