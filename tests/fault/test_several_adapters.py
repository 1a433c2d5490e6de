"""A job of several adapters takes effect as a whole or not at all: if one fails, none has changed."""

import math

import pytest
import torch

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.training.job import EngineJob
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from tests.samples import request

NAMES, KL = ("a", "b"), GRPOConfig(kl_coef=0.01)


class Poisoned(GRPO):
    poisoned = idle = ""

    def credit(self, samples):
        found = super().credit(samples)
        for sample, advantages in zip(samples, found, strict=True):
            name = sample.group_id.partition("/")[2]
            if name in (self.poisoned, self.idle):
                advantages[sample.loss_mask] = math.nan if name == self.poisoned else 0.0
        return found


class Jobs:
    def __init__(self, folder):
        self.adapter, self.number = LocalAdapter(LocalAdapterConfig(), Poisoned(KL), adapters=NAMES), 0
        policy = {"model": str(folder), "lora": {"r": 4}, "optimizer": {"learning_rate": 0.01}}
        self.config = FinetuneConfig.model_validate({"policy": policy, "num_epochs": 4, "device": "cpu"})

    async def train(self, names=NAMES):
        policy, groups = self.adapter.policy(), []
        for name in names:
            siblings = []
            for index in range(4):
                asked = request(f"say {self.number}", max_tokens=3, seed=100 * self.number + index)
                reply = await policy.get_policy(name).sample(asked)
                item = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=reply.tokens)
                known = {"group_id": f"0/{name}", "model_group": name, "episode_id": f"e/{index}"}
                siblings.append(Trajectory(episode=[item], reward=float(index), **known))
            groups.append(siblings)
        self.number += 1
        collection = TrajectoryCollection(trajectories=groups, run_id="r", epoch=0, job_key=f"r/{self.number}")
        return await self.adapter.wait_until_complete(await self.adapter.submit(collection))

    def bits(self):
        """Returns all weights and the optimizers' state."""
        engine = self.adapter.engine
        kept = {name: p.detach().clone() for name, p in engine.model.module.named_parameters()}
        for name, learner in engine._learners.items():
            kept |= {f"{name}/{key}": value.clone() for key, value in learner.state().items()}
        return kept

    def differing(self, before):
        after = self.bits()
        return sorted(name for name in after if name not in before or not torch.equal(after[name], before[name]))


@pytest.fixture
async def jobs(tiny_model_dir):
    made = Jobs(tiny_model_dir)
    await made.adapter.initialize(made.config)
    yield made
    await made.adapter.cleanup()


@pytest.mark.parametrize("poisoned", NAMES)
async def test_if_one_fails_all_are_rolled_back(jobs, poisoned):
    """Whether a is trained before b fails, or b is not reached; both optimizers have the state of an earlier job."""
    await jobs.train()
    await jobs.adapter.policy().publish(1)
    before = jobs.bits()
    jobs.adapter.algorithm.poisoned = poisoned
    status = await jobs.train()
    assert (status.status, status.num_updates) == ("failed", 0)
    assert f"{poisoned}: no optimizer step was made: 1 were skipped" in status.message
    assert jobs.differing(before) == []
    jobs.adapter.algorithm.poisoned = ""
    assert (await jobs.train()).status == "completed", "and both sample and train again"


@pytest.mark.slow
async def test_rolling_back_only_the_last_makes_a_difference(jobs, monkeypatch):
    """Mutation check of the previous test."""
    monkeypatch.setattr(EngineJob, "restore", lambda job: list(job._snapshots.values())[-1].restore())
    before = jobs.bits()
    jobs.adapter.algorithm.poisoned = "b"
    assert (await jobs.train()).status == "failed"
    assert {name.split(".")[-2] for name in jobs.differing(before) if "/" not in name} == {"a"}


@pytest.mark.slow
async def test_an_adapter_without_signal_is_unchanged_and_the_job_says_why(jobs):
    before = jobs.bits()
    jobs.adapter.algorithm.idle = "a"
    status = await jobs.train()
    assert status.status == "completed", status.message
    assert not [name for name in jobs.differing(before) if ".a." in name or name.startswith("a/")]
    told = status.metadata["groups"]
    assert told["a"] == {"num_updates": 0, "reason": "nothing to learn: all advantages are zero"}
    assert told["b"]["num_updates"] == status.num_updates == 1
    await jobs.adapter.policy().publish(1)
    failed = await jobs.train(names=("a",))
    assert (failed.status, failed.message) == ("failed", "nothing to learn: all advantages are zero")


@pytest.mark.slow
async def test_the_reference_policy_of_each_is_the_base(jobs):
    """`kl_ref` belongs to the weights before a job's only step: 0 for an adapter that still equals the base."""
    jobs.adapter.algorithm.idle = "b"
    found = []
    for version in (1, 2):
        found.append((await jobs.train()).metadata["groups"])
        await jobs.adapter.policy().publish(version)
        jobs.adapter.algorithm.idle = ""
    assert (abs(found[0]["a"]["kl_ref"]) < 1e-9, abs(found[1]["b"]["kl_ref"]) < 1e-9) == (True, True), found
    assert found[1]["a"]["kl_ref"] > 1e-6


@pytest.mark.slow
async def test_a_checkpoint_of_both_is_restored_as_a_whole_or_not_at_all(jobs, tmp_path):
    await jobs.train()
    adapter, before = jobs.adapter, jobs.bits()
    prints = await adapter.policy().fingerprint()
    assert await adapter.save(tmp_path / "kept", 1)
    await adapter.policy().publish(1)
    await jobs.train()
    await adapter.policy().publish(2)
    assert await adapter.policy().fingerprint() != prints
    assert await adapter.restore(tmp_path / "kept", 1)
    assert (await adapter.policy().fingerprint(), jobs.differing(before)) == (prints, [])
    assert adapter.policy().version == 1
    (tmp_path / "kept" / "b" / "adapter_model.safetensors").unlink()
    await jobs.train()
    await adapter.policy().publish(2)
    later = jobs.bits()
    with pytest.raises(Exception, match="cannot read the adapters"):
        await adapter.restore(tmp_path / "kept", 1)
    assert (jobs.differing(later), adapter.policy().version) == ([], 2)
