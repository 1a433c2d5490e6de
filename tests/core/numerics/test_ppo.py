"""PPO: advantages and loss against arithmetic; the critic learns a known return; a bandit is learned."""

import numpy as np
import pytest
import torch

from reinforge.algorithms.ppo import PPO, PPOConfig, compute_gae, compute_token_rewards
from reinforge.config.policy import BatchConfig, CriticConfig, OptimizerConfig, PolicyConfig, ScheduleConfig
from reinforge.engine import Engine
from reinforge.engine.losses.policy_gradient import ppo
from reinforge.engine.model.heads import compute_values
from reinforge.engine.training.collate import collate
from reinforge.engine.training.logprobs import token_logprobs
from reinforge.errors import ConfigError, EngineError, TrajectoryError
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import LossSpec, Needs
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup
from tests.core.numerics.test_losses import make_batch, row
from tests.device import DEVICE
from tests.engines import train
from tests.models import make_tiny_model
from tests.samples import ask, random_samples, request, sibling_samples

PLAIN = {"normalize_advantages": False}


def turn(prompt, ids, logprob=-1.0, trained=None):
    tokens = TokenLogprobs(prompt, ids, (logprob,) * len(ids))
    return EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="x", logprobs=tokens, trained=trained)


def two_turns(algorithm, values=(0.5, 0.4, 0.2), rewritten=False, **fields):
    """Turn 0 samples 5 6, turn 1 samples 8; the second turn extends the history, or rewrites it."""
    second = (9,) if rewritten else (1, 2, 5, 6, 7)
    episode = [turn((1, 2), (5, 6)), turn(second, (8,))]
    trajectory = Trajectory(episode=episode, reward=1.0, **fields)
    samples = algorithm.build_samples([TrajectoryGroup(group_id="g", trajectories=[trajectory])])
    left = list(values)
    for sample in samples:
        sample.values = np.zeros(len(sample), np.float32)
        sample.values[sample.loss_mask] = [left.pop(0) for _ in range(sample.num_trained)]
    return samples


def trained(samples, arrays):
    return np.concatenate([a[s.loss_mask] for s, a in zip(samples, arrays, strict=True)]).tolist()


@pytest.mark.parametrize("rewritten", [False, True])
def test_advantages_by_hand_over_three_tokens_and_two_turns(rewritten):
    """Rewards 0, 0.5, 1 - 0.1; values 0.5, 0.4, 0.2; gamma 0.9, lambda 0.8.

    delta_2 = 0.9 - 0.2            = 0.7        A_2 = 0.7
    delta_1 = 0.5 + 0.18 - 0.4     = 0.28       A_1 = 0.28 + 0.72 * 0.7   = 0.784
    delta_0 = 0.36 - 0.5           = -0.14      A_0 = -0.14 + 0.72 * 0.784 = 0.42448
    """
    algorithm = PPO(PPOConfig(gamma=0.9, gae_lambda=0.8, **PLAIN))
    samples = two_turns(algorithm, rewritten=rewritten, shaped_rewards=[0.5, -0.1])
    assert len(samples) == 1 + rewritten
    advantages = algorithm.credit(samples)
    assert trained(samples, advantages) == pytest.approx([0.42448, 0.784, 0.7])
    assert trained(samples, [s.returns for s in samples]) == pytest.approx([0.92448, 1.184, 0.9])
    assert all(not a[~s.loss_mask].any() for s, a in zip(samples, advantages, strict=True))


@pytest.mark.parametrize(
    ("gae_lambda", "expected"),
    [
        (1.0, [1 - 0.5, 1 - 0.4, 1 - 0.2]),  # actual return minus value
        (0.0, [0.4 - 0.5, 0.2 - 0.4, 1 - 0.2]),  # one step
    ],
)
def test_the_two_ends_of_lambda(gae_lambda, expected):
    found = compute_gae(np.float32([0, 0, 1]), np.float32([0.5, 0.4, 0.2]), 1.0, gae_lambda)
    assert found.tolist() == pytest.approx(expected)


def test_the_reward_of_an_untrained_turn_goes_to_the_token_before_it():
    episode = [turn((1,), (2,), trained=False), turn((1, 2, 3), (5, 6)), turn((1, 2, 3, 5, 6, 4), (7,), trained=False)]
    trajectory = Trajectory(episode=episode, reward=1.0, shaped_rewards=[9.0, 0.5, 0.25])
    samples = PPO().build_samples([TrajectoryGroup(group_id="g", trajectories=[trajectory])])
    assert compute_token_rewards(samples).tolist() == [0.0, 1.75], "nobody earned the 9"


def test_the_kl_is_subtracted_from_each_tokens_reward():
    algorithm = PPO(PPOConfig(kl_coef=0.1, gae_lambda=0.0, **PLAIN))
    assert algorithm.needs == Needs(old_logprobs="inexact", ref_logprobs=True, values=True)
    samples = two_turns(algorithm, values=(0, 0, 0))
    for sample in samples:
        sample.ref_logprobs = sample.sampling_logprobs - 2.0  # log(p_old / p_ref) = 2
    assert trained(samples, algorithm.credit(samples)) == pytest.approx([-0.2, -0.2, 0.8])


def test_advantages_of_a_job_are_normalized_over_its_tokens():
    algorithm = PPO(PPOConfig(gae_lambda=1.0))
    samples = two_turns(algorithm)  # 0.5, 0.6, 0.8: mean 19/30, deviation sqrt(0.14 / 9)
    deviation = (0.14 / 9) ** 0.5
    expected = [(a - 19 / 30) / deviation for a in (0.5, 0.6, 0.8)]
    assert trained(samples, algorithm.credit(samples)) == pytest.approx(expected, abs=1e-5)
    assert trained(samples, [s.returns for s in samples]) == pytest.approx([1, 1, 1]), "returns are not"


def test_credit_without_values_is_refused():
    samples = two_turns(PPO())
    samples[0].values = None
    with pytest.raises(TrajectoryError, match="critic's values"):
        PPO().credit(samples)


@pytest.mark.parametrize(
    ("value", "old", "expected"),
    [
        (0.5, 0.5, 0.25),  # on policy: (0.5 - 1)^2
        (0.6, 0.5, 0.16),  # moved by less than the clip
        (0.9, 0.5, 0.09),  # moved by more, towards the return: (0.5 + 0.2 - 1)^2, and no gradient
        (0.1, 0.5, 0.81),  # moved away: counts in full
    ],
)
def test_the_value_loss_is_clipped_on_the_pessimistic_side(value, old, expected):
    batch = make_batch([-1.0], [0.0])
    batch.values, batch.old_values, batch.returns = row(value).requires_grad_(), row(old), row(1.0)
    output = ppo(batch, row(-1.0), value_clip=0.2, value_coef=0.5)
    assert output.loss[0, 1].item() == pytest.approx(0.5 * expected / 2)
    output.loss[0, 1].backward()
    assert batch.values.grad[0, 1].item() == pytest.approx(0.0 if value == 0.9 else 0.5 * (value - 1.0), abs=1e-6)
    free = ppo(batch, row(-1.0), value_clip=None, value_coef=0.5)
    assert free.loss[0, 1].item() == pytest.approx(0.5 * (value - 1) ** 2 / 2)


def test_the_loss_is_the_surrogate_plus_the_critics():
    batch = make_batch([-1.0, -1.0], [1.0, -1.0])
    batch.values, batch.old_values, batch.returns = row(0.3, 0.0), row(0.3, 0.0), row(0.5, 1.0)
    output = ppo(batch, row(-1.0 + np.log(1.5), -1.0), value_coef=0.5)
    assert output.loss[0, 1:].tolist() == pytest.approx([-1.2 + 0.25 * 0.04, 1.0 + 0.25 * 1.0])
    assert output.metrics["value_error"][0, 1:].tolist() == pytest.approx([0.04, 1.0])
    batch.returns = None
    with pytest.raises(ConfigError, match="critic=True"):
        ppo(batch, row(-1.0, -1.0))


@pytest.fixture
def load(tiny_model_dir):
    """Loads engines and closes them."""
    made = []

    def make(folder=tiny_model_dir, *, rate=1e-2, shares_trunk=True, critic=True, **batch):
        config = PolicyConfig(
            model=str(folder),
            optimizer=OptimizerConfig(learning_rate=rate),
            schedule=ScheduleConfig(warmup_steps=0),
            batch=BatchConfig(**{"steps_per_job": 1, **batch}),
            critic=CriticConfig(learning_rate=1e-2, shares_trunk=shares_trunk),
        )
        made.append(Engine.load(config, seed=0, device=DEVICE, critic=critic))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def with_returns(samples, seed=0):
    rng = np.random.default_rng(seed)
    for sample in samples:
        sample.values, sample.returns = (rng.normal(size=len(sample)).astype(np.float32) for _ in range(2))
    return samples


@pytest.mark.parametrize("shares_trunk", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_value_head_learns_a_known_return(load, shares_trunk):
    """A token of the prompt determines the return; the policy gets no gradient."""
    engine = load(num_iterations=40, rate=1e-3, shares_trunk=shares_trunk)
    before = engine.fingerprint()
    samples = random_samples(8)
    for number, sample in enumerate(samples):
        sample.token_ids[0] = 10 + number % 2
        sample.weight, sample.advantages = 1.0, np.zeros(len(sample), np.float32)
        sample.returns = np.full(len(sample), number % 2, np.float32)
    engine.score(samples, Needs(values=True))
    assert not any(sample.values.any() for sample in samples), "before anything is known, all is worth nothing"
    report = train(engine, samples, LossSpec("ppo", {"value_clip": None, "value_coef": 1.0}))
    returns = np.concatenate([s.returns[s.loss_mask] for s in samples])
    assert report.metrics["return"] == pytest.approx(returns.mean())
    engine.score(samples, Needs(values=True))
    errors = [np.abs(s.values - s.returns)[s.loss_mask].mean() for s in samples]
    assert np.mean(errors) < (0.15 if shares_trunk else 0.35)
    assert (engine.fingerprint() != before) == shares_trunk


def test_values_are_those_of_the_learners_own_pass_and_old_ones_stay(load):
    engine = load()
    with torch.no_grad():
        engine.critic.weight.copy_(torch.linspace(-1, 1, 64))
    samples = sibling_samples()
    engine.score(samples, Needs(values=True))
    rows = compute_values(engine.model, engine.critic, samples, 10_000)
    for sample, plain in zip(samples, rows, strict=True):
        assert np.abs(sample.values - plain).max() <= 1e-5
        assert not sample.values[~sample.loss_mask].any()
        ids = torch.from_numpy(sample.token_ids)[None].to(DEVICE)
        with torch.no_grad():
            hidden = engine.model.base(input_ids=ids).last_hidden_state[0]
            expected = (hidden @ engine.critic.weight + engine.critic.bias).cpu()
        places = np.flatnonzero(sample.loss_mask)
        assert sample.values[places] == pytest.approx(expected[places - 1].numpy(), abs=1e-5)
    batch = collate(samples[:2], engine.model.device)
    token_logprobs(engine.model, batch, critic=engine.critic)
    assert torch.allclose(batch.values[0, : len(samples[0])], batch.old_values[0, : len(samples[0])], atol=1e-5)


def test_a_critic_exists_only_on_request(load, tmp_path):
    engine = load(critic=False)
    assert engine.critic is None
    assert not [name for name in engine.learner.parameters if name.startswith("value_head")]
    with pytest.raises(EngineError, match="critic=True"):
        engine.score(random_samples(1), Needs(values=True))
    capped = make_tiny_model(tmp_path / "gemma2", "gemma2", final_logit_softcapping=5.0, head_dim=16)
    with pytest.raises(ConfigError, match="return only logits"):
        load(capped)


@pytest.mark.slow
def test_a_bandit_is_learned(load):
    """Tokens below 100 are the good arm, about a third of the policy's first samples."""
    engine, algorithm = load(steps_per_job=2, num_iterations=2, rate=3e-3), PPO()
    shares = []
    for number in range(20):
        replies = ask(engine.policy, [request(f"{n}", max_tokens=2, seed=100 * number + n) for n in range(48)])
        trajectories = []
        for reply in replies:
            share = np.mean(np.array(reply.tokens.token_ids) < 100)
            item = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=reply.tokens)
            trajectories.append(Trajectory(episode=[item], reward=float(share)))
        shares.append(np.mean([t.reward for t in trajectories]))
        samples = algorithm.build_samples([TrajectoryGroup(group_id="g", trajectories=trajectories)])
        engine.score(samples, algorithm.needs)
        for sample, advantages in zip(samples, algorithm.credit(samples), strict=True):
            sample.advantages = advantages
        train(engine, samples, algorithm.loss)
    assert shares[0] < 0.5
    assert np.mean(shares[-3:]) > 0.9, shares
