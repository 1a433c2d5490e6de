"""How a run with a user's own trainer is shown and ends: its stages, no job at all, a best model that nobody saved."""

import pytest

from reinforge.config.loader import load_config
from reinforge.errors import JobFailed
from reinforge.finetuning import Trainer, TrainerConfig, register_trainer
from reinforge.runs.progress import SilentProgress
from reinforge.runs.rows import BASELINE
from reinforge.runs.run_folder import find_resume_point, read_record
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_config
from tests.core.e2e.test_own_adapters import remote, use_remote  # noqa: F401  the fixture
from tests.project import call
from tests.scripted_run import ScriptedRun


class PlainTrainerConfig(TrainerConfig, name="test_plain_trainer"):
    """A trainer that knows nothing of a run."""

    submits: bool = True
    returns_statuses: bool = True


class PlainTrainer(Trainer):
    """Collects, submits, waits and validates in every epoch, as the extension guide says."""

    async def run(self, num_epochs):
        statuses = [await self.run_epoch(epoch, "mine") for epoch in range(num_epochs)]
        return [each for each in statuses if each] if self.trainer_config.returns_statuses else None

    async def run_epoch(self, epoch, run_id):
        meta = {"epoch": epoch, "trainer_run_id": run_id}
        await self.trajectory_builder.start_run(f"{run_id}-{epoch}", meta)
        collection = await self.trajectory_builder.finalize(f"{run_id}-{epoch}", meta)
        if not self.trainer_config.submits:
            return None
        status = await self.trainer_adapter.wait_until_complete(await self.trainer_adapter.submit(collection), 0.01)
        await self.run_validation_evaluation(epoch, run_id)
        return status

    async def get_metrics(self, run_id):
        return {}

    def log_progress(self, epoch, metrics, output_dir=None):
        pass


@register_trainer(config_type=PlainTrainerConfig)
async def plain_trainer(config, builder):
    yield PlainTrainer(config)


def use_trainer(project, service, num_epochs, **settings):
    use_remote(project, service).set("trainers.trainer", {"_type": "test_plain_trainer", **settings})
    return project.set("finetuning.num_epochs", num_epochs)


@pytest.mark.parametrize("returns_statuses", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_best_model_is_named_although_no_checkpoint_holds_it(project, remote, returns_statuses):  # noqa: F811
    result = use_trainer(project, remote, 2, returns_statuses=returns_statuses).finetune(code=0)
    summary = project.summary
    assert summary["num_jobs"] == 2
    assert summary["final"]["mean"] > summary["baseline"]["mean"] + 0.2
    assert "no checkpoint beat the base model" not in result.output
    assert "best        the model after epoch 1, " in result.output
    assert "the backend saves no checkpoint of it" in result.output


@pytest.mark.slow
def test_a_trainer_that_submits_no_job_does_not_end_as_trained(project, remote):  # noqa: F811
    result = use_trainer(project, remote, 2, submits=False).shrink(2).finetune(code=3)
    assert "nothing was trained: PlainTrainer collected 2 times and submitted no job" in result.output
    assert (project.summary["status"], project.summary["can_resume"], project.summary["num_jobs"]) == (
        "failed",
        False,
        0,
    )


class IdleTrainer(PlainTrainer):
    async def run(self, num_epochs):
        return []


class IdleTrainerConfig(TrainerConfig, name="test_idle_trainer"):
    """A trainer whose run() does nothing."""


@register_trainer(config_type=IdleTrainerConfig)
async def idle_trainer(config, builder):
    yield IdleTrainer(config)


def test_a_trainer_that_neither_collects_nor_submits_does_not_end_well(project, remote):  # noqa: F811
    use_remote(project, remote).set("trainers.trainer", {"_type": "test_idle_trainer"})
    result = project.set("finetuning.num_epochs", 20).finetune(code=3)
    assert "IdleTrainer collected 0 times and submitted no job in 20 epochs (limits" in result.output
    assert project.summary["status"] == "failed"
    assert find_resume_point(project.run, read_record(project.run), lambda checkpoint: True).epoch == BASELINE


async def test_an_unhealthy_backend_is_noticed_around_any_trainer(tmp_path):
    run = ScriptedRun(tmp_path)
    run.settings["trainers"] = {"trainer": {"_type": "test_idle_trainer"}}
    run.adapter.healthy = False
    with pytest.raises(JobFailed, match="not healthy"):
        await run.run()


@pytest.mark.slow
def test_a_run_without_a_job_may_end_well_if_it_is_asked_to(project, remote):  # noqa: F811
    assert "submitted no job in 1 epoch (" in (
        use_trainer(project, remote, 1, submits=False).shrink().finetune(code=3).output
    )
    project.save()
    allowed = ("-o", "finetuning.limits.allow_no_training", "true")
    result = call("finetune", "run.yml", "--run_name", "r2", *allowed, code=0)
    assert "r2 trained nothing: no training job was submitted" in result.output
    assert "promoted    no: no training job was submitted, so the base model stays" in result.output


@pytest.mark.slow
def test_its_epochs_are_shown_as_what_they_are(project, remote):  # noqa: F811
    stages, episodes = [], {}

    class Recorder(SilentProgress):
        def stage(self, epoch, stage, total):
            stages.append((epoch, stage, total))

        def episode(self, outcome, reward, num_tokens):
            episodes[stages[-1]] = episodes.get(stages[-1], 0) + 1

    use_trainer(project, remote, 2).write_files()
    run_config(load_config("run.yml"), RunOptions(run_name="r", progress=Recorder()))
    assert episodes == {
        (None, "BASELINE", 10): 10,
        (0, "COLLECT", 152): 152,
        (0, "VALIDATE", None): 10,
        (1, "COLLECT", 152): 152,
        (1, "VALIDATE", None): 10,
        (1, "VALIDATE", 10): 10,
    }, "nothing of an epoch counts as baseline"
    of_epoch = [stage for epoch, stage, _ in stages if epoch == 0]
    assert of_epoch == ["COLLECT", "SUBMIT", "AWAIT", "VALIDATE"]
