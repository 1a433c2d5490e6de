"""Ray workers that end: their work is done again, they are replaced, and the weights are those of one process."""

import asyncio

import pytest

from reinforge.engine.packages import is_installed
from reinforge.errors import BackendError, BackendUnavailable
from reinforge.scale import engine_group
from reinforge.scale.ray import adapter as ray_adapters
from reinforge.scale.ray.cluster import RayConnection
from tests.scale import ray_jobs
from tests.scale.jobs import collect, measure_distance, train
from tests.scale.ray_jobs import (
    arm,
    kill,
    list_requests,
    notice_loss,
    numbers_of,
    ray_adapter,
    replace_lost,
    sample_job,
    save,
    train_here,
)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`"),
]
TWO_STEPS = {"batch": {"steps_per_job": 2}}


@pytest.fixture(scope="module")
def cluster():
    """One cluster for all tests, with room for replacements."""
    connection = RayConnection(None, 4, {"CPU": 1.0})
    yield
    connection.close()


@pytest.fixture
def workers():
    """The module in which workers are called, which imports ray and so needs the cluster first."""
    from reinforge.scale.ray import workers as ray_workers

    return ray_workers


@pytest.fixture
def members():
    from reinforge.scale.ray import members as ray_members

    return ray_members


# Sampling.


async def sample_while_one_dies(adapter):
    """Kills a worker in the middle of 24 replies; returns them and what they are without that."""
    sample, requests = adapter.policy().sample, list_requests(24)
    expected = await asyncio.gather(*map(sample, requests))
    waiting = [asyncio.create_task(sample(request)) for request in requests]
    while not any(task.done() for task in waiting):  # all have begun
        await asyncio.sleep(0)
    kill(adapter.engine.workers[1])
    return await asyncio.gather(*waiting, return_exceptions=True), expected


@pytest.mark.slow
async def test_a_worker_that_dies_while_it_samples_costs_no_reply_and_is_replaced(cluster, tiny_model_dir, tmp_path):
    jobs, expected_weights = await train_here(tiny_model_dir, tmp_path / "one process", 2)
    async with ray_adapter(tiny_model_dir) as adapter:
        await train(adapter, jobs[0], 0)
        replies, expected = await sample_while_one_dies(adapter)
        assert [each.tokens.token_ids for each in replies] == [each.tokens.token_ids for each in expected]
        assert {each.tokens.policy_version for each in replies} == {1}
        await notice_loss(adapter, 1)
        await replace_lost(adapter, 2)
        assert numbers_of(adapter) == [0, 2]
        again = await asyncio.gather(*map(adapter.policy().sample, list_requests(8, 4)))
        assert {each.tokens.policy_version for each in again} == {1}, "the new worker serves the current version too"
        await train(adapter, jobs[1], 1)
        assert measure_distance(expected_weights, await save(adapter, tmp_path / "ray", 2)) < 1e-5


@pytest.mark.fault
async def test_without_retries_a_reply_is_lost(cluster, workers, tiny_model_dir, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(workers, "MAX_ATTEMPTS", 1)
    async with ray_adapter(tiny_model_dir) as adapter:
        replies, _ = await sample_while_one_dies(adapter)
        assert any(isinstance(each, BackendUnavailable) for each in replies)


@pytest.mark.fault
async def test_a_lost_worker_is_not_there_if_nobody_replaces_it(cluster, members, tiny_model_dir, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(members.Members, "_recruit", lambda self: None)
    async with ray_adapter(tiny_model_dir) as adapter:
        kill(adapter.engine.workers[1])
        await notice_loss(adapter, 1)
        with pytest.raises(BackendUnavailable, match="only 1 workers are left"):
            await replace_lost(adapter, 2)


@pytest.mark.fault
async def test_a_replacement_without_the_optimizer_state_is_noticed(cluster, workers, tiny_model_dir, monkeypatch):
    """Mutation check: the optimizer state is sent too, and fingerprints show it if it is not."""
    send = workers.WorkerGroup._send_weights

    def send_weights_only(group, worker, name, version):
        fingerprint = send(group, worker, name, version)
        ray_jobs.forget_the_optimizer(worker)
        return fingerprint

    monkeypatch.setattr(workers.WorkerGroup, "_send_weights", send_weights_only)
    async with ray_adapter(tiny_model_dir) as adapter:
        await train(adapter, await sample_job(adapter.policy(), 0), 0)
        kill(adapter.engine.workers[1])
        await notice_loss(adapter, 1)
        await replace_lost(adapter, 2)
        status = await submit(adapter, await sample_job(adapter.policy(), 1), 1)
        assert "do not have the same weights" in status.message


async def submit(adapter, groups, job):
    return await adapter.wait_until_complete(await adapter.submit(collect(groups, job)))


@pytest.mark.fault
async def test_a_replacement_that_has_other_weights_is_refused(cluster, workers, tiny_model_dir, monkeypatch, caplog):
    monkeypatch.setattr(
        workers.WorkerGroup,
        "_send_reference",
        lambda group, worker: ray_jobs.change_a_weight(worker),  # as a node would have whose base model differs
    )
    async with ray_adapter(tiny_model_dir) as adapter:
        kill(adapter.engine.workers[1])
        await notice_loss(adapter, 1)
        with pytest.raises(BackendUnavailable, match=r"3 replacements in a row could not be used.*the same weights"):
            await replace_lost(adapter, 2)
        assert numbers_of(adapter) == [0]
        await train(adapter, await sample_job(adapter.policy(), 0), 0)  # the others go on
    assert "no further replacement is started" in caplog.text


# Training.


@pytest.mark.fault
@pytest.mark.parametrize("site", ["step.after_backward:1", "step.after_optim:1", "step.after_optim:2"])
async def test_a_worker_that_dies_within_a_job_costs_no_job(cluster, tiny_model_dir, tmp_path, site):
    jobs, expected = await train_here(tiny_model_dir, tmp_path / "one process", 2, **TWO_STEPS)
    async with ray_adapter(tiny_model_dir, TWO_STEPS) as adapter:
        await train(adapter, jobs[0], 0)
        arm(adapter.engine.workers[0], site)
        await train(adapter, jobs[1], 1)
        assert 0 not in numbers_of(adapter)
        assert measure_distance(expected, await save(adapter, tmp_path / "ray", 2)) < 1e-5


@pytest.mark.fault
async def test_a_job_that_is_not_undone_trains_twice(cluster, workers, tiny_model_dir, tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(workers.WorkerGroup, "rollback", lambda group: group.end_job())
    monkeypatch.setattr(workers.WorkerGroup, "recover", lambda group: group.members.connect())
    jobs, expected = await train_here(tiny_model_dir, tmp_path / "one process", 1, **TWO_STEPS)
    async with ray_adapter(tiny_model_dir, TWO_STEPS) as adapter:
        arm(adapter.engine.workers[0], "step.after_optim:1")
        await submit(adapter, jobs[0], 0)
        assert measure_distance(expected, await save(adapter, tmp_path / "ray", 1)) > 1e-4


@pytest.mark.fault
async def test_a_job_in_which_workers_always_end_is_given_up(cluster, tiny_model_dir, monkeypatch):
    monkeypatch.setattr(ray_adapters, "MAX_ATTEMPTS", 2)
    async with ray_adapter(tiny_model_dir) as adapter:
        groups, update = await sample_job(adapter.policy()), adapter.engine.update

        def kill_and_update(*arguments, **settings):
            kill(adapter.engine.workers[0])
            return update(*arguments, **settings)

        adapter.engine.update = kill_and_update
        with pytest.raises(BackendUnavailable, match="workers died in each of 2 attempts at one job"):
            await submit(adapter, groups, 0)
        adapter.engine.update = update
        assert (await submit(adapter, groups, 1)).status == "completed", "the weights are those from before"


@pytest.mark.fault
async def test_other_weights_on_one_worker_fail_the_job(cluster, tiny_model_dir):
    async with ray_adapter(tiny_model_dir) as adapter:
        groups = await sample_job(adapter.policy())
        ray_jobs.change_a_weight(adapter.engine.workers[1])
        status = await submit(adapter, groups, 0)
        assert status.status == "failed"
        assert "do not have the same weights (worker 0" in status.message
        with pytest.raises(BackendError, match="do not have the same weights"):
            await adapter.policy().fingerprint()


@pytest.mark.fault
async def test_without_the_comparison_nobody_notices_other_weights(cluster, workers, tiny_model_dir, monkeypatch):
    """Mutation check."""
    for module in (engine_group, workers):
        monkeypatch.setattr(module, "require_equal", lambda fingerprints: None)
    async with ray_adapter(tiny_model_dir) as adapter:
        groups = await sample_job(adapter.policy())
        ray_jobs.change_a_weight(adapter.engine.workers[1])
        assert (await submit(adapter, groups, 0)).status == "completed"


# All of them.


@pytest.mark.fault
async def test_when_all_workers_end_new_ones_start_from_the_checkpoint(cluster, tiny_model_dir, tmp_path):
    jobs, expected = await train_here(tiny_model_dir, tmp_path / "one process", 2)
    async with ray_adapter(tiny_model_dir) as adapter:
        await train(adapter, jobs[0], 0)
        fingerprint = await adapter.policy().fingerprint()
        await commit(adapter, tmp_path / "step-000001", 1)
        before = await asyncio.gather(*map(adapter.policy().sample, list_requests(6, 12)))
        for worker in adapter.engine.workers:
            kill(worker)
        after = await asyncio.gather(*map(adapter.policy().sample, list_requests(6, 12)))
        assert [each.tokens.token_ids for each in after] == [each.tokens.token_ids for each in before]
        assert {each.tokens.policy_version for each in after} == {1}
        assert await adapter.policy().fingerprint() == fingerprint
        await replace_lost(adapter, 2)
        await train(adapter, jobs[1], 1)
        assert measure_distance(expected, await save(adapter, tmp_path / "ray", 2)) < 1e-5


async def commit(adapter, folder, version):
    """Writes a whole checkpoint, as a run does."""
    from reinforge.files import commit_folder

    staged = folder.with_name("staged")
    await save(adapter, staged, version)
    commit_folder(staged, folder, version=version)


@pytest.mark.fault
async def test_when_all_workers_end_before_the_checkpoint_the_run_stops(cluster, tiny_model_dir, tmp_path):
    async with ray_adapter(tiny_model_dir) as adapter:
        await commit(adapter, tmp_path / "step-000000", 0)
        await train(adapter, await sample_job(adapter.policy()), 0)
        for worker in adapter.engine.workers:
            kill(worker)
        for request in list_requests(2):  # the second one does not wait
            with pytest.raises(BackendUnavailable, match=r"weights of version 1 are in no checkpoint yet; resume the"):
                await adapter.policy().sample(request)
