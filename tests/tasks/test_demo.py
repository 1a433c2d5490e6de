"""The demos' configurations measure what their figures claim."""

import pytest

from reinforge.config.loader import load_config
from reinforge.tasks.tic_tac_toe import DEMO, DEMO_LONG
from reinforge.tasks.tic_tac_toe.dataset import TicTacToeDataset


@pytest.mark.parametrize("path", [DEMO, DEMO_LONG], ids=lambda path: path.stem)
def test_the_metric_of_a_demo_is_the_plain_win_rate_against_a_random_opponent(path):
    config = load_config(path).config
    dataset, run = config.eval.general.dataset, config.finetuning
    assert run.gate.metric == "win"
    assert config.eval.evaluators["win"].static_type == "tic_tac_toe_win"
    assert run.splits.key == "split"
    confirm = [row for row in TicTacToeDataset(dataset).rows() if row["split"] == "confirm"]
    assert len(confirm) >= 1000
    assert {row["opponent"] for row in confirm} == {"random"}
    assert dataset.num_train >= run.num_epochs * config.trajectory_builders["groups"].examples_per_epoch
    assert run.curriculum_learning.min_reward_diff < config.eval.evaluators["shaped"].per_move
