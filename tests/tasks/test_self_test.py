"""The self-test of `doctor`: a run that stops, resumes, learns and verifies; and every way in which it fails."""

import json
import sys

import pytest
from click.testing import CliRunner

from reinforge.cli import doctor, main
from reinforge.errors import BackendUnavailable, BudgetReached, JobFailed, StorageError
from reinforge.runs.summary import RunSummary
from reinforge.tasks.self_test import learning
from reinforge.tasks.self_test.agent import score_even
from reinforge.tasks.self_test.learning import LearningResult, run_self_test
from reinforge.trainer.run import run_config
from reinforge.types.evaluation import MetricSummary


def test_even_digits_are_right():
    assert [score_even(text, None) for text in ("4", "7", "x", "", "46", "-1")] == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]


class FakeRun:
    """Stops when it is asked to, and then says what it was told to say."""

    def __init__(self, folder, promoted=True, stops=True, reason=""):
        self.folder, self.promoted, self.stops, self.reason, self.resumed = folder, promoted, stops, reason, []

    def __call__(self, loaded, options):
        self.resumed.append(options.resume)
        if loaded.config.finetuning.limits.max_tokens is not None and self.stops:
            raise BudgetReached("limits.max_tokens reached")
        arm = MetricSummary("even", 0.1, 0.0, 0.2, 100, 0)
        return RunSummary("r", "completed", self.folder, self.reason, confirm_base=arm, promoted=self.promoted)


def test_a_run_that_does_not_stop_is_a_failure(tmp_path):
    with pytest.raises(StorageError, match="was not stopped after 1500 tokens"):
        run_self_test(tmp_path, run=FakeRun(tmp_path, stops=False))


def test_a_model_that_does_not_learn_is_a_failure(tmp_path):
    fake = FakeRun(tmp_path, promoted=False, reason="the interval includes 0")
    with pytest.raises(JobFailed, match=r"has not learned the task: before 0.100 .* \(the interval includes 0\)"):
        run_self_test(tmp_path, run=fake)
    assert fake.resumed == [None, tmp_path / "runs" / "self-test"], "the second call resumes the first one"


@pytest.mark.slow
def test_this_machine_passes_the_whole_check(tmp_path):
    """What `reinforge doctor` does, unchanged: CI fails where a tiny model does not learn."""
    result = invoke("--output_dir", str(tmp_path / "runs"), "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    learning_check = json.loads(result.stdout)["checks"][-1]
    assert learning_check["state"] == "ok"
    assert "the run was stopped, resumed and verified" in learning_check["text"]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.slow
def test_a_damaged_file_is_found(tmp_path):
    def run_and_damage(loaded, options):
        summary = run_config(loaded, options)
        file = next((summary.folder / "checkpoints").rglob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        return summary

    with pytest.raises(StorageError, match="does not hold what was written to it"):
        run_self_test(tmp_path, device="cpu", run=run_and_damage)


@pytest.mark.slow
def test_training_without_effect_is_found(tmp_path):
    """What a broken backward pass looks like: everything runs, and nothing is learned."""

    def run_without_learning(loaded, options):
        loaded.config.finetuning.policy.optimizer.learning_rate = 1e-9
        return run_config(loaded, options)

    with pytest.raises(JobFailed, match="has not learned the task"):
        run_self_test(tmp_path, device="cpu", run=run_without_learning)


def invoke(*arguments):
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_doctor_says_that_everything_works(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "run_self_test", lambda folder, device: LearningResult(0.1, 0.9, "it learned", 3.0))
    result = invoke("--output_dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "it learned, in 3.0 s" in result.output
    assert result.output.splitlines()[-1] == "everything works"
    found = json.loads(invoke("--output_dir", str(tmp_path), "--json").stdout)
    assert found["ok"] is True
    assert found["checks"][-1]["name"] == "learning"


def test_doctor_exits_with_4_and_a_fix_if_nothing_is_learned(tmp_path, monkeypatch):
    def fail(folder, device):
        raise JobFailed("the model has not learned the task")

    monkeypatch.setattr(learning, "run_self_test", fail)
    result = invoke("--output_dir", str(tmp_path))
    assert result.exit_code == 4
    assert "JobFailed: the model has not learned the task" in result.output
    assert "fix: " in result.output
    assert result.output.splitlines()[-1] == "something is broken: see above"


@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_works_where_reinforge_itself_cannot_be_imported(tmp_path, monkeypatch, as_json):
    monkeypatch.setitem(sys.modules, "reinforge.trainer.setup.installation", None)
    result = invoke("--output_dir", str(tmp_path), *(["--json"] if as_json else []))
    assert result.exit_code == 4
    assert "reinforge cannot be imported" in result.output
    assert "pip install" in result.output


def test_doctor_does_not_train_on_a_broken_installation(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")

    def fail(folder, device):
        raise BackendUnavailable("must not be called")

    monkeypatch.setattr(learning, "run_self_test", fail)
    result = invoke("--output_dir", str(tmp_path / "file"))
    assert result.exit_code == 4
    assert "cannot hold a run" in result.output
    assert "must not be called" not in result.output
    assert invoke("--output_dir", str(tmp_path), "--no_training").exit_code == 0
    assert doctor.BROKEN == 4
