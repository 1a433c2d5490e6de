"""A real Ray cluster on this machine: the same computation as one process, workers that die, whole runs."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from reinforge.engine.packages import is_installed
from reinforge.errors import BackendUnavailable
from reinforge.scale.ray.cluster import RayConnection
from tests.scale.jobs import collect, measure_distance, train
from tests.scale.processes import MARK, wait_for_none
from tests.scale.ray_jobs import ALGORITHMS, assert_samples_again, kill, ray_adapter, sample_job, save, train_here

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`"),
]
NUM_JOBS = 3


@pytest.fixture(scope="module")
def cluster():
    """One cluster for all tests that do not start their own."""
    connection = RayConnection(None, 8, {"CPU": 1.0})
    yield
    connection.close()


@pytest.mark.fault
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "kto"])
async def test_any_number_of_workers_makes_the_same_steps(cluster, tiny_model_dir, tmp_path, name, lora):
    policy = {"batch": {"steps_per_job": 2}} | ({"lora": lora} if lora else {})
    alone = tmp_path / "one process"
    jobs, expected = await train_here(tiny_model_dir, alone, NUM_JOBS, ALGORITHMS[name](), **policy)
    metrics = []
    for count in (1, 2, 4):
        async with ray_adapter(tiny_model_dir, policy, ALGORITHMS[name](), num_workers=count) as adapter:
            before = await save(adapter, tmp_path / f"before {count}", 0)
            for job, groups in enumerate(jobs):
                await assert_samples_again(adapter.policy(), groups, job)
                metrics.append((await train(adapter, groups, job)).metadata)
            found = await save(adapter, tmp_path / f"{count} workers", NUM_JOBS)
        assert measure_distance(before, expected) > 1e-3, "there is something to compare"
        assert measure_distance(expected, found) < 1e-5
    for job in range(NUM_JOBS):
        one, *others = metrics[job::NUM_JOBS]
        for other in others:
            assert {key: value for key, value in other.items() if key.startswith("num_")} == {
                key: value for key, value in one.items() if key.startswith("num_")
            }
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
            assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)


@pytest.mark.fault
async def test_with_too_few_workers_the_job_fails_as_something_to_resume(cluster, tiny_model_dir, monkeypatch):
    from reinforge.scale.ray.members import Members

    async with ray_adapter(tiny_model_dir, num_workers=3, min_workers=2) as adapter:
        monkeypatch.setattr(Members, "_recruit", lambda self: None)  # there is room for others here
        groups = await sample_job(adapter.policy())
        for victim in adapter.engine.workers[1:]:
            kill(victim)
        ref = await adapter.submit(collect(groups, 0))
        with pytest.raises(BackendUnavailable, match="only 1 workers are left, and min_workers is 2"):
            await adapter.wait_until_complete(ref)


IMPORTED_BEFORE = """
import os, ray
from reinforge.scale.ray.cluster import RayConnection

for _ in range(2):
    connection = RayConnection(None, 1, {"CPU": 1})
    print("ours", ray.get(ray.remote(lambda: os.nice(0)).remote()) - os.nice(0))
    connection.close()
ray.init(address="local", num_cpus=1, include_dashboard=False)
print(ray.get(ray.remote(lambda: "another").remote()))
"""


@pytest.mark.slow
def test_code_that_uses_ray_before_and_after_a_run(tmp_path):
    """Ray reads its token once, when it is imported; an agent may import it first and start a cluster afterwards."""
    environment = {**os.environ, "HOME": str(tmp_path)}  # Ray writes the other cluster's token there
    done = subprocess.run([sys.executable, "-c", IMPORTED_BEFORE], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["ours 0", "ours 0", "another"], done.stderr


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
