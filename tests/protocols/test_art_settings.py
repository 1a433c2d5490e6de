"""Settings under ART's names become an algorithm and a learning rate, or are refused by name."""

import pytest

from reinforge.protocols.art.server.model import read_settings
from reinforge.serving.routes import ApiError

SENT_BY_CLIENT = {
    "advantage_balance": 0.0, "allow_training_without_logprobs": False, "epsilon": None, "epsilon_high": None,
    "importance_sampling_level": "token", "kimi_k2_tau": None, "kl_penalty_coef": 0.0,
    "kl_penalty_reference_step": None, "kl_penalty_source": "current_learner", "kl_penalty_step_lag": None,
    "kl_ref_adapter_path": None, "learning_rate": 5e-06, "logprob_calculation_chunk_size": 1024, "loss_fn": "cispo",
    "mask_prob_ratio": False, "max_negative_advantage_importance_sampling_weight": None, "normalize_advantages": True,
    "num_trajectories_learning_rate_multiplier_power": 0.0, "packed_sequence_length": None, "plot_tensors": False,
    "ppo": False, "precalculate_logprobs": False, "scale_learning_rate_by_reward_std_dev": False,
    "scale_rewards": True, "truncated_importance_sampling": None,
}  # fmt: skip
"""What the client sends if its user sets nothing."""


def loss_of(**settings):
    return read_settings(settings).algorithm.loss


def test_what_the_client_sends_by_default_trains_by_cispo():
    training = read_settings(SENT_BY_CLIENT)
    assert training.algorithm.loss.name == "cispo"
    assert training.algorithm.loss.params["clip_high"] == 4.0
    assert training.algorithm.config.scale_rewards is True
    assert training.learning_rate == 5e-6


def test_epsilons_are_the_ends_of_the_clip():
    assert loss_of(loss_fn="ppo").params["clip_high"] == 0.2
    loss = loss_of(ppo=True, epsilon=0.1, epsilon_high=0.3)
    assert (loss.name, loss.params["clip_low"], loss.params["clip_high"]) == ("clipped_pg", 0.1, 0.3)
    assert loss_of(ppo=True, epsilon=0.1).params["clip_high"] == 0.1
    assert loss_of(epsilon=1.0, epsilon_high=3.0).params == {**loss_of().params, "clip_low": None, "clip_high": 3.0}
    assert loss_of(epsilon=0.5).params["clip_low"] == 0.5


def test_other_settings_reach_the_algorithm():
    loss = loss_of(kl_penalty_coef=0.1, truncated_importance_sampling=3.0)
    assert (loss.params["kl_coef"], loss.params["tis_cap"]) == (0.1, 3.0)
    assert read_settings({"scale_rewards": False}).algorithm.config.scale_rewards is False
    assert read_settings({"normalize_advantages": False}).algorithm.config.scale_rewards is False
    assert loss_of(loss_fn="ppo", importance_sampling_level="sequence").name == "gspo"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"advantage_balance": 0.5}, "advantage_balance is 0.5, which this server does not support; leave it out"),
        ({"allow_training_without_logprobs": True}, "allow_training_without_logprobs is True"),
        ({"kl_penalty_step_lag": 2}, "kl_penalty_step_lag is 2"),
        ({"kl_penalty_source": "sample", "kl_penalty_coef": 0.1}, "kl_penalty_source is 'sample'"),
        ({"learning_rat": 1e-5}, "learning_rat: Extra inputs are not permitted"),
        ({"learning_rate": -1}, "learning_rate: Input should be greater than 0"),
        ({"loss_fn": "ppo", "ppo": False}, "loss_fn is ppo, but ppo is False"),
        ({"loss_fn": "ppo", "epsilon": 2.0}, "epsilon: Input should be less than 1"),
        (
            {"importance_sampling_level": "average"},
            "importance_sampling_level average does not exist for loss_fn cispo",
        ),
    ],
)
def test_what_this_server_does_not_do_is_refused_by_name(settings, says):
    with pytest.raises(ApiError) as caught:
        read_settings(settings)
    assert caught.value.status == 422
    assert says in str(caught.value)
