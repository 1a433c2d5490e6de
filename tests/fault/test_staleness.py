"""No token that is trained is older than `max_staleness` versions, and neither sampling nor training starves.

Slow and fast agents by a clock that jumps, 10,000 groups of them in the long run. The loop, the builder, the runner and
the limit of episodes are the real ones; replies, tools and jobs only take time.
"""

import asyncio
from dataclasses import dataclass, field

import pytest

from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.trainer import epoch_collection
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from reinforge.trainer.loop import EpochTrainer, EpochTrainerConfig
from reinforge.types.request import TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup
from tests.doubles import PolicyModel, RecordingAdapter, Scored, ScriptedPolicy, examples
from tests.fault.sizes import scaled
from tests.virtual_clock import run_virtually

REPLY_S, JOB_S = 0.2, 5.0
FAST_S, SLOW_S = 1.0, 20.0
"""How long a tool takes; one example in eight has a slow one."""
TURNS, GROUPS_PER_EPOCH = 3, 16
EPISODE_S = TURNS * REPLY_S + (TURNS - 1) * SLOW_S
"""The slowest episode of an epoch: 40.6 s."""


class SlowServer(ScriptedPolicy):
    """Replies take time, and weights change only while none is in flight."""

    def __init__(self):
        super().__init__(lambda request: str(request.sampling.seed % 1_000_003))
        self.num_in_flight, self.changed = 0, asyncio.Condition()
        self.is_open = True

    async def sample(self, request):
        async with self.changed:
            await self.changed.wait_for(lambda: self.is_open)
            self.num_in_flight += 1
        await asyncio.sleep(REPLY_S)
        reply = await super().sample(request)
        self.requests.clear()
        async with self.changed:
            self.num_in_flight -= 1
            self.changed.notify_all()
        return reply

    async def publish(self, version):
        async with self.changed:
            self.is_open = False
            await self.changed.wait_for(lambda: not self.num_in_flight)
            await super().publish(version)
            self.is_open = True
            self.changed.notify_all()


class SlowTrainer(RecordingAdapter):
    """Jobs take time; `ages` are those of the trained tokens, in versions, and `groups` those that were trained."""

    serves_during_jobs = True

    def __init__(self, policy):
        super().__init__(policy)
        self.ages, self.groups, self.busy_s = set(), [], 0.0

    async def submit(self, trajectories):
        ref = await super().submit(trajectories)
        [job] = self.jobs
        for group in job.groups:
            self.groups.append((job.epoch, group.group_id))
            turns = [turn for each in group.trajectories for turn in each.turns]
            self.ages |= {self.server.version - turn.tokens.policy_version for turn in turns}
        self.jobs.clear()
        return ref

    async def wait_until_complete(self, ref, poll_interval=10.0):
        await asyncio.sleep(JOB_S)
        self.busy_s += JOB_S
        return await self.status(ref)


class QuietTrainer(EpochTrainer):
    """Writes no files."""

    def log_progress(self, epoch, metrics, output_dir=None):
        pass


async def use_tools(item, llm, context):
    wait_s = SLOW_S if int(item.id) % 8 == 0 else FAST_S
    messages = [{"role": "user", "content": item.input_obj}]
    for turn in range(TURNS):
        if turn:
            await asyncio.sleep(wait_s)
        reply = await llm.chat.completions.create(messages=messages)
        text = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
    return text


@dataclass
class Simulation:
    """What a simulated run did.

    Attributes:
        adapter: Saw every job.
        rows: Its metrics.
        seconds: How long it took by its own clock.
    """

    adapter: SlowTrainer
    rows: list = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_stale(self):
        return sum(row.job["num_groups_stale"] for row in self.rows)


async def collect_and_train(max_staleness, num_epochs):
    policy = SlowServer()
    limits = LimitsConfig(max_staleness=max_staleness, episode_timeout_s=1000)
    config = FinetuneConfig(reward_function={"name": "reward"}, num_epochs=num_epochs, limits=limits)
    runner = EpisodeRunner(
        bind_workflow(use_tools),
        {"agent": PolicyModel(policy)},
        sampling=SamplingConfig(),
        limits=limits,
        outcomes=OutcomesConfig(retries=0),
        run_seed=0,
        max_concurrency=1000,
    )
    settings = GroupTrajectoryBuilderConfig(num_generations=2, examples_per_epoch=GROUPS_PER_EPOCH)
    builder = GroupTrajectoryBuilder(settings, ["agent"])
    score = Scored(lambda item: float(item.output_obj))
    splits = {"train": examples(4 * GROUPS_PER_EPOCH)}
    builder.evaluation = DatasetEvaluation(
        runner, splits, {"reward": score}, reward_metric="reward", outcomes=OutcomesConfig()
    )
    trainer, adapter = QuietTrainer(EpochTrainerConfig()), SlowTrainer(policy)
    await trainer.bind_components(builder, adapter)
    await trainer.initialize(config)
    await trainer.run(num_epochs)
    return Simulation(adapter, trainer._reward_history)


def simulate(max_staleness, num_groups):
    simulation, seconds = run_virtually(collect_and_train(max_staleness, num_groups // GROUPS_PER_EPOCH))
    simulation.seconds = seconds
    return simulation


def check(max_staleness, num_groups):
    run = simulate(max_staleness, num_groups)
    num_epochs = num_groups // GROUPS_PER_EPOCH
    assert run.num_stale == 0, "no sample was made in vain"
    assert run.adapter.ages <= {*range(max_staleness + 1)}, "a trained token is too old"
    assert max(run.adapter.ages) == max_staleness, "and the bound is used"
    assert len(run.adapter.groups) == len(set(run.adapter.groups)) == num_groups, "each group is trained once"
    # an epoch's slowest agent and its job, `max_staleness` + 1 of which run at a time, or else the learner's time
    expected_s = max(JOB_S, (EPISODE_S + JOB_S) / (max_staleness + 1))
    assert run.seconds <= 1.1 * num_epochs * expected_s + EPISODE_S, "sampling or training starves"
    return run


@pytest.mark.parametrize(
    ("max_staleness", "num_groups"),
    [
        (1, 160),
        pytest.param(2, 480, marks=pytest.mark.slow),
        pytest.param(1, scaled(9_600), marks=pytest.mark.fault),
    ],
    ids=["1", "2", "many groups"],
)
def test_no_trained_token_is_too_old_and_nothing_starves(max_staleness, num_groups):
    check(max_staleness, num_groups)


@pytest.mark.parametrize(("version", "is_stale"), [(-1, False), (2, True), (3, False), (4, False)])
def test_a_version_at_the_bound_is_not_too_old(version, is_stale):
    tokens = TokenLogprobs((1,), (2,), (-0.5,), version)
    turn = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="a", logprobs=tokens)
    group = TrajectoryGroup(group_id="g", trajectories=[Trajectory(episode=[turn], reward=1.0)])
    assert epoch_collection.is_stale(group, 3) is is_stale


@pytest.mark.slow
def test_the_learner_is_always_busy_if_the_bound_allows_it():
    """With 9 epochs in flight the slowest agents take no longer than the jobs of the epochs before theirs."""
    run = check(8, 800)
    assert run.adapter.busy_s >= 0.8 * run.seconds


def test_without_overlap_each_epoch_waits_for_its_slowest_agent():
    """What the bound of 0 means: exactly the sum, every epoch."""
    config = LimitsConfig()
    assert config.max_staleness == 0
    run = simulate(0, 160)
    assert run.adapter.ages == {0}
    assert run.seconds >= 10 * (EPISODE_S + JOB_S) - SLOW_S * TURNS


def begin_too_early(epoch, max_staleness):
    return epoch + max_staleness + 2


@pytest.mark.fault
def test_collections_that_begin_too_early_make_a_difference(monkeypatch):
    """Mutation check: their groups are dropped before they are trained, so they were sampled in vain."""
    monkeypatch.setattr(epoch_collection, "find_last_due", begin_too_early)
    with pytest.raises(AssertionError, match="no sample was made in vain"):
        check(1, 320)


@pytest.mark.slow
def test_without_either_safety_old_tokens_are_trained(monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(epoch_collection, "find_last_due", begin_too_early)
    monkeypatch.setattr(epoch_collection, "is_stale", lambda group, oldest: False)
    with pytest.raises(AssertionError, match="a trained token is too old"):
        check(1, 320)
