"""What a run tells its user: power, parts of a reward, constant rewards, forgotten returns, what a stop leaves."""

import json
import re

import pytest

from reinforge.errors import BudgetReached, EvaluationError, JobFailed
from reinforge.runs.progress import SilentProgress
from reinforge.trainer import run as run_module
from tests.doubles import RecordingAdapter, ScriptedPolicy
from tests.project import call
from tests.scripted_run import ScriptedRun


class Transcript(SilentProgress):
    def __init__(self):
        self.settings, self.notes = {}, []

    def start(self, run_id, folder, num_epochs, settings):
        self.settings = dict(settings)

    def note(self, text):
        self.notes.append(text)


class SavingAdapter(RecordingAdapter):
    """Its weights are the number of the version."""

    async def save(self, folder, version):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"version": version}))
        return True

    async def restore(self, folder, version):
        await self.server.publish(json.loads((folder / "config.json").read_text())["version"])
        return True


class LearningRun(ScriptedRun):
    def __init__(self, folder, count=40, **fields):
        super().__init__(folder, count=count, **fields)
        policy = ScriptedPolicy(lambda request: f"form {policy.version} {request.sampling.seed % 7}")
        self.adapter, self.progress = SavingAdapter(policy), Transcript()

    async def run(self, **options):
        return await super().run(progress=self.progress, **options)


def version_of(output):
    return int(output.split()[1])


def by_version(output, expected):
    """Rises with every version, and differs between siblings."""
    return version_of(output) + float(output[-1]) / 10


def never(output, expected):
    return 0.0


def python(function):
    return {"_type": "python", "function": function}


def show(run, *arguments):
    return call("runs", *arguments, "--output_dir", str(run.folder)).output


async def test_a_gain_of_one_part_alone_comes_with_a_warning_everywhere(tmp_path):
    run = LearningRun(tmp_path)
    weights = {"_type": "weighted", "weights": {"judge": 0.8, "format": 0.2}}
    run.settings["eval"]["evaluators"] = {"judge": python(never), "format": python(by_version), "reward": weights}
    summary = await run.run()
    assert summary.promoted is True
    assert summary.headline() == "improved the agent (read the warning)"
    judge, form, reward = summary.evaluators
    assert (judge.metric, judge.before.mean, judge.after.mean, judge.weight) == ("judge", 0.0, 0.0, 0.8)
    assert form.after.mean > form.before.mean + 0.5
    assert reward.metric == "reward"
    report = (summary.folder / "report.md").read_text()
    written = json.loads((summary.folder / "summary.json").read_text())
    for text in ("\n".join(summary.closing_lines(color=False)), report, written["warnings"][0]):
        assert "the gain is that of format alone" in text
    assert [each["metric"] for each in written["evaluators"]] == ["judge", "format", "reward"]
    assert "| evaluator | judge 0.000" in report


@pytest.mark.slow
async def test_a_constant_reward_is_told_once_before_training_and_ends_without_an_offer_to_resume(tmp_path, plots):
    run = LearningRun(tmp_path, reward=never)
    run.settings["finetuning"]["limits"] = {"max_refills": 0}
    run.settings["finetuning"]["num_epochs"] = 5
    with pytest.raises(
        JobFailed, match=r'All \d+ episodes have the reward 0; example \d+: question "q\d+", '
    ) as caught:
        await run.run()
    assert [note.split(";")[0] for note in run.progress.notes if not note.startswith("warning: no metric apart")] == [
        "note: before training: all 6 episodes have the reward 0"
    ]
    assert re.search(r"`reinforge runs show \S+ --episode collect/", str(caught.value)), "it names an episode"
    assert "saved in" in caught.value.__notes__[0]
    assert "resume" not in "".join(caught.value.__notes__)
    for shown in (show(run, "list"), show(run, "show", "r"), (tmp_path / "r" / "report.md").read_text()):
        assert "r" in shown
        assert "--resume" not in shown
        assert "resume=" not in shown


async def test_a_failure_that_a_resume_can_help_offers_it(tmp_path):
    """The mutation of the test above: the same command does offer it after another failure."""
    run = LearningRun(tmp_path, reward=by_version)
    run.adapter.outcome = "failed"
    with pytest.raises(JobFailed) as caught:
        await run.run()
    assert "resume with: reinforge.finetune(..., resume=" in "".join(caught.value.__notes__)
    assert "resume r with: reinforge.finetune(..., resume=" in show(run, "list")


async def test_a_forgotten_return_is_told_with_its_line_where_the_evaluator_fails_on_none(tmp_path):
    async def forgets(item, llm, context):
        await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])

    with pytest.raises(EvaluationError, match="reward_error") as caught:
        await LearningRun(tmp_path, workflow=forgets, reward=by_version).run()
    assert caught.value.__notes__[0] == (
        f"forgets (test_reporting.py:{forgets.__code__.co_firstlineno}) returned None in all 6 episodes: "
        "is a `return` missing?"
    )


@pytest.mark.slow
async def test_a_stopped_run_tells_its_best_checkpoint_how_to_use_it_and_how_to_resume(tmp_path):
    run = LearningRun(tmp_path, reward=by_version)
    run.settings["finetuning"] |= {"num_epochs": 30, "run_configuration": {"validation_interval": 1}}
    run.settings["finetuning"]["limits"] = {"max_tokens": 4000}
    with pytest.raises(BudgetReached) as caught:
        await run.run()
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    validations = json.loads((tmp_path / "r" / "validation_history.json").read_text())
    best = max(validations, key=lambda row: row["avg_reward"])
    assert best["epoch"] > 0
    assert (summary["status"], summary["checkpoint"]) == ("stopped", best["checkpoint"])
    assert summary["best"]["mean"] == best["avg_reward"] > summary["baseline"]["mean"]
    saved, told, *verdict, resume = "\n".join(caught.value.__notes__).splitlines()
    assert saved.startswith(f"saved in {tmp_path / 'r'}")
    assert told.startswith(f"best so far: {best['checkpoint']}, {best['avg_reward']:.3f} [")
    assert f"reinforge chat {tmp_path / 'r'}" in told
    assert [line.split(":")[0] for line in verdict] == ["reward", "improvement", "promoted"]
    assert resume.startswith("resume with: reinforge.finetune(..., resume=")
    report = (tmp_path / "r" / "report.md").read_text()
    assert "confirm examples" in report
    assert "-> unknown" not in report


async def test_a_killed_run_tells_its_best_checkpoint_too(tmp_path, monkeypatch):
    """It wrote no summary: what it validated stands in the journal."""

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    run = LearningRun(tmp_path, reward=by_version)
    run.settings["finetuning"] |= {"num_epochs": 2, "run_configuration": {"validation_interval": 1}}
    monkeypatch.setattr(run_module, "write_run_files", die)
    with pytest.raises(Killed):
        await run.run()
    text = show(run, "show", "r")
    assert re.search(r"  best        checkpoints/step-00000[12], \d\.\d{3} \[.*; try it with `reinforge chat ", text), (
        text
    )
