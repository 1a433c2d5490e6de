"""A real Ray cluster on this machine: the same computation as one process, workers that die, whole runs."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from safetensors.torch import load_file

from reinforge.adapters.local import LocalAdapter, LocalAdapterConfig
from reinforge.adapters.ray import RayAdapter, RayAdapterConfig
from reinforge.adapters.ray_cluster import RayConnection
from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.algorithms.ppo import PPO, PPOConfig
from reinforge.algorithms.sft import SFT
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.installed import is_installed
from reinforge.errors import BackendUnavailable
from reinforge.rollout.episode import build_episode_item
from reinforge.types.request import ModelRequest, SamplingParams
from reinforge.types.trajectory import Trajectory, TrajectoryCollection

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`"),
]
ALGORITHMS = {
    "grpo": lambda: GRPO(GRPOConfig()),
    "sft": SFT,
    "dpo": lambda: DPO(DPOConfig()),
    "ppo": lambda: PPO(PPOConfig()),
}
NUM_JOBS = 3


@pytest.fixture(scope="module")
def cluster():
    """One cluster for all tests that do not start their own."""
    connection = RayConnection(None, 8, {"CPU": 1.0})
    yield
    connection.close()


def run_config(model, **policy):
    optimizer = {"learning_rate": 0.003, "eps": 1e-4}  # a smaller eps makes whole steps of rounding errors
    settings = {"model": str(model), "optimizer": optimizer, "schedule": {"warmup_steps": 0}, **policy}
    return FinetuneConfig(device="cpu", policy=settings)


def prompt(number, job=0):
    return [{"role": "user", "content": "what is " + "the quick " * number + str(job)}]


async def sample_group(policy, number, job=0):
    """Four siblings with rewards 0, 1, 2, 0."""
    requests = [
        ModelRequest(prompt(number, job), SamplingParams(max_tokens=12, seed=1000 * job + 10 * number + i))
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


async def save(adapter, folder, version):
    folder.mkdir(parents=True)
    await adapter.save(folder, version)
    return load_file(next(folder.glob("*model.safetensors")))


def measure_distance(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.fault
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("name", ALGORITHMS)
async def test_any_number_of_workers_makes_the_same_steps(cluster, tiny_model_dir, tmp_path, name, lora):
    config = run_config(tiny_model_dir, **({"lora": lora} if lora else {}))
    config.policy.batch.steps_per_job = 2
    local = LocalAdapter(LocalAdapterConfig(), ALGORITHMS[name]())
    await local.initialize(config)
    jobs = []
    before = await save(local, tmp_path / "before", 0)
    for job in range(NUM_JOBS):
        jobs.append([await sample_group(local.policy(), number, job) for number in range(5)])
        await train(local, jobs[job], job)
    expected = await save(local, tmp_path / "one process", NUM_JOBS)
    metrics = []
    await local.cleanup()
    assert measure_distance(before, expected) > 1e-3, "there is something to compare"
    for count in (1, 2, 4):
        adapter = RayAdapter(RayAdapterConfig(num_workers=count), ALGORITHMS[name]())
        await adapter.initialize(config)
        try:
            for job, groups in enumerate(jobs):
                again = await sample_group(adapter.policy(), 1, job)
                assert {each.episode[1].logprobs.policy_version for each in again} == {job}
                assert [each.episode[1].logprobs.token_ids for each in again] == [
                    each.episode[1].logprobs.token_ids for each in groups[1]
                ], "the same seed gives the same tokens on any worker"
                metrics.append((await train(adapter, groups, job)).metadata)
            found = await save(adapter, tmp_path / f"{count} workers", NUM_JOBS)
        finally:
            await adapter.cleanup()
        distance = measure_distance(expected, found)
        assert distance < 1e-5
    for job in range(NUM_JOBS):
        one, *others = metrics[job::NUM_JOBS]
        for other in others:
            assert {key: value for key, value in other.items() if key.startswith("num_")} == {
                key: value for key, value in one.items() if key.startswith("num_")
            }
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
            assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)


@pytest.fixture
async def three(cluster, tiny_model_dir):
    adapter = RayAdapter(RayAdapterConfig(num_workers=3, min_workers=2), GRPO(GRPOConfig()))
    await adapter.initialize(run_config(tiny_model_dir))
    yield adapter
    await adapter.cleanup()


@pytest.mark.fault
async def test_a_worker_that_dies_while_it_samples_costs_no_reply(three):
    policy = three.policy()
    long = [ModelRequest(prompt(i), SamplingParams(max_tokens=150, seed=i)) for i in range(24)]
    expected = [reply.tokens.token_ids for reply in await asyncio.gather(*map(policy.sample, long))]
    waiting = [asyncio.create_task(policy.sample(request)) for request in long]
    victim = three.engine.workers[1]
    while not any(task.done() for task in waiting):  # all have begun
        await asyncio.sleep(0)
    os.kill(victim.pid, signal.SIGKILL)
    replies = await asyncio.gather(*waiting)
    assert [reply.tokens.token_ids for reply in replies] == expected
    while len(three.engine.workers) == 3:  # its replies may have been ready
        await asyncio.gather(*(policy.sample(request) for request in long))
    assert [each.number for each in three.engine.workers] == [0, 2]
    await train(three, [await sample_group(policy, number) for number in range(5)], 0)


@pytest.mark.fault
async def test_a_worker_that_dies_while_it_trains_costs_no_job(three, tiny_model_dir, tmp_path):
    groups = [await sample_group(three.policy(), number) for number in range(5)]
    local = LocalAdapter(LocalAdapterConfig(), GRPO(GRPOConfig()))
    await local.initialize(run_config(tiny_model_dir))
    await train(local, groups, 0)
    expected = await save(local, tmp_path / "expected", 1)
    await local.cleanup()
    victim, group = three.engine.workers[0], three.engine
    update = group.update

    def kill_and_update(*arguments, **settings):
        group.update = update
        os.kill(victim.pid, signal.SIGKILL)
        return update(*arguments, **settings)

    group.update = kill_and_update
    await train(three, groups, 0)
    assert [each.number for each in three.engine.workers] == [1, 2]
    assert measure_distance(expected, await save(three, tmp_path / "found", 1)) < 1e-5


@pytest.mark.fault
async def test_with_too_few_workers_the_job_fails_as_something_to_resume(three):
    groups = [await sample_group(three.policy(), number) for number in range(5)]
    for victim in three.engine.workers[1:]:
        os.kill(victim.pid, signal.SIGKILL)
        psutil.Process(victim.pid).wait(10)
    ref = await three.submit(collect(groups, 0))
    with pytest.raises(BackendUnavailable, match="only 1 workers are left, and min_workers is 2"):
        await three.wait_until_complete(ref)


@pytest.mark.fault
async def test_a_checkpoint_is_restored_on_every_worker(three, tmp_path):
    groups = [await sample_group(three.policy(), number) for number in range(5)]
    await save(three, tmp_path / "step-000000", 0)
    first = await three.policy().fingerprint()
    await train(three, groups, 0)
    assert await three.policy().fingerprint() != first
    await three.restore(tmp_path / "step-000000", 0)
    assert (await three.policy().fingerprint(), three.policy().version) == (first, 0)
    assert {reply[1].tokens.policy_version for reply in await _ask_each(three)} == {0}


async def _ask_each(adapter):
    request = ModelRequest(prompt(0), SamplingParams(max_tokens=4))
    return [(each.number, await each.actor.sample.remote("default", request)) for each in adapter.engine.workers]


def start(command, mark, **options):
    """Starts a command whose processes, Ray's included, are found by `list_processes(mark)`."""
    return subprocess.Popen(command, env={**os.environ, "MARK_OF_TEST": mark}, **options)


def list_processes(mark):
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MARK_OF_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def check_weights_changed(project):
    first, *_, last = sorted((project.run / "checkpoints").glob("step-*"))
    assert measure_distance(*(load_file(each / "model.safetensors") for each in (first, last))) > 1e-4


@pytest.mark.fault
def test_a_run_differs_by_one_block_and_leaves_no_process(project):
    mark = str(project.folder)
    project.set("trainer_adapters.adapter", {"_type": "ray", "num_workers": 2, "resources_per_worker": {"CPU": 1}})
    project.set("finetuning.num_epochs", 2)
    project.write_files()
    command = [sys.executable, "-m", "reinforge", "finetune", "run.yml", "--run_name", "r"]
    process = start(command, mark, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate(timeout=240)
    assert process.returncode in (0, 3), output  # 3: trained, but not promoted
    rows = [json.loads(line) for line in (project.run / "training_metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1]
    check_weights_changed(project)
    assert list_processes(mark) == set()


@pytest.mark.fault
def test_after_the_driver_is_killed_no_worker_stays_and_the_run_resumes(project):
    mark = str(project.folder)
    project.set("trainer_adapters.adapter", {"_type": "ray", "num_workers": 2})
    project.set("finetuning.num_epochs", 3)
    project.write_files()
    command = [sys.executable, "-m", "reinforge", "finetune", "run.yml"]
    process = start([*command, "--run_name", "r"], mark, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics, deadline = project.run / "training_metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or not metrics.read_text().strip():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(list_processes(mark)) > 3, "the driver, Ray's and two workers"
    process.kill()
    process.wait()
    killed = time.monotonic()
    while list_processes(mark):
        assert time.monotonic() - killed < 15, "a process of Ray outlives its driver"
        time.sleep(0.1)
    done = subprocess.run([*command, "--resume", "r"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert len(metrics.read_text().splitlines()) == 3


CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def two_nodes(monkeypatch):
    """The address of a cluster of two nodes with one core each, which demands a token."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield next(line for line in process.stdout if line.count(":") == 1 and line.strip()[-1].isdigit()).strip()
    process.communicate(timeout=60)


@pytest.mark.fault
def test_a_run_uses_two_nodes_and_resumes_from_its_checkpoint_on_both(project, two_nodes):
    project.set("trainer_adapters.adapter", {"_type": "ray", "num_workers": 2, "address": two_nodes})
    project.set("finetuning.num_epochs", 2)
    project.write_files()
    command = [sys.executable, "-m", "reinforge", "finetune", "run.yml"]
    process = subprocess.Popen([*command, "--run_name", "r"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    metrics, deadline = project.run / "training_metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or not metrics.read_text().strip():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = subprocess.run([*command, "--resume", "r"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert len(metrics.read_text().splitlines()) == 2
    check_weights_changed(project)
