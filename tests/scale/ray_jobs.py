"""Jobs on Ray workers and in one process, to compare, and what to break in them."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import psutil
from safetensors.torch import load_file

from reinforge import crash
from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.algorithms.kto import KTO, KTOConfig
from reinforge.algorithms.ppo import PPO, PPOConfig
from reinforge.algorithms.sft import SFT
from reinforge.config.schema import FinetuneConfig
from reinforge.scale.ray.adapter import RayAdapter, RayAdapterConfig
from reinforge.types.request import ModelRequest, SamplingParams
from tests.scale.jobs import prompt, sample_group, train

ALGORITHMS = {
    "grpo": lambda: GRPO(GRPOConfig()),
    "sft": SFT,
    "dpo": lambda: DPO(DPOConfig()),
    "ppo": lambda: PPO(PPOConfig()),
    "kto": lambda: KTO(KTOConfig(threshold=0.5)),
}


def run_config(model, **policy):
    optimizer = {"learning_rate": 0.003, "eps": 1e-4}  # a smaller eps makes whole steps of rounding errors
    settings = {"model": str(model), "optimizer": optimizer, "schedule": {"warmup_steps": 0}, **policy}
    return FinetuneConfig(device="cpu", policy=settings)


def list_requests(count, max_tokens=150):
    """Returns requests that take a while, with a seed each."""
    return [ModelRequest(prompt(i), SamplingParams(max_tokens=max_tokens, seed=i)) for i in range(count)]


async def sample_job(policy, job=0):
    """Returns the groups of one job."""
    return [await sample_group(policy, number, job) for number in range(5)]


async def save(adapter, folder, version):
    folder.mkdir(parents=True)
    await adapter.save(folder, version)
    return load_file(next(folder.glob("*model.safetensors")))


async def train_here(model, folder, num_jobs, algorithm=None, **policy):
    """Returns the groups of each job, and the weights after them, of a run in this process."""
    local, jobs = LocalAdapter(LocalAdapterConfig(), algorithm or GRPO(GRPOConfig())), []
    await local.initialize(run_config(model, **policy))
    for job in range(num_jobs):
        jobs.append(await sample_job(local.policy(), job))
        await train(local, jobs[job], job)
    weights = await save(local, folder, num_jobs)
    await local.cleanup()
    return jobs, weights


@asynccontextmanager
async def ray_adapter(model, policy=None, algorithm=None, **settings):
    """Yields an adapter with two workers, or as you say."""
    adapter = RayAdapter(RayAdapterConfig(**{"num_workers": 2, **settings}), algorithm or GRPO(GRPOConfig()))
    try:
        await adapter.initialize(run_config(model, **(policy or {})))
        yield adapter
    finally:
        await adapter.cleanup()


async def assert_samples_again(policy, groups, job):
    """The newest weights are served, and the same seed gives the same tokens on any worker."""
    again = [each.episode[1].logprobs for each in await sample_group(policy, 1, job)]
    assert {tokens.policy_version for tokens in again} == {job}
    assert [tokens.token_ids for tokens in again] == [each.episode[1].logprobs.token_ids for each in groups[1]]


def numbers_of(adapter):
    return [each.number for each in adapter.engine.workers]


def kill(worker):
    """Kills a worker's process, and returns once it is gone."""
    process = psutil.Process(worker.pid)
    os.kill(worker.pid, signal.SIGKILL)
    process.wait(10)


async def notice_loss(adapter, count):
    """Lets the driver notice that workers have ended, until `count` are left."""
    while len(adapter.engine.workers) > count:
        await asyncio.gather(*(adapter.policy().sample(request) for request in list_requests(8, max_tokens=2)))


async def replace_lost(adapter, count):
    """Waits until the replacements have joined, as a job that needs `count` workers does."""
    await asyncio.to_thread(adapter.engine.members.fill_up, count)


def on_worker(worker, function, *arguments):
    """Calls `function(engine_worker, ...)` in a worker's process."""
    import ray

    return ray.get(worker.actor.__ray_call__.remote(function, *arguments))


def arm(worker, site):
    """Makes a worker kill itself at a crash point: `step.after_optim:2`."""
    on_worker(worker, _arm, site)


def _arm(_, site):
    crash.arm(site)


def change_a_weight(worker):
    """Makes a worker's weights other ones than those of its peers."""
    on_worker(worker, _change_a_weight)


def _change_a_weight(worker):
    next(iter(worker.engine.learner.parameters.values())).data.view(-1)[0] += 0.25


def forget_the_optimizer(worker):
    on_worker(worker, _forget_the_optimizer)


def _forget_the_optimizer(worker):
    worker.engine.learner.reset()


# Whole runs: each of these is called in the driver's process before its run starts.


def connect(variables, then=None):
    """Removes no safety: the driver has the cluster's token."""
    os.environ.update(variables)
    if then is not None:
        then()


def kill_a_worker_at(site):
    """Kills the last worker at a crash point of its own."""
    from reinforge.scale.ray.workers import WorkerGroup

    load = WorkerGroup.load

    def load_and_arm(*arguments, **settings):
        group = load(*arguments, **settings)
        arm(group.workers[-1], site)
        return group

    WorkerGroup.load = load_and_arm


def kill_a_worker_while_sampling():
    """Kills the last worker when the second epoch has begun to be collected."""
    from reinforge.scale.ray.workers import WorkerGroup
    from reinforge.trainer.context import RunContext

    groups, left, load, record_episode = [], [10], WorkerGroup.load, RunContext.record_episode

    def load_and_note(*arguments, **settings):
        groups.append(load(*arguments, **settings))
        return groups[0]

    def record_and_kill(context, record):
        record_episode(context, record)
        left[0] -= (record.key.phase, record.key.epoch) == ("collect", 1)
        if left[0] == 0:
            left[0] = -1
            kill(groups[0].workers[-1])

    WorkerGroup.load, RunContext.record_episode = load_and_note, record_and_kill


def kill_a_worker_while_writing():
    """Kills the worker that is about to write the second checkpoint."""
    from reinforge.scale.ray.workers import WorkerGroup

    write, left = WorkerGroup.write, [2]

    def kill_and_write(group, *arguments):
        left[0] -= 1
        if left[0] == 0:
            kill(group.workers[0])
        return write(group, *arguments)

    WorkerGroup.write = kill_and_write
