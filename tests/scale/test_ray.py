"""A real Ray cluster on this machine: the same computation as one process, workers that die, whole runs."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from safetensors.torch import load_file

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.algorithms.ppo import PPO, PPOConfig
from reinforge.algorithms.sft import SFT
from reinforge.engine.packages import is_installed
from reinforge.errors import BackendUnavailable
from reinforge.scale.ray.adapter import RayAdapter, RayAdapterConfig
from reinforge.scale.ray.cluster import RayConnection
from tests.scale.jobs import collect, measure_distance, sample_group, train
from tests.scale.processes import MARK, wait_for_none
from tests.scale.ray_jobs import run_config, save

pytestmark = [
    pytest.mark.timeout(900),
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
async def test_with_too_few_workers_the_job_fails_as_something_to_resume(three, monkeypatch):
    from reinforge.scale.ray.members import Members

    monkeypatch.setattr(Members, "_recruit", lambda self: None)  # there is room for others here
    groups = [await sample_group(three.policy(), number) for number in range(5)]
    for victim in three.engine.workers[1:]:
        os.kill(victim.pid, signal.SIGKILL)
        psutil.Process(victim.pid).wait(10)
    ref = await three.submit(collect(groups, 0))
    with pytest.raises(BackendUnavailable, match="only 1 workers are left, and min_workers is 2"):
        await three.wait_until_complete(ref)


IMPORTED_BEFORE = """
import ray
from reinforge.scale.ray.cluster import RayConnection

for _ in range(2):
    connection = RayConnection(None, 1, {"CPU": 1})
    print(ray.get(ray.remote(lambda: "ours").remote()))
    connection.close()
ray.init(address="local", num_cpus=1, include_dashboard=False)
print(ray.get(ray.remote(lambda: "another").remote()))
"""


@pytest.mark.slow
def test_code_that_uses_ray_before_and_after_a_run(tmp_path):
    """Ray reads its token once, when it is imported; an agent may import it first and start a cluster afterwards."""
    environment = {**os.environ, "HOME": str(tmp_path)}  # Ray writes the other cluster's token there
    done = subprocess.run([sys.executable, "-c", IMPORTED_BEFORE], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["ours", "ours", "another"], done.stderr


@pytest.mark.fault
def test_a_run_differs_by_one_block_and_leaves_no_process(project):
    mark = str(project.folder)
    project.set("trainer_adapters.adapter", {"_type": "ray", "num_workers": 2, "resources_per_worker": {"CPU": 1}})
    project.set("finetuning.num_epochs", 2)
    project.write_files()
    command = [sys.executable, "-m", "reinforge", "finetune", "run.yml", "--run_name", "r"]
    environment = {**os.environ, MARK: mark}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: trained, but not promoted
    rows = [json.loads(line) for line in (project.run / "training_metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1]
    first, *_, last = sorted((project.run / "checkpoints").glob("step-*"))
    assert measure_distance(*(load_file(each / "model.safetensors") for each in (first, last))) > 1e-4
    wait_for_none(mark)
