"""Jobs of the local adapter whose weights go to a folder, and jobs that start from scratch."""

import hashlib
import subprocess
import sys

import pytest

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.dpo import DPO
from reinforge.algorithms.grpo import GRPO
from reinforge.algorithms.kto import KTO
from reinforge.algorithms.malt import MALT, MALTConfig
from reinforge.algorithms.orpo import ORPO
from reinforge.algorithms.sapo import SAPO
from reinforge.algorithms.sft import SFT
from reinforge.algorithms.simpo import SimPO
from reinforge.algorithms.staged import StagedAlgorithm
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import EngineError
from reinforge.rollout.episode import build_episode_item
from reinforge.types.job import TrainingStatusEnum
from reinforge.types.request import ModelRequest
from reinforge.types.trajectory import Trajectory, TrajectoryCollection

COMPLETED = TrainingStatusEnum.COMPLETED


def run_config(model, **policy):
    settings = {"model": str(model), "optimizer": {"learning_rate": 0.01}, "schedule": {"warmup_steps": 0}, **policy}
    return FinetuneConfig(device="cpu", policy=settings)


CANCELLED = """
import asyncio, os, sys
from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.sft import SFT
from reinforge.config.schema import FinetuneConfig

async def main():
    config = FinetuneConfig(device="cpu", policy={"model": sys.argv[1]})
    try:
        await asyncio.wait_for(LocalAdapter(LocalAdapterConfig(), SFT()).initialize(config), 0.01)
    except TimeoutError:
        print(hasattr(sys.modules.get("reinforge.engine.engine"), "Engine"), flush=True)
    os._exit(0)

asyncio.run(main())
"""


def test_a_call_that_loads_is_cancelled_before_torch_is_imported(tiny_model_dir):
    """A signal while a model loads does not wait for packages, whose import takes seconds."""
    out = subprocess.run([sys.executable, "-c", CANCELLED, str(tiny_model_dir)], capture_output=True, text=True)
    assert (out.stdout, out.stderr) == ("False\n", "")


class Jobs:
    def __init__(self, model, job_folder=None, algorithm=None, *, from_scratch=False, **policy):
        config = LocalAdapterConfig(fine_tune_from_scratch=from_scratch)
        self.adapter = LocalAdapter(config, algorithm or SFT(), job_folder=job_folder)
        self.config = run_config(model, **policy)

    async def __aenter__(self):
        await self.adapter.initialize(self.config)
        return self

    async def __aexit__(self, *exc_info):
        await self.adapter.cleanup()

    @property
    def policy(self):
        return self.adapter.policy()

    async def trajectory(self, reply, reward=1.0):
        asked = [{"role": "user", "content": "what"}]
        message = {"role": "assistant", "content": reply}
        tokens = await self.policy.encode(ModelRequest(asked), message)
        return Trajectory(
            episode=[build_episode_item(asked[0]), build_episode_item(message, logprobs=tokens)], reward=reward
        )

    async def collected(self, key, *replies):
        groups = [[await self.trajectory(reply)] for reply in replies]
        return TrajectoryCollection(trajectories=groups, run_id="r", job_key=key)

    async def run(self, key, *replies):
        ref = await self.adapter.submit(await self.collected(key, *replies))
        return await self.adapter.wait_until_complete(ref)


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


async def test_a_jobs_weights_can_go_to_a_folder_while_the_old_ones_serve(tiny_model_dir, tmp_path):
    async with Jobs(tiny_model_dir, lambda key: tmp_path / key) as jobs:
        before = await jobs.policy.fingerprint()
        assert (await jobs.run("a", "yes", "no")).status is COMPLETED
        assert await jobs.policy.fingerprint() == before
        assert jobs.policy.version == 0
        await jobs.adapter.restore(tmp_path / "a", 1)
        after = await jobs.policy.fingerprint()
        assert (after != before, jobs.policy.version) == (True, 1)
        await jobs.adapter.reset(2)
        assert (await jobs.policy.fingerprint(), jobs.policy.version) == (before, 2)


@pytest.mark.parametrize(("algorithm", "keeps"), [(KTO(), True), (ORPO(), False), (SimPO(), False), (SAPO(), False)])
async def test_only_an_algorithm_that_compares_with_a_reference_keeps_one(tiny_model_dir, algorithm, keeps):
    async with Jobs(tiny_model_dir, algorithm=algorithm) as jobs:
        assert (jobs.adapter.engine.reference is not None) == keeps


@pytest.mark.slow
async def test_mismatched_replies_are_scored_by_the_reference_too(tiny_model_dir):
    """At the reference the baseline of KTO is 0; afterwards it is what the policy moved by on other replies."""
    async with Jobs(tiny_model_dir, algorithm=KTO(), batch={"steps_per_job": 1}) as jobs:
        first = await jobs.run("a", "yes", "yes no")
        assert (first.status, first.metadata["kl_baseline"]) == (COMPLETED, pytest.approx(0, abs=1e-5))
        assert first.metadata["loss"] == pytest.approx(0.5, abs=1e-5), "sigma(0) of each"
        second = await jobs.run("b", "yes", "yes no")
        assert second.metadata["kl_baseline"] > 0.1


@pytest.mark.slow
async def test_a_job_whose_folder_exists_is_complete(tiny_model_dir, tmp_path):
    async with Jobs(tiny_model_dir, lambda key: tmp_path / key) as jobs:
        await jobs.run("a", "yes")
    made = (tmp_path / "a" / "manifest.json").stat().st_mtime_ns
    async with Jobs(tiny_model_dir, lambda key: tmp_path / key) as jobs:
        status = await jobs.run("a", "yes")
        assert (status.status, status.message) == (COMPLETED, "already trained")
        assert (tmp_path / "a" / "manifest.json").stat().st_mtime_ns == made
    (tmp_path / "a" / "model.safetensors").write_bytes(b"damaged")
    async with Jobs(tiny_model_dir, lambda key: tmp_path / key) as jobs:
        assert (await jobs.run("a", "yes")).message == "trained", "a damaged folder is written again"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 4, "lora_alpha": 8}], ids=["full", "lora"])
@pytest.mark.parametrize("from_scratch", [False, True])
async def test_jobs_from_scratch_do_not_build_on_each_other(tiny_model_dir, lora, from_scratch):
    """Two jobs on the same data: from scratch the second ends where the first did, else it goes further."""
    async with Jobs(tiny_model_dir, from_scratch=from_scratch, lora=lora) as jobs:
        fingerprints, directions = [], []
        for number in (1, 2):
            status = await jobs.run(str(number), "yes", "no")
            await jobs.policy.publish(number)
            fingerprints.append(await jobs.policy.fingerprint())
            directions.append(status.metadata["direction"])
        assert (fingerprints[0] == fingerprints[1]) is from_scratch
        assert all(direction > 0 for direction in directions), "measured from where the job began"


async def test_the_algorithm_can_change_between_jobs(tiny_model_dir):
    """The first algorithm decides what is kept in memory: DPO needs the reference, SFT nothing."""
    async with Jobs(tiny_model_dir, algorithm=DPO()) as jobs:
        jobs.adapter.algorithm = SFT()
        assert (await jobs.run("a", "yes")).status is COMPLETED
        jobs.adapter.algorithm = DPO()
        pair = [await jobs.trajectory("yes"), await jobs.trajectory("no", 0.0)]
        collection = TrajectoryCollection(trajectories=[pair], run_id="r", job_key="b")
        status = await jobs.adapter.wait_until_complete(await jobs.adapter.submit(collection))
        assert status.status is COMPLETED, status.message


async def test_the_loaded_weights_are_kept_only_on_request(tiny_model_dir):
    async with Jobs(tiny_model_dir) as jobs:
        before = await jobs.policy.fingerprint()
        with pytest.raises(EngineError, match="load the engine with keep_initial=True"):
            await jobs.adapter.reset(1)
        assert await jobs.policy.fingerprint() == before
        assert jobs.policy.version == 0


def test_from_scratch_is_refused_for_algorithms_that_need_current_samples(tiny_model_dir):
    jobs = Jobs(tiny_model_dir, algorithm=GRPO(), from_scratch=True)
    [problem] = jobs.adapter.validate(jobs.config)
    assert problem.message == "GRPO needs samples from the weights that a job starts with"
    assert not Jobs(tiny_model_dir, from_scratch=True).adapter.validate(jobs.config)


async def test_the_default_learning_rate_of_a_stage_is_that_of_its_algorithm_itself(tiny_model_dir):
    """MALT begins with epochs of expert iteration, whose default is 20 times as high."""
    malt, adamw = MALT(MALTConfig(num_initial_ei_epochs=1)), {"name": "adamw"}
    alone = LocalAdapter(LocalAdapterConfig(), malt)
    await alone.initialize(run_config(tiny_model_dir, optimizer=adamw))
    staged = LocalAdapter(LocalAdapterConfig(), StagedAlgorithm([(0, SFT()), (1, malt)]))
    stages = FinetuneConfig(pipeline={"sft": {}, "malt": {"num_epochs": 2}}).pipeline
    await staged.initialize(run_config(tiny_model_dir, optimizer=adamw).model_copy(update={"pipeline": stages}))
    learner = staged.engine.learner
    staged.engine.begin_job()
    staged.engine.use_stage("malt")
    assert learner.config.optimizer.learning_rate == alone.engine.learner.config.optimizer.learning_rate
    await staged.cleanup()
    await alone.cleanup()
