"""Small jobs: groups that a policy samples, and their training."""

import asyncio

import torch
from safetensors.torch import load_file

from reinforge.config.schema import FinetuneConfig
from reinforge.rollout.episode import build_episode_item
from reinforge.types.request import ModelRequest, SamplingParams
from reinforge.types.trajectory import Trajectory, TrajectoryCollection


def build_run_config(model, in_flight=None, **policy):
    settings = {
        "model": str(model),
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"warmup_steps": 0},
        "batch": {"steps_per_job": 2},
        **policy,
    }
    limits = {"max_staleness": 1, "in_flight": in_flight} if in_flight else {}
    return FinetuneConfig(device="cpu", policy=settings, limits=limits)


def prompt(number, job=0):
    return [{"role": "user", "content": "what is " + "the quick " * number + str(job)}]


async def sample_group(policy, number, job=0, temperature=1.0):
    """Four siblings with rewards 0, 1, 2, 0."""
    requests = [
        ModelRequest(
            prompt(number, job),
            SamplingParams(max_tokens=12, seed=1000 * job + 10 * number + i, temperature=temperature),
        )
        for i in range(4)
    ]
    replies = await asyncio.gather(*map(policy.sample, requests))
    asked = build_episode_item(prompt(number, job)[0])
    return [
        Trajectory(episode=[asked, build_episode_item(reply.message, logprobs=reply.tokens)], reward=float(i % 3))
        for i, reply in enumerate(replies)
    ]


def collect(groups, job):
    return TrajectoryCollection(trajectories=groups, run_id="r", job_key=f"job {job}", epoch=job)


async def train(adapter, groups, job):
    status = await adapter.wait_until_complete(await adapter.submit(collect(groups, job)))
    assert status.status == "completed", status.message
    await adapter.policy().publish(job + 1)
    return status


def measure_distance(a, b):
    """Returns the largest difference between two sets of weights."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).detach().abs().max()) for name in a)


def load_moments(folder):
    """Returns the state of the optimizer in a checkpoint, whose rows may stand in several files."""
    parts = [load_file(file) for file in sorted((folder / "training").glob("optimizer*.safetensors"))]
    return {
        name: torch.cat([part[name] for part in parts]) if name in parts[-1] and tensor.ndim else tensor
        for name, tensor in parts[0].items()
    }
