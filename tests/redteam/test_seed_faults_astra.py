"""Faults 1-19 of astra-rl (seed-faults.md), where the same feature exists here."""

import pytest
import torch

from tests.faults import assert_every_fault_has_a_test
from tests.redteam.toy import ToySystem

AST, LOSSES = "tests/redteam/test_ast.py::", "tests/redteam/test_redteam_losses.py::"
TRAINING, ENGINE = "tests/redteam/test_training.py::", "tests/redteam/test_engine_training.py::"
COVERED = {
    1: [
        f"{TRAINING}test_batches_have_the_configured_size_and_the_last_is_not_dropped",
        f"{TRAINING}test_a_partial_accumulation_is_stepped",
        f"{TRAINING}test_gradients_are_clipped_and_the_schedule_changes_the_rate",
        f"{TRAINING}test_resumed_training_equals_uninterrupted_training",
    ],
    2: [f"{LOSSES}test_ppo"],
    3: [f"{LOSSES}test_ppo"],
    4: [f"{LOSSES}test_ppo", f"{LOSSES}test_ppo_of_a_step_without_credit"],
    5: [f"{LOSSES}test_ppo", f"{LOSSES}test_ppo_credit_follows_the_path_and_averages_over_branches"],
    6: [f"{TRAINING}test_a_users_system_learns_the_reward", f"{LOSSES}test_ppo_of_a_step_without_credit"],
    7: [
        f"{TRAINING}test_equal_rewards_and_equal_texts_make_no_pair",
        f"{ENGINE}test_the_engine_trains_and_the_baseline_stays",
    ],
    8: [f"{AST}test_log_probs_after_zeros_for_the_context_give_the_same_perplexity"],
    9: [f"{AST}test_zero_is_a_seed_and_seeds_give_different_trees"],
    10: [f"{AST}test_metrics_computed_by_hand"],
    11: [f"{AST}test_metrics_computed_by_hand", f"{AST}test_eval_rollout_takes_a_text_a_number_or_none"],
    12: [f"{TRAINING}test_each_episode_has_its_own_seed_and_experiences_differ"],
    13: [f"{AST}test_one_forward_gives_log_probs_and_values", f"{ENGINE}test_hugging_face_variants"],
    14: [
        f"{AST}test_one_forward_gives_log_probs_and_values",
        f"{ENGINE}test_the_engine_trains_and_the_baseline_stays",
    ],
    15: [f"{AST}test_the_sampled_tokens_are_trained"],
    17: [
        f"{TRAINING}test_an_ast_sampler_has_a_default_evaluator",
        f"{ENGINE}test_a_checkpoint_that_cannot_be_loaded_is_an_error",
    ],
    19: [
        "tests/redteam/test_core.py::test_invalid_logprobs_are_rejected",
        "tests/redteam/test_core.py::test_only_the_tester_needs_gradient",
        f"{TRAINING}test_weights_and_biases_installed_and_not_installed",
        f"{TRAINING}test_old_checkpoints_are_deleted_and_used_folders_rejected",
    ],
}


def test_every_fault_has_a_test():
    assert_every_fault_has_a_test(range(1, 20), "astra", __file__, COVERED, not_there_yet=())


def test_astra_16_padding_does_not_change_a_short_replys_logprobs(make_problem):
    problem = make_problem()
    together = problem.get_tester_logprobs(["hello", "Paris"], ["yes", "the quick brown fox jumps over"])
    alone = problem.get_tester_logprobs(["hello"], ["yes"])
    width = alone.shape[1]
    assert torch.allclose(together[0, :width], alone[0], atol=1e-5)
    assert not together[0, width:].any()


def test_astra_18_the_earlier_names_of_methods_are_accepted_with_a_warning():
    with pytest.warns(DeprecationWarning, match="rename it") as warned:

        class Old(ToySystem):
            def get_auditor_logprobs(self, context, continuation):
                return torch.full((len(context), 2), -1.0, requires_grad=True)

            def rollout_prompt_with_auditor(self, x):
                return ["red blue"] * len(x)

    assert [str(each.message) for each in warned] == [
        "Old.get_auditor_logprobs: rename it to get_tester_logprobs",
        "Old.rollout_prompt_with_auditor: rename it to rollout_prompt_with_tester",
    ]
    assert {each.filename for each in warned} == {__file__}
    assert Old().get_tester_logprobs(["x"], ["y"]).tolist() == [[-1.0, -1.0]]
    assert Old().sample_probes(["x"], [0]) == ["red blue"]
