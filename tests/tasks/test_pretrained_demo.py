"""`reinforge demo --pretrained` from end to end, with a tiny random model in the place of the pretrained one."""

import json

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from tests.models import make_tiny_model


def call(*arguments):
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


def shrink(model):
    """Returns the overrides with which a random model learns something in four short epochs."""
    sizes = {
        "finetuning.policy.model": model,
        "eval.evaluators.reward": "{_type: regex, pattern: '(^|\\n)[a-z]'}",  # a random model soon gets more of it
        "finetuning.policy.max_model_len": 1024,
        "finetuning.policy.optimizer.learning_rate": 1e-2,
        "finetuning.gate.metric": "reward",
        "finetuning.num_epochs": 4,
        "finetuning.run_configuration.validation_interval": 1,
        "eval.general.dataset.num_train": 32,
        "eval.general.dataset.num_select": 8,
        "eval.general.dataset.num_confirm": 20,
        "trajectory_builders.groups.examples_per_epoch": 8,
    }
    return [part for path, value in sizes.items() for part in ("-o", path, str(value))]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--calculator"]], ids=["answer", "calculator"])
def test_a_run_trains_and_shows_problems_with_the_replies_before_and_after(model, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    done = call("demo", "--pretrained", *flags, *shrink(model), "--run_name", "r")
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / ".reinforge" / "runs" / "r" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["confirm_tuned"]["num_examples"] == 20
    assert done.stdout.count("\n  before  ") == done.stdout.count("\n  after   ") >= 1
    assert "src/reinforge/tasks/word_problems" in done.stdout


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--calculator"], "--calculator needs --pretrained"),
        (["--pretrained", "--long"], "--long cannot be combined with --pretrained"),
        (["--pretrained", "--resume", "last"], "--resume cannot be combined"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, problem):
    refused = call("demo", *flags)
    assert refused.exit_code == 2
    assert problem in refused.stderr
