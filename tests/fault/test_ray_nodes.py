"""Several Ray nodes that die, come back, do not fit or differ; runs whose driver or worker is killed."""

import asyncio
import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from reinforge.engine.packages import is_installed
from reinforge.errors import BackendError, BackendUnavailable
from reinforge.scale.engine_worker import list_versions
from tests.fault.kit import KILLED, Toy, damaged, differences
from tests.scale import ray_jobs
from tests.scale.jobs import measure_distance, train
from tests.scale.ray_jobs import (
    list_requests,
    notice_loss,
    numbers_of,
    ray_adapter,
    replace_lost,
    sample_job,
    save,
    train_here,
)
from tests.scale.ray_nodes import Cluster

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`"),
]
PATIENCE_S = 240
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster(monkeypatch):
    """A cluster whose first node, the driver's, has one core; a test adds others."""
    with Cluster() as cluster:
        for name, value in cluster.variables.items():
            monkeypatch.setenv(name, value)
        yield cluster


# Nodes that end and join.


async def test_a_node_that_dies_is_replaced_by_one_that_joins(cluster, tiny_model_dir, tmp_path):
    jobs, expected = await train_here(tiny_model_dir, tmp_path / "one process", 3)
    node = cluster.add_node()
    async with ray_adapter(tiny_model_dir, address=cluster.address) as adapter:
        assert [each.is_near for each in adapter.engine.workers].count(True) == 1, "one worker on each node"
        await train(adapter, jobs[0], 0)
        sample, requests = adapter.policy().sample, list_requests(24)
        before = await asyncio.gather(*map(sample, requests))
        waiting = [asyncio.create_task(sample(request)) for request in requests]
        while not any(task.done() for task in waiting):  # all have begun
            await asyncio.sleep(0)
        node.kill()
        after = await asyncio.gather(*waiting)
        assert [each.tokens.token_ids for each in after] == [each.tokens.token_ids for each in before]
        await notice_loss(adapter, 1)
        await train(adapter, jobs[1], 1)
        assert len(numbers_of(adapter)) == 1, "there is no room for another one"
        cluster.add_node()
        await replace_lost(adapter, 2)
        await train(adapter, jobs[2], 2)
        assert measure_distance(expected, await save(adapter, tmp_path / "ray", 3)) < 1e-5


async def test_a_run_starts_with_the_workers_that_fit_and_the_others_join(cluster, tiny_model_dir, caplog):
    async with ray_adapter(tiny_model_dir, address=cluster.address) as adapter:
        assert numbers_of(adapter) == [0]
        assert "1 of 2 workers start, since there is no room for more" in caplog.text
        await train(adapter, await sample_job(adapter.policy(), 0), 0)
        cluster.add_node()
        await replace_lost(adapter, 2)
        await train(adapter, await sample_job(adapter.policy(), 1), 1)
        assert len(numbers_of(adapter)) == 2


# Clusters that cannot be used.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_workers": 2}, r"Ray has room for 1 workers with CPU 1 each .*2 must run \(min_workers\)"),
        ({"resources_per_worker": {"CPU": 2}}, r"room for 0 workers with CPU 2 each .* [\d.]+ has CPU 1"),
        ({"resources_per_worker": {"GPU": 0.5}}, r"room for 0 workers with CPU 1, GPU 0.5 each"),
        ({"resources_per_worker": {"tpu": 1}}, r"room for 0 workers with CPU 1, tpu 1 each"),
    ],
)
async def test_too_little_room_is_an_error_at_once(cluster, tiny_model_dir, settings, message):
    with pytest.raises(BackendUnavailable, match=message):
        async with ray_adapter(tiny_model_dir, address=cluster.address, **settings):
            pass


async def test_room_that_another_program_uses_is_an_error_after_a_while(cluster, tiny_model_dir):
    message = r"in 2 s \(placement_timeout_s\) Ray has started 0 of the workers.*free in all: nothing"
    async with ray_adapter(tiny_model_dir, num_workers=1, address=cluster.address):
        with pytest.raises(BackendUnavailable, match=message):
            async with ray_adapter(tiny_model_dir, num_workers=1, address=cluster.address, placement_timeout_s=2):
                pass


def prepend_to_path(folder):
    """Returns the variable with which a node finds modules and packages of a folder first."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


async def test_a_node_with_other_versions_is_refused_by_name(cluster, tiny_model_dir, tmp_path, caplog):
    place = tmp_path / "torch-1.0.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    torch, variables = re.escape(list_versions()["torch"]), prepend_to_path(tmp_path)
    node = cluster.add_node(**variables)
    with pytest.raises(BackendError, match=rf"the node \w+ \([\d.]+\) has torch 1\.0\.0 instead of {torch}"):
        async with ray_adapter(tiny_model_dir, address=cluster.address):
            pass
    node.kill()
    async with ray_adapter(tiny_model_dir, address=cluster.address, placement_timeout_s=30) as adapter:
        cluster.add_node(**variables)
        with pytest.raises(BackendUnavailable, match=r"3 replacements in a row could not be used: .* torch 1\.0\.0"):
            await replace_lost(adapter, 2)
        await train(adapter, await sample_job(adapter.policy(), 0), 0)
        assert len(numbers_of(adapter)) == 1, "the run goes on with the other one, whichever was lost"
    assert "no further replacement is started, since 3 in a row failed" in caplog.text


async def test_a_node_without_reinforge_is_refused(cluster, tiny_model_dir, tmp_path):
    (tmp_path / "reinforge").mkdir()
    (tmp_path / "reinforge" / "__init__.py").write_text("raise ImportError('nothing is installed here')\n")
    cluster.add_node(**prepend_to_path(tmp_path))
    with pytest.raises(BackendError, match=r"cannot import reinforge \(.*nothing is installed here"):
        async with ray_adapter(tiny_model_dir, address=cluster.address):
            pass


# Whole runs.


@pytest.fixture(scope="module")
def two_nodes():
    """One cluster of two nodes for the runs, whose workers can import the tests."""
    with Cluster() as cluster:
        cluster.variables |= prepend_to_path(ROOT)
        cluster.add_node()
        yield cluster


@pytest.fixture(scope="module")
def make_ray_toy(tmp_path_factory, tiny_model_dir, two_nodes):
    def make():
        toy = Toy(tmp_path_factory.mktemp("toy"), tiny_model_dir)
        toy.set("finetuning.algorithm", {"_type": "grpo"})  # each worker has a random stream of its own
        toy.set("finetuning.policy.optimizer.eps", 1e-4)
        return toy.set("trainer_adapters.adapter", {"_type": "ray", "num_workers": 2, "address": two_nodes.address})

    return make


@pytest.fixture(scope="module")
def undisturbed(make_ray_toy, two_nodes):
    toy = make_ray_toy()
    child = toy.start(mutation=partial(ray_jobs.connect, two_nodes.variables))
    assert child.wait(PATIENCE_S) == 0, child.said
    return toy


@pytest.mark.parametrize(
    "site",
    ["rollout.after_journal:70", "batch.sealed:2", "ckpt.after_tensor:2", "ckpt.after_rename:2", "publish.mid:2"],
)
def test_after_the_driver_is_killed_no_worker_stays_and_the_run_resumes(make_ray_toy, undisturbed, two_nodes, site):
    toy, mutation = make_ray_toy(), partial(ray_jobs.connect, two_nodes.variables)
    child = toy.start(crash_at=site, mutation=mutation)
    assert child.wait(PATIENCE_S) == KILLED, child.said
    two_nodes.wait_for_no_worker(15)
    assert damaged(toy.run) == []
    child = toy.resume(mutation=mutation)
    assert child.wait(PATIENCE_S) == 0, child.said
    assert differences(toy.run, undisturbed.run) == []


@pytest.mark.parametrize(
    "end_a_worker",
    [
        ray_jobs.kill_a_worker_while_sampling,
        partial(ray_jobs.kill_a_worker_at, "step.after_backward:2"),
        partial(ray_jobs.kill_a_worker_at, "step.after_optim:4"),
        ray_jobs.kill_a_worker_while_writing,
    ],
    ids=["sampling", "first step", "last step of a job", "checkpoint"],
)
def test_a_run_whose_worker_is_killed_ends_as_if_undisturbed(make_ray_toy, undisturbed, two_nodes, end_a_worker):
    toy = make_ray_toy()
    child = toy.start(mutation=partial(ray_jobs.connect, two_nodes.variables, end_a_worker))
    assert child.wait(PATIENCE_S) == 0, child.said
    assert "died; 1 of 2 workers are left" in child.said + (toy.run / "run.log").read_text()
    assert measure_distance(read_weights(toy), read_weights(undisturbed)) < 1e-5
    summary, expected = (json.loads((each.run / "summary.json").read_text()) for each in (toy, undisturbed))
    assert summary["episodes"] == expected["episodes"], "no episode is missing"
    assert summary["policy_versions"][-1]["version"] == expected["policy_versions"][-1]["version"]


def test_a_run_whose_cluster_ends_resumes_on_another_one_of_another_size(make_ray_toy, undisturbed):
    toy = make_ray_toy()
    with Cluster() as first:
        first.add_node()
        toy.set("trainer_adapters.adapter.address", first.address)
        child = toy.start(mutation=partial(ray_jobs.connect, first.variables))
        child.wait_for(toy.run / "checkpoints" / "step-000001", PATIENCE_S)
        first.nodes[0].kill()  # the head, to which the driver is connected
        assert child.wait(PATIENCE_S) != 0, child.said
    with Cluster() as second:
        fewer = ("trainer_adapters.adapter.num_workers", "1"), ("trainer_adapters.adapter.address", second.address)
        changes = [part for path, value in fewer for part in ("-o", path, value)]
        child = toy.resume(*changes, mutation=partial(ray_jobs.connect, second.variables))
        assert child.wait(PATIENCE_S) == 0, child.said
    assert measure_distance(read_weights(toy), read_weights(undisturbed)) < 1e-5


def read_weights(toy):
    return load_file(sorted((toy.run / "checkpoints").glob("step-*"))[-1] / "model.safetensors")
