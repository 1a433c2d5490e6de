"""Ray workers that divide the model, that use the project's own losses, and that lose a machine without a word."""

import asyncio
import os
import signal
import sys
import textwrap

import psutil
import pytest
from safetensors.torch import load_file

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.algorithms.kto import KTO, KTOConfig
from reinforge.algorithms.ppo import PPO, PPOConfig
from reinforge.algorithms.sft import SFT
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.packages import is_installed
from reinforge.errors import BackendUnavailable
from reinforge.rollout.episode import build_episode_item
from reinforge.scale.ray.adapter import RayAdapter, RayAdapterConfig
from reinforge.scale.ray.cluster import RayConnection
from reinforge.types.request import ModelRequest, SamplingParams
from reinforge.types.sample import LossSpec
from reinforge.types.trajectory import Trajectory, TrajectoryCollection

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`"),
]
ALGORITHMS = {
    "grpo": lambda: GRPO(GRPOConfig()),
    "sft": SFT,
    "dpo": lambda: DPO(DPOConfig()),
    "ppo": lambda: PPO(PPOConfig()),
    "kto": lambda: KTO(KTOConfig(threshold=0.5)),
}


@pytest.fixture(scope="module")
def cluster():
    connection = RayConnection(None, 4, {"CPU": 1.0})
    yield
    connection.close()


def run_config(model, **policy):
    optimizer = {"learning_rate": 0.003, "eps": 1e-4}  # a smaller eps makes whole steps of rounding errors
    settings = {"model": str(model), "optimizer": optimizer, "schedule": {"warmup_steps": 0}, **policy}
    config = FinetuneConfig(device="cpu", policy=settings)
    config.policy.batch.steps_per_job = 2
    return config


def prompt(number):
    return [{"role": "user", "content": "what is " + "the quick " * number}]


async def sample_group(policy, number, job=0):
    """Four siblings with rewards 0, 1, 2, 0."""
    requests = [
        ModelRequest(prompt(number), SamplingParams(max_tokens=12, seed=1000 * job + 10 * number + i)) for i in range(4)
    ]
    replies = await asyncio.gather(*map(policy.sample, requests))
    asked = build_episode_item(prompt(number)[0])
    return [
        Trajectory(episode=[asked, build_episode_item(reply.message, logprobs=reply.tokens)], reward=float(i % 3))
        for i, reply in enumerate(replies)
    ]


async def train(adapter, groups, job=0):
    collection = TrajectoryCollection(trajectories=groups, run_id="r", job_key=f"job {job}", epoch=job)
    status = await adapter.wait_until_complete(await adapter.submit(collection))
    assert status.status == "completed", status.message
    await adapter.policy().publish(job + 1)
    return status


async def save(adapter, folder, version):
    folder.mkdir(parents=True)
    await adapter.save(folder, version)
    weights = load_file(next(folder.glob("*model.safetensors")))
    return weights, load_file(folder / "training" / "optimizer.safetensors")


def measure_distance(a, b):
    assert a.keys() == b.keys()
    assert {name: each.shape for name, each in a.items()} == {name: each.shape for name, each in b.items()}
    return max(float((a[name] - b[name]).abs().max()) for name in a)


async def train_alone(algorithm, config, folder, jobs=3):
    """Returns the groups of each job, and the checkpoint of one process."""
    local = LocalAdapter(LocalAdapterConfig(), algorithm)
    await local.initialize(config)
    groups = []
    for job in range(jobs):
        groups.append([await sample_group(local.policy(), number, job) for number in range(5)])
        await train(local, groups[job], job)
    saved = await save(local, folder, jobs)
    await local.cleanup()
    return groups, saved


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("name", ALGORITHMS)
async def test_workers_that_divide_the_model_make_the_steps_of_one_process(
    cluster, tiny_model_dir, tmp_path, name, lora
):
    config = run_config(tiny_model_dir, **({"lora": lora} if lora else {}))
    jobs, (weights, moments) = await train_alone(ALGORITHMS[name](), config, tmp_path / "alone")
    adapter = RayAdapter(RayAdapterConfig(num_workers=2, sharding="full"), ALGORITHMS[name]())
    await adapter.initialize(config)
    try:
        assert adapter.engine.members.sharding == "full"
        for job, groups in enumerate(jobs):
            again = await sample_group(adapter.policy(), 1, job)
            assert {each.episode[1].logprobs.policy_version for each in again} == {job}
            assert [each.episode[1].logprobs.token_ids for each in again] == [
                each.episode[1].logprobs.token_ids for each in groups[1]
            ], "the gathered weights sample the same tokens"
            await train(adapter, groups, job)
        found, found_moments = await save(adapter, tmp_path / "step-000003", 3)
        fingerprint = await adapter.policy().fingerprint()
        assert measure_distance(weights, found) < 1e-5
        assert measure_distance(moments, found_moments) < 1e-5
        if name != "ppo":
            await train(adapter, jobs[0], 3)
            await adapter.restore(tmp_path / "step-000003", 3)
            assert await adapter.policy().fingerprint() == fingerprint
    finally:
        await adapter.cleanup()


LOSS = """
from reinforge.engine import LossOutput, register_loss

from own_scale import SCALE

@register_loss("own_pg")
def own_pg(batch, logprobs_BT, *, factor=1.0):
    return LossOutput(-SCALE * factor * batch.advantages * logprobs_BT)
"""


class OwnLoss(GRPO):
    loss = LossSpec("own_pg", {"factor": 1.0})


async def test_a_loss_that_only_the_driver_has_imported_trains_in_the_workers(
    cluster, tiny_model_dir, tmp_path, monkeypatch
):
    (tmp_path / "own_losses.py").write_text(textwrap.dedent(LOSS))
    (tmp_path / "own_scale.py").write_text("SCALE = 0.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_losses  # noqa: F401  which registers it

    config = run_config(tiny_model_dir)
    jobs, (weights, _) = await train_alone(OwnLoss(GRPOConfig()), config, tmp_path / "alone", jobs=1)
    adapter = RayAdapter(RayAdapterConfig(num_workers=2, sharding="replicate"), OwnLoss(GRPOConfig()))
    await adapter.initialize(config)
    try:
        assert adapter.engine.members.sharding == "replicate"
        await train(adapter, jobs[0])
        found, _ = await save(adapter, tmp_path / "found", 1)
    finally:
        await adapter.cleanup()
        sys.modules.pop("own_losses")
    assert measure_distance(weights, found) < 1e-5


async def test_a_machine_that_vanishes_holds_a_step_only_as_long_as_is_set(
    cluster, tiny_model_dir, tmp_path, monkeypatch
):
    """A stopped process keeps its connections, as a machine without power does."""
    monkeypatch.setattr("reinforge.scale.ray.members.GRACE_S", 3.0)
    config = run_config(tiny_model_dir)
    jobs, (weights, _) = await train_alone(GRPO(GRPOConfig()), config, tmp_path / "alone", jobs=1)
    settings = RayAdapterConfig(num_workers=3, min_workers=2, sharding="replicate", peer_timeout_s=4)
    adapter = RayAdapter(settings, GRPO(GRPOConfig()))
    await adapter.initialize(config)
    frozen = adapter.engine.workers[1]
    update = adapter.engine.update

    def freeze_and_update(*arguments, **settings):
        adapter.engine.update = update
        os.kill(frozen.pid, signal.SIGSTOP)
        return update(*arguments, **settings)

    adapter.engine.update = freeze_and_update
    try:
        await asyncio.wait_for(train(adapter, jobs[0]), 100)
        assert frozen.number not in {each.number for each in adapter.engine.workers}
        found, _ = await save(adapter, tmp_path / "found", 1)
    finally:
        await adapter.cleanup()
        os.kill(frozen.pid, signal.SIGKILL)  # Ray asks it to end, which it does not hear
    assert measure_distance(weights, found) < 1e-5


async def test_with_a_part_of_a_divided_model_lost_the_run_stops_as_something_to_resume(cluster, tiny_model_dir):
    adapter = RayAdapter(RayAdapterConfig(num_workers=2, sharding="full"), GRPO(GRPOConfig()))
    await adapter.initialize(run_config(tiny_model_dir))
    try:
        groups = [await sample_group(adapter.policy(), number) for number in range(5)]
        victim = adapter.engine.workers[1]
        os.kill(victim.pid, signal.SIGKILL)
        psutil.Process(victim.pid).wait(10)
        ref = await adapter.submit(TrajectoryCollection(trajectories=groups, run_id="r", job_key="job", epoch=0))
        with pytest.raises(BackendUnavailable, match="the shard of one is lost; resume the run with --resume"):
            await asyncio.wait_for(adapter.wait_until_complete(ref), 60)
    finally:
        await adapter.cleanup()
