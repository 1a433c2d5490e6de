"""A user's own builder, adapter and trainer, each alone with our other two, through a whole run on a tiny model."""

import asyncio
import json

import pytest

from reinforge.algorithms.grpo import GRPO
from reinforge.finetuning import (
    Trainer,
    TrainerAdapter,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
)
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from tests.guide import register  # noqa: F401  registers the guide's components
from tests.journal_rows import read_rows


class EngineAdapterConfig(TrainerAdapterConfig, name="test_engine_adapter"):
    """An adapter of a user's that wraps the engine."""


class EngineAdapter(TrainerAdapter):
    engine = None

    async def initialize(self, run_config):
        from reinforge.engine import Engine

        await super().initialize(run_config)
        self.jobs = {}
        self.engine = await asyncio.to_thread(Engine.load, run_config.policy, seed=run_config.seed, device="cpu")

    def policy(self):
        return self.engine.policy if self.engine is not None else None

    async def is_healthy(self):
        return self.engine is not None

    async def submit(self, trajectories):
        key = trajectories.resolve_job_key()
        self.jobs[key] = await asyncio.to_thread(self._train, trajectories)
        return TrainingJobRef(run_id=trajectories.run_id, backend="engine", metadata={"key": key})

    def _train(self, trajectories):
        grpo = GRPO()
        samples = grpo.build_samples(trajectories.groups)
        for sample, advantages in zip(samples, grpo.credit(samples), strict=True):
            sample.advantages = advantages
        self.engine.begin_job()
        report = self.engine.update(samples, grpo.loss, progress_start=0.5, progress_end=0.5)
        self.engine.end_job()
        return {"num_updates": report.num_updates, "num_tokens": report.num_tokens}

    async def status(self, ref):
        metadata = self.jobs[ref.metadata["key"]]
        return TrainingJobStatus(run_id=ref.run_id, backend="engine", status="completed", metadata=metadata)

    async def wait_until_complete(self, ref, poll_interval=10.0):
        return await self.status(ref)

    async def save(self, folder, version):
        await asyncio.to_thread(self.engine.save, folder, version)
        return True

    async def restore(self, folder, version):
        await asyncio.to_thread(self.engine.load_weights, folder)
        await self.engine.policy.publish(version)
        return True

    async def cleanup(self):
        if self.engine is not None:
            self.engine.close()


@register_trainer_adapter(config_type=EngineAdapterConfig)
async def engine_adapter(config, builder):
    yield EngineAdapter(config)


class ReorderedConfig(TrainerConfig, name="test_reordered"):
    """A trainer of a user's with another order of the stages."""

    fails: bool = False
    cleanup_fails: bool = False


class Reordered(Trainer):
    async def run(self, num_epochs):
        collections = [await self.collect(epoch) for epoch in range(num_epochs)]
        statuses = []
        for epoch, collection in reversed(list(enumerate(collections))):
            ref = await self.trainer_adapter.submit(collection.model_copy(update={"job_key": str(epoch)}))
            statuses.append(await self.trainer_adapter.wait_until_complete(ref))
        if self.trainer_config.fails:
            statuses[-1] = statuses[-1].model_copy(update={"status": "failed", "message": "the pod was evicted"})
        return statuses

    async def collect(self, epoch):
        await self.trajectory_builder.start_run(f"c{epoch}", {"epoch": epoch})
        return await self.trajectory_builder.finalize(f"c{epoch}", {"epoch": epoch})

    async def run_epoch(self, epoch, run_id):
        raise NotImplementedError("this trainer has no epochs of its own")

    async def get_metrics(self, run_id):
        return {}

    def log_progress(self, epoch, metrics, output_dir=None):
        pass

    async def cleanup(self):
        await super().cleanup()
        if self.trainer_config.cleanup_fails:
            raise RuntimeError("the cleanup is broken, too")


@register_trainer(config_type=ReorderedConfig)
async def reordered(config, builder):
    yield Reordered(config)


@pytest.mark.slow
def test_a_builder_with_start_run_and_finalize_on_run_eval_trains(project):
    """The guide's builder, as it stands in tests/guide: the reward goes up and the verdict says so."""
    project.set("trajectory_builders.builder", {"_type": "my_traj_builder", "num_generations": 4})
    project.set("finetuning.num_epochs", 2).set("finetuning.policy.optimizer.learning_rate", 1e-2)
    project.rows = project.rows[:40]
    project.finetune(code=0)
    assert len(project.summary["policy_versions"]) == 3
    assert project.summary["final"]["mean"] > project.summary["baseline"]["mean"]
    assert project.summary["tokens"]["trained"] > 0
    history = project.history
    assert [row["num_missing"] for row in history] == [None] * 2, "what our builder does not count is unknown"


def test_an_adapter_that_wraps_the_engine_trains(project):
    project.set("trainer_adapters.adapter", {"_type": "test_engine_adapter"}).shrink(2)
    project.set("finetuning.policy.optimizer.learning_rate", 1e-2).finetune(code=0)
    assert len({v["fingerprint"] for v in project.summary["policy_versions"]}) == 3
    assert project.summary["final"]["mean"] > project.summary["baseline"]["mean"]
    assert project.summary["confirm_base"]["num_examples"] == 16


@pytest.mark.slow
def test_a_trainer_that_reorders_the_loop_trains(project):
    """Its jobs are one opaque stage: what it leaves behind is published once, proved, saved and judged."""
    project.set("trainers.trainer", {"_type": "test_reordered"}).shrink(2).finetune(code=0)
    versions = project.summary["policy_versions"]
    assert [version["version"] for version in versions] == [0, 1]
    assert versions[1]["num_updates"] == 8, "two jobs of four steps"
    assert project.summary["best"] is not None
    assert (project.run / "checkpoints" / "step-000001").is_dir()


@pytest.mark.slow
def test_the_guides_three_parts_train_together_over_our_engine(project):
    """Builder and trainer of the guide, an adapter around the engine: nothing of ours but the run around them."""
    project.set("trajectory_builders.builder", {"_type": "my_traj_builder", "num_generations": 4})
    project.set("trainers.trainer", {"_type": "my_trainer"}).set("finetuning.num_epochs", 2)
    project.set("trainer_adapters.adapter", {"_type": "test_engine_adapter"})
    project.set("finetuning.policy.optimizer.learning_rate", 1e-2)
    project.rows = project.rows[:40]
    project.finetune(code=0)
    assert len(project.summary["policy_versions"]) == 2
    assert project.summary["final"]["mean"] > project.summary["baseline"]["mean"]


@pytest.mark.slow
def test_a_failed_job_that_a_trainer_only_returns_fails_the_run(project):
    """NAT core 2, ART 9: exit 3 with the job's own reason, also where the cleanup breaks afterwards."""
    project.set("trainers.trainer", {"_type": "test_reordered", "fails": True, "cleanup_fails": True})
    result = project.shrink().finetune(code=3)
    assert "ended with status failed: the pod was evicted" in result.output
    assert (project.summary["status"], project.summary["promoted"]) == ("failed", None)
    assert "the cleanup is broken" in (project.run / "run.log").read_text()


class Converting(GroupTrajectoryBuilder):
    """A builder of a user's that writes log-probs as plain numbers and names the completion they belong to."""

    async def finalize(self, run_id, meta=None):
        collection = await super().finalize(run_id, meta)
        names = {call.reply.tokens: call.call_id for record in self.records for call in record.calls}
        for turn in (turn for siblings in collection.trajectories for t in siblings for turn in t.turns):
            turn.metadata = {"id": names[turn.tokens]}
            turn.logprobs = list(turn.tokens.logprobs) if self.keeps_numbers else None
        return collection


class ConvertingConfig(GroupTrajectoryBuilderConfig, name="test_converting"):
    keeps_numbers: bool = True


@register_trajectory_builder(config_type=ConvertingConfig)
async def converting(config, builder):
    made = Converting(config, ["agent"])
    made.keeps_numbers = config.keeps_numbers
    yield made


@pytest.mark.slow
@pytest.mark.parametrize("keeps_numbers", [True, False])
def test_turns_that_name_their_completion_are_trained_on_the_tokens_that_were_sampled(project, keeps_numbers):
    project.set("trajectory_builders.builder", {"_type": "test_converting", "keeps_numbers": keeps_numbers})
    project.shrink().finetune(code=0)
    rows = read_rows(project.run, "SELECT data FROM episodes WHERE phase = 'collect'")
    sampled = sum(len(call["token_ids"]) for row in rows for call in json.loads(row[0])["calls"])
    assert 0 < project.summary["tokens"]["trained"] <= sampled


class Rescaling(GroupTrajectoryBuilder):
    """A user's builder with its own reward: ten times the score, unknown for one example, an error for another."""

    async def compute_reward(self, output_item, meta=None):
        assert (meta["epoch"], meta["round"], meta["trainer_run_id"]) == (0, 0, "r")
        if output_item.id == "7":
            raise KeyError("no price for example 7")
        return None if output_item.id == "3" else 10 * float(output_item.score)


class RescalingConfig(GroupTrajectoryBuilderConfig, name="test_rescaling"):
    """Its configuration."""


@register_trajectory_builder(config_type=RescalingConfig)
async def rescaling(config, builder):
    yield Rescaling(config, ["agent"])


@pytest.mark.slow
def test_the_reward_is_decided_once_so_the_journal_keeps_what_trains(project):
    project.set("trajectory_builders.builder", {"_type": "test_rescaling", "num_generations": 4})
    project.set("finetuning.num_epochs", 1).set("finetuning.outcomes", {"max_missing": 0.5})
    project.set("finetuning.limits", {"max_refills": 0})
    project.set("finetuning.splits", {"train": 40, "select": 8, "confirm": 16})
    project.finetune(code=0)
    query = "SELECT example_id, outcome, reward, data FROM episodes WHERE phase = 'collect'"
    rows = [(*row[:3], json.loads(row[3])) for row in read_rows(project.run, query)]
    priced = [row for row in rows if row[0] not in ("3", "7")]
    assert priced
    assert all(reward == 10 * data["scores"]["vowels"]["score"] for _, _, reward, data in priced)
    assert {(outcome, reward) for id_, outcome, reward, _ in rows if id_ == "3"} <= {("ok", None)}
    assert {(outcome, reward) for id_, outcome, reward, _ in rows if id_ == "7"} <= {("judge_error", None)}
    [history] = project.history
    means = {}
    for id_, _, reward, _ in priced:
        means.setdefault(id_, []).append(reward)
    mean = sum(sum(rewards) / len(rewards) for rewards in means.values()) / len(means)
    assert history["avg_reward"] == pytest.approx(mean)
    assert max(max(rewards) for rewards in means.values()) > 1, "ten times a score"
