"""Faults 1-19 of astra-rl (seed-faults.md), as far as what they concern exists here."""

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
from tests.unit.redteam.test_ast import ToyAST
from tests.unit.redteam.toy import ToySystem

AST, LOSSES = "tests/unit/redteam/test_ast.py::", "tests/numerics/test_redteam_losses.py::"
TRAINING, ENGINE = "tests/unit/redteam/test_training.py::", "tests/unit/redteam/test_engine_training.py::"
COVERED = {
    1: [
        f"{TRAINING}test_batches_have_the_configured_size_and_the_last_is_kept",
        f"{TRAINING}test_the_remainder_of_an_accumulation_is_kept",
        f"{TRAINING}test_gradients_are_clipped_and_the_schedule_moves_the_rate",
        f"{TRAINING}test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been",
    ],
    2: [f"{LOSSES}test_ppo"],
    5: [f"{LOSSES}test_credit_goes_along_the_path_and_is_the_mean_over_branches"],
    7: [f"{TRAINING}test_equal_rewards_and_equal_texts_make_no_pair"],
    9: [f"{AST}test_zero_is_a_seed_and_seeds_are_different"],
    10: [f"{AST}test_figures_by_hand"],
    12: [f"{TRAINING}test_each_episode_has_a_seed_of_its_own_and_experiences_differ"],
    13: [f"{AST}test_one_forward_gives_log_probs_and_values", f"{ENGINE}test_hugging_face_forms"],
    15: [f"{AST}test_the_sampled_tokens_are_those_that_are_trained"],
    19: [
        "tests/unit/redteam/test_core.py::test_log_probs_that_are_none_are_refused",
        "tests/unit/redteam/test_core.py::test_models_may_stand_on_another_device_and_need_no_gradient_but_the_testers",
        f"{TRAINING}test_weights_and_biases_where_it_is_installed_and_where_not",
    ],
}


def test_every_fault_has_a_test():
    assert_every_fault_has_a_test(range(1, 20), "astra", __file__, COVERED, not_there_yet=())


@pytest.fixture(scope="module")
def problem(tiny_model_dir):
    with ASTProblem(tiny_model_dir, tiny_model_dir, KeywordScorer("e"), max_tokens=4, device="cpu") as made:
        yield made


def drawn(problem, seed=0, width=2):
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


def test_astra_4_the_ratio_is_to_the_policy_that_drew_and_not_to_the_baseline():
    """A tester far from its baseline: what it draws now has the ratio 1, and nothing is clipped."""
    system = ToySystem()
    with torch.no_grad():
        system.logits[:, 2] = 5.0
    algorithm = PPO(system)
    steps = algorithm.flatten(Graph("x", [Node("x", "blue blue", "", 1.0), Node("x", "red blue", "", 0.0)]))
    _, told = algorithm.step(algorithm.collate_fn(steps))
    assert (told["ratio"], told["clip_fraction"]) == (pytest.approx(1.0), 0.0)
    with torch.no_grad():
        system.logits[:, 2] = 4.0
    _, told = algorithm.step(algorithm.collate_fn(steps))
    assert told["ratio"] != pytest.approx(1.0), "the stored log-probs are those of the draw"


def test_astra_5_padding_changes_nothing():
    """A short probe by itself and beside a long one: its part of the loss and of the mean is the same."""
    short, long = PPOStep("x", "red", 1.0), PPOStep("x", "red blue", 1.0)
    algorithm = PPO(ToySystem(), normalize_advantages=False)
    losses = [algorithm.step(algorithm.collate_fn(steps))[0].item() for steps in ([short], [long], [short, long])]
    assert losses[2] == pytest.approx((losses[0] + 2 * losses[1]) / 3)


def test_astra_6_a_chain_teaches_ppo_and_one_reward_is_no_nan():
    system = ToySystem()
    algorithm = PPO(system)
    steps = algorithm.flatten(Graph("x", [Node("x", "red", "", 1.0, [Node("y", "blue", "", 0.0)])]))
    assert [step.suffix for step in steps] == ["red", "blue"]
    loss, _ = algorithm.step(algorithm.collate_fn(steps[:1]))
    assert torch.isfinite(loss)


def test_astra_7_the_baseline_carries_no_gradient_and_never_moves(problem):
    nodes = drawn(problem)
    found = problem.get_baseline_logprobs([n.context for n in nodes], [n.probe for n in nodes])
    assert not found.requires_grad
    assert not any(p.requires_grad for p in problem.engine.reference.module.parameters())


def test_astra_8_perplexity_is_a_mean_over_tokens_and_is_subtracted():
    """Six tokens at -2 are exp(2) = 7.39, and cost 0.025 times that; the probability of all six is 6e-6."""

    class Sure(ToyAST):
        def get_baseline_logprobs(self, context, continuation):
            return torch.full((len(continuation), 6), -2.0)

    assert Sure().reward(["x"], ["six tokens of no word looked for"], ["."]) == [pytest.approx(-0.025 * 7.389056)]


def test_astra_11_every_branch_is_looked_at():
    sampler = ASTSampler(ToyAST(), ["x"], tree_width=1, tree_depth=2, eval_width=3)
    found = ASTEvaluator(sampler, seeds=[0, None, "my own"]).evaluate(progress=False)
    assert [row["overall"]["num_branches"] for row in found["details"]] == [9] * 3
    late = Graph("x", [Node("x", "red", "no", 0.0), Node("x", "blue", "green", 0.0)])
    assert ASTEvaluator(sampler).compute_metrics(late).overall["target_toxicity"] == 0.5


def test_astra_14_the_first_tokens_value_is_there_and_the_head_is_in_the_optimizer(problem):
    with torch.no_grad():
        problem.engine.critic.bias.fill_(0.25)
    values = problem.value(["hello"], ["the dog"])
    assert values[0, 0].item() == pytest.approx(0.25)
    moved = {id(p) for group in problem.engine.learner.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in problem.engine.critic.parameters()} <= moved
    assert {id(p) for p in problem.parameters()} == moved
    with torch.no_grad():
        problem.engine.critic.bias.zero_()


def test_astra_15_nothing_is_cut_from_what_can_be_drawn(problem):
    """No top-p, top-k: the sampler's log-probs are those of the whole distribution, so training is on policy."""
    assert not any(node.probe.tokens.restricted for node in drawn(problem))


def test_astra_16_a_short_reply_beside_a_long_one_has_the_log_probs_that_it_has_alone(problem):
    together = problem.get_tester_logprobs(["hello", "Paris"], ["yes", "the quick brown fox jumps over"])
    alone = problem.get_tester_logprobs(["hello"], ["yes"])
    width = alone.shape[1]
    assert torch.allclose(together[0, :width], alone[0], atol=1e-5)
    assert not together[0, width:].any()


def test_astra_17_evaluation_stands_outside_the_batches_and_a_checkpoint_is_never_replaced(tmp_path, tiny_model_dir):
    system = ToyAST()
    config = TrainingConfiguration(
        training_steps=2, num_episodes_per_experience=4, batch_size=2, eval_every=1, eval_rollouts=2
    )
    trainer = Trainer(config, ASTSampler(system, ["x"], tree_depth=1), PPO(system))
    trainer.train()
    assert trainer._global_step_counter == 8
    assert sum("evaluation" in row for row in trainer.history) == 3, "before, and after each experience"
    with pytest.raises(EngineError):
        HFEvaluationSystem(tmp_path / "no-checkpoint", tiny_model_dir, tiny_model_dir)


def test_astra_18_a_class_that_lacks_a_method_says_which():
    class Old(System):
        def get_auditor_logprobs(self, context, continuation):
            """The name of an older version."""

    with pytest.raises(TypeError, match="get_tester_logprobs"):
        Old(None)


def test_astra_19_a_trainer_without_what_it_needs_is_refused():
    system = ToySystem()
    with pytest.raises(ConfigError, match="name the run_dir"):
        Trainer(TrainingConfiguration(resume=True), ASTSampler(system, ["x"]), PPO(system))
