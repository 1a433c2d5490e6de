"""A non-finite number, wherever it comes from, changes no weight; the run names the episodes and stops."""

import hashlib
import json
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO
from reinforge.config.finetuning_blocks import LimitsConfig
from reinforge.config.policy import BatchConfig, PolicyConfig, ScheduleConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine import Engine, LossOutput, register_loss
from reinforge.errors import EngineError, TrajectoryError
from reinforge.types.sample import LossSpec
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from tests.fault import mutations
from tests.samples import random_samples, request

POISON = 7
"""The token of samples whose loss, gradient or features are broken."""
CASES = [(math.nan, 0), (math.inf, 3), (-math.inf, 6)]
"""A value, and its micro-batch in a step: the first, one in the middle, the last; each holds one sample here."""
KL = LossSpec("clipped_pg", {"kl_coef": 0.1})


@register_loss("test_broken_loss")
def broken_loss(batch, logprobs_BT, *, value):
    return LossOutput(torch.where(batch.token_ids == POISON, value, -logprobs_BT))


@register_loss("test_broken_gradient")
def broken_gradient(batch, logprobs_BT, *, value):
    if (batch.token_ids == POISON).any():
        logprobs_BT.register_hook(lambda gradient: torch.full_like(gradient, value))
    return LossOutput(-logprobs_BT)


def set_at_its_end(field):
    def poison(engine, sample, value):
        getattr(sample, field)[-1] = value

    return poison


def set_a_token(engine, sample, value):
    sample.token_ids[-1] = POISON


def set_an_embedding(engine, sample, value):
    sample.token_ids[1] = POISON
    with torch.no_grad():
        engine.model.module.get_input_embeddings().weight[POISON] = value


STAGES = {
    "advantages": (set_at_its_end("advantages"), lambda value: KL),
    "sampling log-probs": (set_at_its_end("sampling_logprobs"), lambda value: KL),
    "old log-probs": (set_at_its_end("old_logprobs"), lambda value: KL),
    "reference": (set_at_its_end("ref_logprobs"), lambda value: KL),
    "values": (set_at_its_end("values"), lambda value: LossSpec("ppo", {"value_clip": 0.2})),
    "returns": (set_at_its_end("returns"), lambda value: LossSpec("ppo")),
    "log-probs": (set_an_embedding, lambda value: KL),
    "loss": (set_a_token, lambda value: LossSpec("test_broken_loss", {"value": value})),
    "gradient": (set_a_token, lambda value: LossSpec("test_broken_gradient", {"value": value})),
    "norm of finite gradients": (set_a_token, lambda value: LossSpec("test_broken_gradient", {"value": 1e36})),
}


def load(folder):
    config = PolicyConfig(
        model=str(folder),
        batch=BatchConfig(steps_per_job=1, micro_batch_tokens=1),
        schedule=ScheduleConfig(warmup_steps=0),
    )
    engine = Engine.load(config, seed=0, device="cpu", critic=True, deterministic=True)
    job(engine, samples_of(1), KL)  # so that there is optimizer state
    return engine


def samples_of(seed, stage=""):
    """Returns seven samples of different lengths, with everything that a loss may read."""
    rng = np.random.default_rng(seed)
    samples = sorted(random_samples(40, seed), key=len)[::6][:7]
    assert len({len(sample) for sample in samples}) == 7
    for sample in samples:
        sample.token_ids[sample.token_ids == POISON] += 1
        for field in ("ref_logprobs", "values", "returns", "old_logprobs"):
            if field != "old_logprobs" or stage != "sampling log-probs":
                setattr(sample, field, rng.normal(-5, 0.1, len(sample)).astype(np.float32))
    return samples


def job(engine, samples, loss):
    engine.begin_job()
    report = engine.update(samples, loss, progress_start=0.5, progress_end=0.5)
    engine.end_job()
    return report


def digest(engine):
    """Returns a hash over the bits of weights, critic, optimizer state and the number of steps."""
    sha = hashlib.sha256(f"{engine.fingerprint()} {engine.learner.num_steps}".encode())
    for tensor in [*engine.critic.parameters(), *engine.learner.state().values()]:
        sha.update(tensor.detach().numpy().tobytes())
    return sha.hexdigest()


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    with load(tiny_model_dir) as engine:
        yield engine


@contextmanager
def kept_embeddings(engine):
    weight = engine.model.module.get_input_embeddings().weight
    before = weight.detach().clone()
    yield engine
    with torch.no_grad():
        weight.copy_(before)


@pytest.fixture
def intact(engine):
    with kept_embeddings(engine):
        yield engine


def refused(engine, stage, value, place):
    """Makes a step with one broken number; returns the report, and whether any bit changed."""
    samples, (poison, loss) = samples_of(0, stage), STAGES[stage]
    poison(engine, samples[place], value)
    before = digest(engine)
    report = job(engine, samples, loss(value))
    return report, digest(engine) == before


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_with_a_non_finite_number_changes_no_bit(intact, stage):
    for value, place in CASES:
        with kept_embeddings(intact):
            report, unmoved = refused(intact, stage, value, place)
            assert unmoved, value
            assert (report.num_updates, report.num_skipped_steps, report.skipped_steps) == (0, 1, [0])
            assert report.skipped_samples == list(range(7))


@pytest.mark.slow
def test_skipped_steps_leave_nothing_behind(tiny_model_dir):
    """The next step equals that of an engine without the broken ones."""
    with load(tiny_model_dir) as engine, load(tiny_model_dir) as other:
        for stage in STAGES:
            with kept_embeddings(engine):
                refused(engine, stage, math.nan, 3)
        for each in (engine, other):
            assert job(each, samples_of(2), KL).num_updates == 1
        assert digest(engine) == digest(other)


@pytest.mark.slow
def test_non_finite_optimizer_state_ends_the_job_and_changes_no_weight(tiny_model_dir):
    with load(tiny_model_dir) as engine:
        name = next(name for name in engine.learner.state() if name.startswith("exp_avg."))
        for value, _ in CASES:
            engine.learner.state()[name].view(-1)[5] = value
            before = digest(engine)
            with pytest.raises(EngineError, match="after the job . of .* tensors are not finite"):
                job(engine, samples_of(0), KL)
            engine.rollback()
            assert digest(engine) == before


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones_like(tensor, dtype=torch.bool))
    monkeypatch.setattr("reinforge.engine.training.learner.are_finite", lambda samples: True)


def test_optimizer_state_that_is_not_checked_makes_a_difference(tiny_model_dir, unchecked):
    """Mutation check."""
    with load(tiny_model_dir) as engine:
        name = next(name for name in engine.learner.state() if name.startswith("exp_avg."))
        engine.learner.state()[name].view(-1)[5] = math.nan
        before = digest(engine)
        assert job(engine, samples_of(0), KL).num_updates == 1
        assert digest(engine) != before


def test_steps_that_are_not_skipped_make_a_difference(intact, unchecked):
    """Mutation check."""
    moved = {stage: not refused(intact, stage, math.nan, 3)[1] for stage in ("advantages", "loss", "gradient")}
    intact.rollback()
    assert all(moved.values()), moved


class BrokenCredit(GRPO):
    broken = frozenset()

    def credit(self, samples):
        found = super().credit(samples)
        for sample, advantages in zip(samples, found, strict=True):
            if sample.group_id in self.broken:
                advantages[sample.loss_mask] = math.nan
        return found


class Job:
    def __init__(self, folder, **limits):
        self.adapter = LocalAdapter(LocalAdapterConfig(), BrokenCredit())
        policy = PolicyConfig(model=str(folder), schedule=ScheduleConfig(warmup_steps=0))
        self.config = FinetuneConfig(policy=policy, num_epochs=4, device="cpu", limits=LimitsConfig(**limits))
        self.num_jobs = 0

    async def train(self, num_groups, broken, batch_size=2):
        """Returns the status of a job on groups of two siblings; the credit of the `broken` ones is NaN."""
        if self.adapter.engine is None:
            await self.adapter.initialize(self.config)
        self.adapter.engine.config.batch.batch_size = batch_size
        self.adapter.algorithm.broken = set(map(str, broken))
        policy, groups = self.adapter.policy(), []
        for number in range(num_groups):
            siblings = []
            for index in range(2):
                reply = await policy.sample(request(f"say {number}", max_tokens=3, seed=100 * self.num_jobs + index))
                item = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=reply.tokens)
                name = f"collect/{self.num_jobs}/{number}/{index}"
                siblings.append(Trajectory(episode=[item], reward=float(index), episode_id=name, group_id=str(number)))
            groups.append(siblings)
        key = f"r/{self.num_jobs}"
        self.num_jobs += 1
        ref = await self.adapter.submit(TrajectoryCollection(trajectories=groups, run_id="r", epoch=0, job_key=key))
        return await self.adapter.wait_until_complete(ref)


@pytest.fixture
async def make_job(tiny_model_dir):
    made = []

    def make(**limits):
        made.append(Job(tiny_model_dir, **limits))
        return made[-1]

    yield make
    for each in made:
        await each.adapter.cleanup()


async def test_non_finite_credit_costs_its_step_and_names_the_episodes(make_job):
    """Twelve samples in steps of two, shuffled: the steps with a sample of group 4 are skipped."""
    status = await make_job().train(6, {4})
    told = status.metadata
    assert (status.status, told["num_updates"] + told["num_skipped_steps"]) == ("completed", 6)
    assert 1 <= told["num_skipped_steps"] <= 2
    assert {"collect/0/4/0", "collect/0/4/1"} <= set(told["skipped_episodes"])
    assert len(told["skipped_episodes"]) == 2 * told["num_skipped_steps"]
    assert math.isfinite(told["direction"])


async def test_a_job_without_a_step_is_rolled_back_and_names_the_episodes(make_job):
    it = make_job()
    await it.train(2, set())
    before = it.adapter.engine.fingerprint()
    status = await it.train(2, {0, 1}, batch_size=4)
    assert status.status == "failed"
    assert "no optimizer step was made: 1 were skipped" in status.message
    assert "collect/1/0/0, collect/1/0/1" in status.message
    assert status.metadata["skipped_episodes"] == [f"collect/1/{g}/{i}" for g in (0, 1) for i in (0, 1)]
    assert it.adapter.engine.fingerprint() == before


@pytest.mark.slow
async def test_too_many_skipped_steps_in_a_row_end_the_run(make_job):
    """With batches of one sample, either two or all eight of the 8 steps are skipped in a row."""
    few, many = make_job(max_skipped_steps=8), make_job(max_skipped_steps=2)
    assert (await few.train(4, {0, 1, 2}, batch_size=1)).status == "completed"
    status = await many.train(4, {0, 1, 2}, batch_size=1)
    assert status.status == "failed"
    assert "optimizer steps in a row were skipped (finetuning.limits.max_skipped_steps: 2)" in status.message
    assert status.metadata["num_skipped_steps"] == 6


@pytest.mark.parametrize(("value", "shaped"), [(math.nan, False), (math.inf, True), (-math.inf, False)])
def test_a_non_finite_reward_is_refused_and_names_its_episode(value, shaped):
    rewards = {"reward": 1.0, "shaped_rewards": [value]} if shaped else {"reward": value}
    whole = Trajectory(episode=[], reward=0.0, episode_id="collect/0/a/0")
    broken = Trajectory(episode=[], episode_id="collect/0/a/1", **rewards)
    collection = TrajectoryCollection(trajectories=[[whole], [whole, broken]], run_id="r")
    place = r"trajectories\[1\]\[1\] \(episode collect/0/a/1\)"
    with pytest.raises(TrajectoryError, match=f"{place} has the reward {value}"):
        assert collection.groups


def poisoned(toy, count):
    toy.set("finetuning.algorithm", {"_type": "poisoned", "count": count})
    return toy.set("finetuning.policy.batch.steps_per_job", 4)


def jobs(toy):
    rows = toy.rows_of("SELECT epoch, status, data FROM jobs ORDER BY epoch")
    return [(epoch, status, json.loads(data)) for epoch, status, data in rows]


@pytest.mark.slow
def test_a_run_stops_if_no_step_can_be_made(toy):
    """The second job does not take effect, and the run says why and names the episodes."""
    child = poisoned(toy, 99).start()
    assert child.wait() == 3, child.said
    assert [(epoch, status) for epoch, status, _ in jobs(toy)] == [(0, "completed"), (1, "failed")]
    told = jobs(toy)[1][2]["metadata"]
    assert told["num_skipped_steps"] == 4
    assert len(told["skipped_episodes"]) > 4
    assert set(told["skipped_episodes"]) <= {key for (key,) in toy.rows_of("SELECT key FROM episodes")}
    assert "no optimizer step was made: 4 were skipped" in toy.summary["reason"]
    assert "the advantages or the log-probs of a sample are not finite" in (toy.run / "run.log").read_text()
    assert [row["version"] for row in toy.summary["policy_versions"]] == [0, 1]
    newest = sorted((toy.run / "checkpoints").glob("step-*"))[-1]
    assert newest.name == "step-000001"


@pytest.mark.slow
def test_a_run_continues_after_one_skipped_step_and_records_it(toy):
    child = poisoned(toy, 1).start()
    assert child.wait() == 0, child.said
    rows = [json.loads(line) for line in (toy.run / "training_metrics.jsonl").read_text().splitlines()]
    assert [row["num_skipped_steps"] for row in rows] == [0, 1, 0, 0]
    assert "1 optimizer steps skipped (non-finite numbers)" in child.said
    known = {key for (key,) in toy.rows_of("SELECT key FROM episodes WHERE epoch = 1 AND phase = 'collect'")}
    assert 0 < len(rows[1]["skipped_episodes"]) <= 6
    assert set(rows[1]["skipped_episodes"]) <= known
    assert jobs(toy)[1][2]["metadata"]["skipped_episodes"] == rows[1]["skipped_episodes"]


@pytest.mark.slow
def test_a_run_whose_builder_returns_nan_stops_before_the_job(toy):
    toy.settings["trajectory_builders"]["builder"]["_type"] = "unknown_reward"
    child = toy.start()
    assert child.wait() == 2, child.said
    assert "(episode collect/1/" in child.said
    assert "return None from compute_reward" in child.said
    assert [(epoch, status) for epoch, status, _ in jobs(toy)] == [(0, "completed")]


@pytest.mark.fault
def test_a_reward_that_is_not_checked_makes_a_difference(toy):
    """Mutation check."""
    toy.settings["trajectory_builders"]["builder"]["_type"] = "unknown_reward"
    child = toy.start(mutation=mutations.believe_every_reward)
    assert child.wait() == 1, child.said
    assert "expected one or more finite scores" in child.said
    assert "return None from compute_reward" not in child.said


@pytest.mark.fault
def test_a_run_that_trains_on_non_finite_numbers_makes_a_difference(toy):
    """Mutation check."""
    child = poisoned(toy, 99).start(mutation=mutations.train_on_what_is_not_finite)
    assert child.wait() == 3, child.said
    assert "error: the model's logits are not finite" in child.said, "the weights are NaN"
    assert "no optimizer step was made" not in child.said
