"""Faults 1-19 of the ART plugin (seed-faults.md), as far as what they concern exists here."""

import pytest

from reinforge.finetuning import (
    ARTTrainer,
    ARTTrainerConfig,
    EpisodeItem,
    FinetuneConfig,
    TokenLogprobs,
    Trajectory,
    TrajectoryCollection,
)
from tests.faults import assert_every_fault_has_a_test

COVERED = {
    1: [
        "tests/core/trainer/test_loop.py"
        "::test_a_job_that_does_not_complete_and_weights_that_are_not_served_stop_the_run",
        "tests/core/e2e/test_whole_run.py::test_every_file_of_the_run_folder",
    ],
    2: ["tests/core/engine/test_learning_rate.py::test_the_engine_uses_the_rate_that_is_printed"],
    3: [
        "tests/core/algorithms/test_policy_gradient.py::test_dapo_is_grpo_with_a_wider_upper_clip_and_a_mean_over_tokens"
    ],
    4: ["tests/core/rollout/test_episode.py::test_tool_calls_and_content_blocks_are_kept"],
    5: ["tests/core/algorithms/test_algorithms.py::test_an_untrainable_sibling_still_counts_in_the_mean"],
    6: ["tests/core/e2e/test_own_trainers.py::test_an_unhealthy_backend_is_noticed_around_any_trainer"],
    9: [
        "tests/core/e2e/test_user_components.py::test_a_failed_job_that_a_trainer_only_returns_fails_the_run",
        "tests/core/trainer/test_outside_a_run.py::test_cleanup_cancels_what_is_being_collected",
    ],
    10: [
        "tests/core/trainer/test_outside_a_run.py::test_a_generation_that_fails_ends_the_collection_and_leaves_nothing_behind",
        "tests/fault/test_episode_counts.py::test_every_episode_is_accounted_for",
    ],
    11: ["tests/core/e2e/test_bad_input.py::test_groups_of_one"],
    13: ["tests/fault/test_episode_counts.py::test_every_episode_is_accounted_for"],
    14: ["tests/core/trainer/test_loop.py::test_epochs_without_signal_end_the_run_with_the_reason"],
    15: ["tests/core/e2e/test_whole_run.py::test_every_file_of_the_run_folder"],
    16: ["tests/core/trainer/test_loop.py::test_the_curriculum_is_in_the_history_and_the_files"],
    18: ["tests/core/rollout/test_episode.py::test_targets_by_model_and_function"],
    19: ["tests/core/e2e/test_commands.py::test_a_plugin_that_fails_to_import_is_listed_with_its_error"],
}
NOT_THERE_YET = (7, 8)
"""They concern the client of a remote ART server, which comes with the remote backends."""


def test_every_fault_has_a_test():
    assert_every_fault_has_a_test(range(1, 20), "art", __file__, COVERED, NOT_THERE_YET)


def turn(*ids, **fields):
    tokens = TokenLogprobs((1, 2), ids, (-0.1,) * len(ids)) if ids else None
    return EpisodeItem(role="assistant", content="x", logprobs=tokens, **fields)


def trajectory(reward, *items):
    return Trajectory(episode=[EpisodeItem(role="user", content="q"), *items], reward=reward)


def test_art_12_a_turn_without_logprobs_is_context_that_the_model_saw():
    kept = trajectory(1.0, turn(), EpisodeItem(role="user", content="again"), turn(5))
    assert [item.role.value for item in kept.episode] == ["user", "assistant", "user", "assistant"]
    assert [item.is_trained for item in kept.turns] == [False, True]
    assert kept.is_trainable


def make_trainer(**curriculum):
    trainer = ARTTrainer(ARTTrainerConfig())
    trainer.curriculum_config = FinetuneConfig(curriculum_learning=curriculum).curriculum_learning
    trainer.run_config = FinetuneConfig()
    trainer._curriculum_state = {"current_percentile": 0.3, "last_expansion_epoch": -1}
    return trainer


@pytest.mark.parametrize("enabled", [False, True])
async def test_art_17_a_group_without_variance_goes_with_or_without_a_curriculum(enabled):
    trainer = make_trainer(enabled=enabled)
    same = [trajectory(1, turn(3)), trajectory(1, turn(4))]
    one = TrajectoryCollection(trajectories=[same], run_id="r")
    assert trainer.apply_curriculum_learning(one, 0).trajectories == [], "also where it is the only group"
    differs = [t.model_copy(update={"group_id": "example-7"}) for t in (trajectory(0, turn(3)), trajectory(1, turn(4)))]
    both = TrajectoryCollection(trajectories=[same, differs], run_id="r")
    assert len(trainer.apply_curriculum_learning(both, 0).trajectories) == 1
    assert trainer.get_curriculum_state()["included_groups"] == ["example-7"], "ids, not positions"


async def test_the_curriculum_judges_plain_messages_outside_a_run():
    """Trajectories of a user's own code, which no run has recorded."""
    trainer = make_trainer()
    said = [EpisodeItem(role="user", content="2+2?"), EpisodeItem(role="assistant", content="4")]
    groups = [[Trajectory(episode=said, reward=reward) for reward in rewards] for rewards in ((0, 1), (1, 1), (0, 0.5))]
    kept = trainer.apply_curriculum_learning(TrajectoryCollection(trajectories=groups, run_id="r"), 0)
    assert [[each.reward for each in group] for group in kept.trajectories] == [[0, 1], [0, 0.5]]
