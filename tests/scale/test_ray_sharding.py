"""Ray workers that divide the model, that use the project's own losses, and that lose a machine without a word."""

import asyncio
import os
import signal
import sys
import textwrap

import pytest

from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.engine.packages import is_installed
from reinforge.errors import BackendUnavailable
from reinforge.scale.ray.cluster import RayConnection
from reinforge.types.sample import LossSpec
from tests.scale.jobs import collect, load_moments, measure_distance, train
from tests.scale.ray_jobs import (
    ALGORITHMS,
    assert_samples_again,
    kill,
    numbers_of,
    ray_adapter,
    sample_job,
    save,
    train_here,
)

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`"),
]


@pytest.fixture(scope="module")
def cluster():
    connection = RayConnection(None, 4, {"CPU": 1.0})
    yield
    connection.close()


POLICY = {"batch": {"steps_per_job": 2}}


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("name", ALGORITHMS)
async def test_workers_that_divide_the_model_make_the_steps_of_one_process(
    cluster, tiny_model_dir, tmp_path, name, lora
):
    policy = POLICY | ({"lora": lora} if lora else {})
    jobs, weights = await train_here(tiny_model_dir, tmp_path / "alone", 3, ALGORITHMS[name](), **policy)
    async with ray_adapter(tiny_model_dir, policy, ALGORITHMS[name](), sharding="full") as adapter:
        assert adapter.engine.members.sharding == "full"
        for job, groups in enumerate(jobs):
            await assert_samples_again(adapter.policy(), groups, job)  # from the gathered weights
            await train(adapter, groups, job)
        found = await save(adapter, tmp_path / "step-000003", 3)
        fingerprint = await adapter.policy().fingerprint()
        assert measure_distance(weights, found) < 1e-5
        moments = [load_moments(tmp_path / folder) for folder in ("alone", "step-000003")]
        assert measure_distance(*moments) < 1e-5
        if name != "ppo":
            await train(adapter, jobs[0], 3)
            await adapter.restore(tmp_path / "step-000003", 3)
            assert await adapter.policy().fingerprint() == fingerprint


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

    jobs, weights = await train_here(tiny_model_dir, tmp_path / "alone", 1, OwnLoss(GRPOConfig()), **POLICY)
    try:
        async with ray_adapter(tiny_model_dir, POLICY, OwnLoss(GRPOConfig()), sharding="replicate") as adapter:
            assert adapter.engine.members.sharding == "replicate"
            await train(adapter, jobs[0], 0)
            assert measure_distance(weights, await save(adapter, tmp_path / "found", 1)) < 1e-5
    finally:
        sys.modules.pop("own_losses")


async def test_a_machine_that_vanishes_holds_a_step_only_as_long_as_is_set(
    cluster, tiny_model_dir, tmp_path, monkeypatch
):
    """A stopped process keeps its connections, as a machine without power does."""
    monkeypatch.setattr("reinforge.scale.ray.members.GRACE_S", 3.0)
    jobs, weights = await train_here(tiny_model_dir, tmp_path / "alone", 1, **POLICY)
    settings = {"num_workers": 3, "min_workers": 2, "sharding": "replicate", "peer_timeout_s": 4}
    async with ray_adapter(tiny_model_dir, POLICY, **settings) as adapter:
        frozen, update = adapter.engine.workers[1], adapter.engine.update

        def freeze_and_update(*arguments, **settings):
            adapter.engine.update = update
            os.kill(frozen.pid, signal.SIGSTOP)
            return update(*arguments, **settings)

        adapter.engine.update = freeze_and_update
        await asyncio.wait_for(train(adapter, jobs[0], 0), 100)
        assert frozen.number not in numbers_of(adapter)
        assert measure_distance(weights, await save(adapter, tmp_path / "found", 1)) < 1e-5
    os.kill(frozen.pid, signal.SIGKILL)  # Ray asks it to end, which it does not hear


async def test_with_a_part_of_a_divided_model_lost_the_run_stops_as_something_to_resume(cluster, tiny_model_dir):
    async with ray_adapter(tiny_model_dir, POLICY, sharding="full") as adapter:
        groups = await sample_job(adapter.policy())
        kill(adapter.engine.workers[1])
        ref = await adapter.submit(collect(groups, 0))
        with pytest.raises(BackendUnavailable, match="the shard of one is lost; resume the run with --resume"):
            await asyncio.wait_for(adapter.wait_until_complete(ref), 60)
