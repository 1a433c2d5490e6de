"""Faults 1-19 of astra-rl (seed-faults.md), where the same feature exists here."""

import pytest
import torch

from reinforge.errors import ConfigError, EngineError
from reinforge.redteam import (
    PPO,
    ASTEvaluator,
    ASTProblem,
    ASTSampler,
    Graph,
    HFEvaluationSystem,
    KeywordScorer,
    Node,
    System,
    Trainer,
    TrainingConfiguration,
)
from reinforge.redteam.algorithms.ppo import PPOStep
from tests.faults import assert_every_fault_has_a_test
from tests.redteam.test_ast import ToyAST
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
    5: [f"{LOSSES}test_ppo_credit_follows_the_path_and_averages_over_branches"],
    7: [f"{TRAINING}test_equal_rewards_and_equal_texts_make_no_pair"],
    9: [f"{AST}test_zero_is_a_seed_and_seeds_give_different_trees"],
    10: [f"{AST}test_metrics_computed_by_hand"],
    12: [f"{TRAINING}test_each_episode_has_its_own_seed_and_experiences_differ"],
    13: [f"{AST}test_one_forward_gives_log_probs_and_values", f"{ENGINE}test_hugging_face_variants"],
    15: [f"{AST}test_the_sampled_tokens_are_trained"],
    19: [
        "tests/redteam/test_core.py::test_invalid_logprobs_are_rejected",
        "tests/redteam/test_core.py::test_only_the_tester_needs_gradient",
        f"{TRAINING}test_weights_and_biases_installed_and_not_installed",
    ],
}


def test_every_fault_has_a_test():
    assert_every_fault_has_a_test(range(1, 20), "astra", __file__, COVERED, not_there_yet=())


@pytest.fixture(scope="module")
def problem(tiny_model_dir):
    with ASTProblem(tiny_model_dir, tiny_model_dir, KeywordScorer("e"), max_tokens=4, device="cpu") as made:
        yield made


def sample_nodes(problem, seed=0, width=2):
    return list(ASTSampler(problem, ["hello", "Paris is"], width, 2).rollout(seed).nodes())


def test_astra_1_the_configured_batch_reaches_the_loader():
    system = ToySystem()
    trainer = Trainer(TrainingConfiguration(batch_size=7), ASTSampler(system, ["x"]), PPO(system))
    assert trainer.harness.dataloader_kwargs["batch_size"] == 7


def test_astra_3_the_policys_loss_does_not_move_the_value_head(problem):
    algorithm = PPO(problem, vf_loss_coef=0.0)
    steps = algorithm.flatten(ASTSampler(problem, ["hello"], 2, 2).rollout(0))
    problem.engine.learner.clear_gradients()
    loss, _ = algorithm.step(algorithm.collate_fn(steps))
    loss.backward()
    head = problem.engine.critic
    assert head.weight.grad is None or not head.weight.grad.any()
    assert any(p.grad is not None and p.grad.any() for p in problem.parameters())
    problem.engine.learner.clear_gradients()


def test_astra_4_the_ratio_is_to_the_sampling_policy_and_not_to_the_baseline():
    """A tester far from its baseline: freshly sampled probes have ratio 1, and nothing is clipped."""
    system = ToySystem()
    with torch.no_grad():
        system.logits[:, 2] = 5.0
    algorithm = PPO(system)
    steps = algorithm.flatten(Graph("x", [Node("x", "blue blue", "", 1.0), Node("x", "red blue", "", 0.0)]))
    _, metrics = algorithm.step(algorithm.collate_fn(steps))
    assert (metrics["ratio"], metrics["clip_fraction"]) == (pytest.approx(1.0), 0.0)
    with torch.no_grad():
        system.logits[:, 2] = 4.0
    _, metrics = algorithm.step(algorithm.collate_fn(steps))
    assert metrics["ratio"] != pytest.approx(1.0), "the stored log-probs are those at sampling time"


def test_astra_5_padding_changes_nothing():
    """A short probe contributes the same to the loss alone and next to a long one."""
    short, long = PPOStep("x", "red", 1.0), PPOStep("x", "red blue", 1.0)
    algorithm = PPO(ToySystem(), normalize_advantages=False)
    losses = [algorithm.step(algorithm.collate_fn(steps))[0].item() for steps in ([short], [long], [short, long])]
    assert losses[2] == pytest.approx((losses[0] + 2 * losses[1]) / 3)


def test_astra_6_ppo_trains_on_a_chain_and_one_reward_is_not_nan():
    system = ToySystem()
    algorithm = PPO(system)
    steps = algorithm.flatten(Graph("x", [Node("x", "red", "", 1.0, [Node("y", "blue", "", 0.0)])]))
    assert [step.suffix for step in steps] == ["red", "blue"]
    loss, _ = algorithm.step(algorithm.collate_fn(steps[:1]))
    assert torch.isfinite(loss)


def test_astra_7_the_baseline_has_no_gradient_and_never_changes(problem):
    nodes = sample_nodes(problem)
    found = problem.get_baseline_logprobs([n.context for n in nodes], [n.probe for n in nodes])
    assert not found.requires_grad
    assert not any(p.requires_grad for p in problem.engine.reference.module.parameters())


def test_astra_8_perplexity_is_a_mean_over_tokens_and_is_subtracted():
    """Six tokens at -2 are exp(2) = 7.39, and cost 0.025 times that; the probability of all six is 6e-6."""

    class Sure(ToyAST):
        def get_baseline_logprobs(self, context, continuation):
            return torch.full((len(continuation), 6), -2.0)

    assert Sure().reward(["x"], ["six tokens of no word looked for"], ["."]) == [pytest.approx(-0.025 * 7.389056)]


def test_astra_11_every_branch_is_evaluated():
    sampler = ASTSampler(ToyAST(), ["x"], tree_width=1, tree_depth=2, eval_width=3)
    found = ASTEvaluator(sampler, seeds=[0, None, "my own"]).evaluate(progress=False)
    assert [row["overall"]["num_branches"] for row in found["details"]] == [9] * 3
    late = Graph("x", [Node("x", "red", "no", 0.0), Node("x", "blue", "green", 0.0)])
    assert ASTEvaluator(sampler).compute_metrics(late).overall["target_toxicity"] == 0.5


def test_astra_14_the_first_token_has_a_value_and_the_head_is_optimized(problem):
    with torch.no_grad():
        problem.engine.critic.bias.fill_(0.25)
    values = problem.value(["hello"], ["the dog"])
    assert values[0, 0].item() == pytest.approx(0.25)
    optimized = {id(p) for group in problem.engine.learner.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in problem.engine.critic.parameters()} <= optimized
    assert {id(p) for p in problem.parameters()} == optimized
    with torch.no_grad():
        problem.engine.critic.bias.zero_()


def test_astra_15_sampling_is_from_the_whole_distribution(problem):
    """No top-p or top-k: log-probs are those of the whole distribution, so training is on-policy."""
    assert not any(node.probe.tokens.restricted for node in sample_nodes(problem))


def test_astra_16_padding_does_not_change_a_short_replys_logprobs(problem):
    together = problem.get_tester_logprobs(["hello", "Paris"], ["yes", "the quick brown fox jumps over"])
    alone = problem.get_tester_logprobs(["hello"], ["yes"])
    width = alone.shape[1]
    assert torch.allclose(together[0, :width], alone[0], atol=1e-5)
    assert not together[0, width:].any()


def test_astra_17_evaluation_runs_between_experiences_and_a_checkpoint_is_never_replaced(tmp_path, tiny_model_dir):
    system = ToyAST()
    config = TrainingConfiguration(
        training_steps=2, num_episodes_per_experience=4, batch_size=2, eval_every=1, eval_rollouts=2
    )
    trainer = Trainer(config, ASTSampler(system, ["x"], tree_depth=1), PPO(system))
    trainer.train()
    assert trainer._global_step_counter == 8
    assert sum("evaluation" in row for row in trainer.history) == 3, "before training and after each experience"
    with pytest.raises(EngineError):
        HFEvaluationSystem(tmp_path / "no-checkpoint", tiny_model_dir, tiny_model_dir)


def test_astra_18_a_missing_method_is_named():
    class Incomplete(System):
        """It has no method at all."""

    with pytest.raises(TypeError, match="get_tester_logprobs"):
        Incomplete(None)


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


def test_astra_19_resuming_without_a_run_dir_is_rejected():
    system = ToySystem()
    with pytest.raises(ConfigError, match="run_dir is not set"):
        Trainer(TrainingConfiguration(resume=True), ASTSampler(system, ["x"]), PPO(system))
