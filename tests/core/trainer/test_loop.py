"""The loop over doubles: stages in order, selection, refills, and every way it refuses to go on."""

import asyncio
import json
import math
import time
from types import SimpleNamespace

import pytest

from reinforge.config.finetuning_blocks import OutcomesConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import EvaluationError, JobFailed
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.evaluation.statistics import compute_mean_interval
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.progress import SilentProgress
from reinforge.trainer import context, run_log
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from reinforge.trainer.context import RunContext
from reinforge.trainer.loop import EpochTrainer, EpochTrainerConfig
from reinforge.trainer.versions import shortest_prompts
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryGroup
from tests.doubles import RecordingAdapter, Scored, ScriptedPolicy, examples
from tests.episodes import make_runner
from tests.journal_rows import read_rows
from tests.scripted_run import ScriptedRun, ask, seeded


def by_answer(item):
    return float(str(item.output_obj)[-1])


class Loop:
    def __init__(
        self, tmp_path, *, script=seeded, score=by_answer, workflow=ask, count=20, builder=None, adapter=None, **config
    ):
        settings = {"reward_function": {"name": "reward"}, "num_epochs": 2, **config}
        self.config = FinetuneConfig(**settings)
        self.policy = ScriptedPolicy(script)
        self.adapter = adapter or RecordingAdapter(self.policy)
        runner = make_runner(workflow, self.policy, seed=0)
        self.context = RunContext("r", RunJournal(tmp_path / "r"), SilentProgress(), self.config.limits)
        self.builder = GroupTrajectoryBuilder(
            builder or GroupTrajectoryBuilderConfig(num_generations=4, examples_per_epoch=5), ["agent"]
        )
        self.builder.evaluation = DatasetEvaluation(
            runner,
            {"train": examples(count), "select": examples(3)},
            {"reward": Scored(score)},
            reward_metric="reward",
            outcomes=OutcomesConfig(),
            listener=self.context.record_episode,
        )
        self.trainer = EpochTrainer(EpochTrainerConfig())
        self.trainer.context = self.context

    async def run(self, epochs=2):
        await self.trainer.bind_components(self.builder, self.adapter)
        await self.trainer.initialize(self.config)
        try:
            return await self.trainer.run(epochs)
        finally:
            self.context.journal.flush()

    @property
    def history(self):
        return [row.as_dict() for row in self.trainer._reward_history]


@pytest.fixture
def loop(tmp_path):
    made = []

    def make(**settings):
        made.append(Loop(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.context.journal.close()


async def test_the_stages_are_journalled_in_order(loop):
    it = loop()
    statuses = await it.run()
    assert [status.status for status in statuses] == ["completed", "completed"]
    stages = [row[0] for row in read_rows(it.context.folder, "SELECT stage FROM stages WHERE epoch = 0 ORDER BY id")]
    assert stages == ["COLLECT", "SELECT", "SUBMIT", "AWAIT", "ADOPT"]
    assert it.policy.version == 2
    assert [version.version for version in it.context.policy_versions] == [1, 2]
    assert it.context.episodes == {"ok": 40}


async def test_jobs_have_keys_that_tell_epochs_apart(loop):
    it = loop()
    await it.run()
    assert [job.job_key for job in it.adapter.jobs] == ["r/0", "r/1"]
    assert [len(group.trajectories) for group in it.adapter.jobs[0].groups] == [4] * len(it.adapter.jobs[0].groups)


async def test_groups_without_signal_are_dropped_and_counted(loop):
    """Examples 0-9 always score 1; the others by what was sampled."""
    score = lambda item: 1.0 if int(item.id) < 10 else by_answer(item)  # noqa: E731
    it = loop(score=score, builder=GroupTrajectoryBuilderConfig(num_generations=4), limits={"max_refills": 0})
    await it.run(1)
    row = it.history[0]
    assert (row["num_groups"], row["num_groups_kept"], row["num_groups_zero_variance"]) == (20, 10, 10)
    assert row["avg_reward"] < row["filtered_avg_reward"]


async def test_the_curves_interval_counts_prompts_and_not_groups(loop):
    """Twenty examples of four prompts, each prompt with one score: the interval is that of four scores."""
    it = loop(
        score=lambda item: float(int(item.id) % 4) + by_answer(item) / 100,
        builder=GroupTrajectoryBuilderConfig(num_generations=4),
        limits={"allow_no_training": True},
    )
    it.builder.evaluation.clusters = {str(n): f"prompt {n % 4}" for n in range(20)}
    await it.run(1)
    row, four = it.history[0], compute_mean_interval([0.0, 1.0, 2.0, 3.0])
    assert (row["num_groups"], row["num_clusters"]) == (20, 4)
    assert row["ci_high"] - row["ci_low"] == pytest.approx(four[2] - four[1], rel=0.05)


@pytest.mark.parametrize(
    ("episode_id", "example"),
    [("collect/3/0/math/7/2", "math/7"), ("collect/-1/1/q\n0/0", "q\n0"), ("mine/7", "g"), (None, "g")],
)
def test_a_groups_example_is_that_of_its_episodes(episode_id, example):
    group = TrajectoryGroup(
        group_id="g", trajectories=[Trajectory(episode=[], reward=1.0, group_id="g", episode_id=episode_id)]
    )
    assert group.example_id == example


async def test_too_few_groups_are_refilled_within_the_bound(loop):
    score = lambda item: 1.0 if int(item.id) % 5 else by_answer(item)  # noqa: E731
    it = loop(score=score, limits={"max_refills": 2, "min_groups": 0.9})
    await it.run(1)
    rounds = {row[0] for row in read_rows(it.context.folder, "SELECT DISTINCT round FROM episodes")}
    assert rounds == {0, 1, 2}
    ids = [row[0] for row in read_rows(it.context.folder, "SELECT DISTINCT example_id FROM episodes")]
    assert len(ids) == it.history[0]["num_groups"] == 15


async def test_epochs_walk_through_the_examples(loop):
    it = loop()
    await it.run(1)
    epochs = [list(it.builder.plan(epoch).example_ids) for epoch in range(8)]
    assert all(len(set(ids)) == 5 for ids in epochs)
    assert sorted(id_ for ids in epochs[:4] for id_ in ids) == sorted(str(i) for i in range(20)), (
        "a pass uses each example once"
    )
    assert epochs[:4] != epochs[4:], "the next pass has another order"


async def test_epochs_without_signal_end_the_run_with_the_reason(loop):
    it = loop(score=lambda item: 1.0, limits={"max_empty_updates": 2, "max_refills": 0})
    with pytest.raises(JobFailed, match="2 epochs in a row had nothing to train on.*5 groups have equal rewards"):
        await it.run(5)
    assert it.adapter.jobs == []
    assert [row["filtered_avg_reward"] for row in it.history] == [None, None], "unknown is never 0"


async def test_rewards_that_are_constant_only_inside_each_group_are_not_called_constant(loop):
    it = loop(score=lambda item: float(int(item.id) % 2), limits={"max_empty_updates": 1, "max_refills": 0})
    with pytest.raises(JobFailed, match="use easier or harder examples, a finer reward"):
        await it.run(1)


async def test_the_interval_of_an_epoch_whose_rewards_are_0_or_1_stays_between_them(loop):
    """Three groups of ones and one with a zero: 0.938 with Student's interval of the means [0.739, 1.136]."""
    rewards = iter([0.0, *[1.0] * 15])
    it = loop(score=lambda item: next(rewards), count=4, builder=GroupTrajectoryBuilderConfig(num_generations=4))
    await it.run(1)
    row = it.history[0]
    assert [row[name] for name in ("avg_reward", "ci_low", "ci_high")] == [0.9375, pytest.approx(0.739, abs=1e-3), 1]


async def test_an_epoch_tells_why_episodes_are_missing(loop):
    async def flaky(item, llm, context):
        reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
        if context.example_id in ("1", "2", "3"):
            raise AttributeError("'dict' object has no attribute 'function'")
        return reply.choices[0].message.content

    it = loop(workflow=flaky, count=8, builder=GroupTrajectoryBuilderConfig(num_generations=4))
    await it.run(1)
    assert it.history[0]["num_missing"] == 12
    assert it.history[0]["missing_reason"].startswith("tool_error: AttributeError: 'dict' object has no attribute")
    assert it.context.missing.find_commonest() == it.history[0]["missing_reason"]


async def inner():
    return "1"


async def forgets_await(item, llm, context):
    return inner()


def plain(item, llm, context):
    return inner()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workflow": forgets_await}, r"forgets_await \(test_loop.py:\d+\) returned a coroutine: write `await`"),
        ({"workflow": plain}, r"write `await` before the call of inner and make the function `async"),
        ({"script": lambda request: "always 1"}, "identical siblings.*temperature"),
    ],
    ids=["no await", "plain agent", "identical siblings"],
)
async def test_a_collection_that_can_train_nothing_is_an_error_that_says_why(loop, settings, said):
    with pytest.raises(EvaluationError, match=said):
        await loop(**settings).run()


class Frozen(ScriptedPolicy):
    """The well-known fault: the name keeps serving what it served before."""

    async def publish(self, version):
        pass


class Unchanged(ScriptedPolicy):
    async def fingerprint(self):
        return "same"


class Unknown(ScriptedPolicy):
    async def score(self, token_ids):
        return [scores - math.nan for scores in await super().score(token_ids)]


@pytest.mark.parametrize(
    ("policy", "settings", "said"),
    [
        (ScriptedPolicy, {"outcome": "failed"}, "ended with status failed"),
        (ScriptedPolicy, {"outcome": "canceled"}, "ended with status canceled"),
        (ScriptedPolicy, {"num_updates": 0}, "ended with status completed"),
        (Frozen, {}, r"version 1 was published, but replies carry version \[0\]"),
        (Unchanged, {}, "did not change the weights"),
        (Unknown, {}, "differ by up to nan nats"),
    ],
)
async def test_a_job_that_does_not_complete_and_weights_that_are_not_served_stop_the_run(loop, policy, settings, said):
    """Mutation: without the canary such a run would go on training weights that nobody uses."""
    with pytest.raises(JobFailed, match=said):
        await loop(adapter=RecordingAdapter(policy(seeded), **settings)).run()


async def test_without_a_policy_server_the_version_is_unknown_and_the_run_goes_on(loop):
    it = loop(adapter=RecordingAdapter(None))
    await it.run()
    assert [row["policy_version"] for row in it.history] == [None, None]


async def test_the_curriculum_is_in_the_history_and_the_files(loop):
    curriculum = {"enabled": True, "initial_percentile": 0.4, "increment_percentile": 0.2, "expansion_interval": 1}
    it = loop(curriculum_learning=curriculum)
    await it.run(3)
    assert [row["curriculum_percentile"] for row in it.history] == [0.4, 0.6, 0.8]
    assert all(row["num_groups_outside"] for row in it.history[:2])
    state = json.loads((it.context.folder / "curriculum_state.json").read_text())
    assert (state["current_percentile"], state["last_expansion_epoch"]) == (0.8, 2)
    assert set(state["included_groups"]) <= {str(i) for i in range(20)}, "example ids, not list positions"
    lines = (it.context.folder / "training_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]


async def test_of_each_group_those_whose_rewards_vary_most_are_trained(loop):
    it = loop(curriculum_learning={"max_variance_subsample": 0.5, "min_reward_diff": 0}, limits={"max_refills": 0})
    await it.run(1)
    collected = dict(
        read_rows(it.context.folder, "SELECT example_id, max(reward) - min(reward) FROM episodes GROUP BY 1")
    )
    groups = {group[0].group_id: [each.reward for each in group] for group in it.adapter.jobs[0].trajectories}
    assert set(map(len, groups.values())) == {2}, "of four siblings"
    assert {name: max(rewards) - min(rewards) for name, rewards in groups.items()} == pytest.approx(collected)


def graded(item):
    """Example 0 is the hardest, 9 the easiest; siblings differ by what was sampled, which is worth less than a rank."""
    return int(item.id) + by_answer(item) / 100


@pytest.mark.parametrize(("hardest_first", "collected"), [(False, {"6", "7", "8", "9"}), (True, {"0", "1", "2", "3"})])
async def test_examples_outside_the_curriculum_are_not_collected_once_they_are_known(loop, hardest_first, collected):
    """10 examples of 4 episodes: 40 in the first epoch, then 0.4, 0.8 and all of them."""
    it = loop(
        score=graded,
        count=10,
        builder=GroupTrajectoryBuilderConfig(num_generations=4),
        limits={"max_refills": 0},
        curriculum_learning={
            "enabled": True,
            "initial_percentile": 0.4,
            "increment_percentile": 0.4,
            "expansion_interval": 2,
            "sort_ascending": hardest_first,
            "min_reward_diff": 0,
            "collect_only_included": True,
        },
    )
    await it.run(5)
    assert count_episodes(it) == {0: 40, 1: 16, 2: 32, 3: 32, 4: 40}
    ids = {row[0] for row in read_rows(it.context.folder, "SELECT example_id FROM episodes WHERE epoch = 1")}
    assert ids == collected
    assert [row["num_groups_spared"] for row in it.history] == [0, 6, 2, 2, 0]
    assert [row["num_groups_kept"] for row in it.history] == [4, 4, 8, 8, 10], "what is collected is trained on"
    assert set(it.trainer.get_curriculum_state()["mean_rewards"]) == {str(i) for i in range(10)}


FIFTH = {"enabled": True, "initial_percentile": 0.2, "expansion_interval": 99, "min_reward_diff": 0}
"""The best fifth: of stretches of 5 out of 20 nothing is known before the fifth epoch, when the second pass begins."""


def count_episodes(it, where="1"):
    return dict(read_rows(it.context.folder, f"SELECT epoch, count(*) FROM episodes WHERE {where} GROUP BY epoch"))


async def test_unknown_examples_are_always_collected(loop):
    curriculum = {**FIFTH, "collect_only_included": True}
    it = loop(score=graded, limits={"max_refills": 0}, curriculum_learning=curriculum)
    await it.run(5)
    assert count_episodes(it) == {0: 20, 1: 20, 2: 20, 3: 20, 4: 4}


async def test_a_refill_spares_what_is_outside_too(loop):
    curriculum = {**FIFTH, "collect_only_included": True}
    it = loop(score=graded, limits={"max_refills": 1, "min_groups": 1.0}, curriculum_learning=curriculum)
    await it.run(6)
    counts = count_episodes(it, "round = 1")
    assert counts.get(0) == 20, "nothing was known: as many as were asked for"
    assert all(counts.get(epoch, 0) <= 8 for epoch in (4, 5)), "the best fifth of what is known"


async def test_without_the_option_every_example_is_collected(loop):
    it = loop(score=graded, limits={"max_refills": 0}, curriculum_learning=FIFTH)
    await it.run(5)
    assert count_episodes(it)[4] == 20
    assert "mean_rewards" not in it.trainer.get_curriculum_state()


async def test_status_is_a_pure_read_so_the_final_metrics_know_every_job(loop):
    it = loop()
    await it.run()
    first, second = await it.trainer.get_metrics("r"), await it.trainer.get_metrics("r")
    assert first == second
    assert [job["status"] for job in first["jobs"]] == ["completed", "completed"]


async def test_validation_runs_at_its_interval(loop):
    it = loop(run_configuration={"validation_interval": 2})
    await it.run(5)
    assert [row.epoch for row in it.trainer._validation_history] == [1, 3]
    assert [row.version for row in it.context.validations] == [2, 4]


def test_the_canary_asks_few_tokens():
    def group(name, text):
        item = EpisodeItem(role="user", content=text)
        return TrajectoryGroup(group_id=name, trajectories=[Trajectory(episode=[item], reward=0.0)])

    short = [group(str(i), f"question {i}") for i in range(9)]
    assert len(shortest_prompts(short)) == 4
    long = [group(str(i), f"{i} " * 1200) for i in range(9)]
    assert len(shortest_prompts(long)) == 1
    assert shortest_prompts([*long, *short]) == shortest_prompts(short)


class SlowAdapter(RecordingAdapter):
    """Its jobs take two seconds of a clock that each look at them moves on by 0.1 s.

    They say how much of them is done; one that hangs lasts until the log of the run says so.
    """

    reports_progress = True

    def __init__(self, log, hangs):
        super().__init__(ScriptedPolicy(seeded))
        self.log, self.hangs, self.num_looks, self.begun_s = log, hangs, 0, time.monotonic()

    def read_clock(self):
        return self.begun_s + 0.1 * self.num_looks

    async def status(self, ref):
        self.num_looks += 1
        share = 0.0 if self.hangs else 0.1 * self.num_looks
        return (await super().status(ref)).model_copy(update={"progress": share})

    async def wait_until_complete(self, ref, poll_interval=10.0):
        while "no progress for" not in self.log.read_text() if self.hangs else self.num_looks < 20:
            await asyncio.sleep(0.01)
        return await super().status(ref)


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_long_job_makes_progress_as_long_as_its_share_grows(tmp_path, monkeypatch, hangs):
    monkeypatch.setattr("reinforge.trainer.loop.FOLLOW_S", 0.05)
    scripted, log = ScriptedRun(tmp_path), tmp_path / "r" / "run.log"
    scripted.adapter = SlowAdapter(log, hangs)
    for module in (context, run_log):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=scripted.adapter.read_clock))
    scripted.settings["finetuning"] |= {"num_epochs": 1, "limits": {"stage_timeout_s": 0.6}}
    await scripted.run()
    assert ("no progress for" in log.read_text()) == hangs
