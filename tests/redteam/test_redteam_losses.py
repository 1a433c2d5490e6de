"""DPO, IPO, PPO and GRPO of the red team API against plain arithmetic on fixed log-probs, to 1e-5."""

from __future__ import annotations

import math

import pytest
import torch

from reinforge.errors import EngineError
from reinforge.redteam import DPO, GRPO, IPO, PPO, DPOStep, GRPOStep, PPOStep
from reinforge.redteam.algorithms.ppo import TokenCredit
from reinforge.redteam.algorithms.steps import pad_rows
from reinforge.redteam.core import Graph, Node, Scorer, System, ValueFunctionSystem
from tests.redteam.test_ast import count_the_context

TESTER = {"a": [-1.0, -0.5], "b": [-2.0], "c": [-0.3, -0.2, -1.5]}
BASELINE = {"a": [-1.5, -1.0], "b": [-1.0], "c": [-0.3, -1.2, -1.0]}
VALUES = {"a": [0.2, 0.4], "b": [-0.1], "c": [0.0, 0.5, 1.0]}


class Nothing(Scorer):
    def score(self, x):
        return [0.0] * len(x)


class Fixed(ValueFunctionSystem):
    """Every log-prob is a parameter, so gradients can be read directly."""

    def __init__(self):
        super().__init__(Nothing())
        self.tester = {name: torch.tensor(row, requires_grad=True) for name, row in TESTER.items()}
        self.values = {name: torch.tensor(row, requires_grad=True) for name, row in VALUES.items()}

    def _rows(self, rows, names):
        return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(rows[name]) for name in names], batch_first=True)

    def get_tester_logprobs(self, context, continuation):
        return self._rows(self.tester, continuation)

    def get_baseline_logprobs(self, context, continuation):
        return self._rows(BASELINE, continuation)

    get_target_logprobs = get_baseline_logprobs

    def value(self, context, continuation):
        return self._rows(self.values, continuation)[..., None]  # astra-rl's shape

    def token_mask(self, context, continuation, logprobs):
        counts = torch.tensor([len(TESTER[name]) for name in continuation])
        return torch.arange(logprobs.shape[1]) < counts[:, None]

    def parameters(self):
        yield from (*self.tester.values(), *self.values.values())

    def rollout_prompt_with_tester(self, x): ...
    def rollout_prompt_with_target(self, x): ...
    def advance(self, context, probe, response): ...
    def reward(self, context, probe, response): ...


CONTEXT = {"a": 3, "b": 1, "c": 4}
"""Columns of the context before each probe."""


class WithContext(Fixed):
    """The same system in the layout of astra-rl's examples: rows over context and continuation, zeros first.

    token_mask is the default one: it must find the tokens.
    """

    token_mask = System.token_mask

    def _rows(self, rows, names):
        whole = [torch.cat([torch.zeros(CONTEXT[name]), torch.as_tensor(rows[name])]) for name in names]
        return torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)


LAYOUTS = pytest.mark.parametrize("layout", [Fixed, WithContext])


def log_ratio(name):
    return sum(TESTER[name]) - sum(BASELINE[name])


PAIRS = [("a", "b"), ("b", "c")]
MARGINS = [log_ratio(x) - log_ratio(y) for x, y in PAIRS]


def preference(kind, beta, layout=Fixed):
    algorithm = kind(layout(), beta=beta)
    loss, metrics = algorithm.step(algorithm.collate_fn([DPOStep("x", *pair) for pair in PAIRS]))
    return algorithm.system, loss, metrics


@LAYOUTS
def test_dpo(layout):
    system, loss, metrics = preference(DPO, 0.3, layout)
    expected = sum(math.log1p(math.exp(-0.3 * h)) for h in MARGINS) / 2
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert metrics["margin"] == pytest.approx(sum(MARGINS) / 2, abs=1e-5)
    loss.backward()
    by_pair = [-0.3 / (1 + math.exp(0.3 * h)) / 2 for h in MARGINS]
    assert system.tester["a"].grad.tolist() == pytest.approx([by_pair[0]] * 2, abs=1e-5)
    assert system.tester["b"].grad.tolist() == pytest.approx([-by_pair[0] + by_pair[1]], abs=1e-5)


@LAYOUTS
def test_ipo(layout):
    system, loss, _ = preference(IPO, 0.25, layout)
    assert loss.item() == pytest.approx(sum((h - 2.0) ** 2 for h in MARGINS) / 2, abs=1e-5)
    loss.backward()
    assert system.tester["a"].grad.tolist() == pytest.approx([MARGINS[0] - 2.0] * 2, abs=1e-5)


@LAYOUTS
@pytest.mark.parametrize("kind", [DPO, IPO])
def test_metrics_of_preferences_have_astra_rls_names(kind, layout):
    """a over b and b over c, beta 0.5; log p is -1.5, -2, -2 under the tester and -2.5, -1, -2.5 under the baseline."""
    _, loss, metrics = preference(kind, 0.5, layout)
    found = {name: metrics[name] for name in metrics if "/" in name}
    assert found == pytest.approx({
        "training/loss": loss.item(),
        "reward/chosen_rewards": 0.5 * ((-1.5 + 2.5) + (-2 + 1)) / 2,
        "reward/rejected_rewards": 0.5 * ((-2 + 1) + (-2 + 2.5)) / 2,
        "reward/reward_accuracies": 0.5,
        "reward/reward_margin": 0.5 * (2 - 1.5) / 2,
        "policy/logprobs_chosen": (-1.5 - 2) / 2,
        "policy/logprobs_rejected": (-2 - 2) / 2,
        "ref/logprobs_chosen": (-2.5 - 1) / 2,
        "ref/logprobs_rejected": (-1 - 2.5) / 2,
    }, abs=1e-6)  # fmt: skip


@LAYOUTS
def test_metrics_of_ppo_have_astra_rls_names(layout):
    algorithm = PPO(layout(), kl_coef=0.1, vf_loss_coef=0.5)
    steps = [PPOStep("x", name, reward) for name, reward in (("a", 1.0), ("b", 0.0), ("c", 0.5))]
    loss, metrics = algorithm.step(algorithm.collate_fn(steps))
    assert metrics["training/loss"] == pytest.approx(loss.item())
    parts = metrics["training/policy_loss"] + 0.5 * metrics["training/value_loss"] / 2
    assert parts == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["training/value_loss"] == pytest.approx(metrics["value_error"])
    assert (metrics["reward/mean_reward"], metrics["reward/std_reward"]) == (0.5, 0.5)
    assert metrics["policy/logprobs"] == pytest.approx((-1.5 - 2 - 2) / 6)
    assert metrics["ref/logprobs"] == pytest.approx((-2.5 - 1 - 2.5) / 6)
    algorithm = PPO(layout())
    _, metrics = algorithm.step(algorithm.collate_fn(steps[:1]))
    assert (metrics["ref/logprobs"], metrics["reward/std_reward"]) == (None, None), "unknown is not a number"


SAMPLING = {"a": [-1.1, -0.4], "b": [-1.5], "c": [-0.3, -0.5, -1.5]}
CREDIT = {"a": [1.0, -2.0], "b": [0.5], "c": [-1.0, -1.0, 2.0]}
RETURNS = {"a": [0.7, 0.1], "b": [0.3], "c": [1.0, 0.0, 0.5]}
TOKENS = [(name, t) for name in "abc" for t in range(len(TESTER[name]))]


def gain(name, t, advantage, clip):
    ratio = math.exp(TESTER[name][t] - SAMPLING[name][t])
    return min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)


def proximal(layout=Fixed, **settings):
    algorithm = PPO(layout(), **{"normalize_advantages": False, **settings})
    steps = [
        PPOStep("x", name, 0.0, TokenCredit(SAMPLING[name], VALUES[name], CREDIT[name], RETURNS[name]))
        for name in "abc"
    ]
    loss, metrics = algorithm.step(algorithm.collate_fn(steps))
    return algorithm.system, loss, metrics


@pytest.mark.parametrize("clip", [0.01, 0.1, 0.9])
@pytest.mark.parametrize("coef", [0.0, 1.0])
@LAYOUTS
def test_ppo(clip, coef, layout):
    system, loss, metrics = proximal(layout, clip_range=clip, vf_loss_coef=coef)
    policy = -sum(gain(name, t, CREDIT[name][t], clip) for name, t in TOKENS) / 6
    error = sum((VALUES[name][t] - RETURNS[name][t]) ** 2 for name, t in TOKENS) / 6
    assert loss.item() == pytest.approx(policy + coef * error / 2, abs=1e-5)
    assert metrics["value_error"] == pytest.approx(error, abs=1e-5)
    loss.backward()
    found = [system.values[name].grad[t].item() for name, t in TOKENS]
    assert found == pytest.approx([coef * (VALUES[n][t] - RETURNS[n][t]) / 6 for n, t in TOKENS], abs=1e-5)


@LAYOUTS
def test_ppo_normalizes_advantages_over_the_tokens_of_a_batch(layout):
    _, loss, _ = proximal(layout, vf_loss_coef=0.0, normalize_advantages=True)
    flat = [CREDIT[name][t] for name, t in TOKENS]
    mean = sum(flat) / 6
    deviation = math.sqrt(sum((x - mean) ** 2 for x in flat) / 6)
    expected = -sum(gain(n, t, (CREDIT[n][t] - mean) / deviation, 0.1) for n, t in TOKENS) / 6
    assert loss.item() == pytest.approx(expected, abs=1e-5)


@LAYOUTS
def test_ppo_of_a_step_without_credit(layout):
    """One turn sampled by the current policy: the ratio is 1, and A is the reward minus the value."""
    algorithm = PPO(layout(), gae_lambda=1.0, normalize_advantages=False, vf_loss_coef=0.0)
    loss, metrics = algorithm.step(algorithm.collate_fn([PPOStep("x", "a", 1.0)]))
    assert metrics["ratio"] == pytest.approx(1.0)
    assert loss.item() == pytest.approx(-((1 - 0.2) + (1 - 0.4)) / 2, abs=1e-5)


@LAYOUTS
def test_ppo_credit_follows_the_path_and_averages_over_branches(layout):
    """a, then b or c. By hand, from the leaves, gamma 0.9 and lambda 0.5; rewards 1, 2 and -1."""
    graph = Graph("x", [Node("x", "a", "", 1.0, [Node("xa", "b", "", 2.0), Node("xa", "c", "", -1.0)])])
    a, b, c = PPO(layout(), gamma=0.9, gae_lambda=0.5).flatten(graph)
    of_b = [2.0 - (-0.1)]
    last = -1.0 - 1.0
    middle = (0.9 * 1.0 - 0.5) + 0.45 * last
    of_c = [(0.9 * 0.5 - 0.0) + 0.45 * middle, middle, last]
    after, value = (of_b[0] + of_c[0]) / 2, (-0.1 + 0.0) / 2
    end = (1.0 + 0.9 * value - 0.4) + 0.45 * after
    of_a = [(0.9 * 0.4 - 0.2) + 0.45 * end, end]
    assert (a.suffix, b.suffix, c.suffix) == ("a", "b", "c")
    for step, expected in ((a, of_a), (b, of_b), (c, of_c)):
        assert step.credit.advantages == pytest.approx(expected, abs=1e-5)
        returns = [x + v for x, v in zip(expected, VALUES[step.suffix], strict=True)]
        assert step.credit.returns == pytest.approx(returns, abs=1e-5)
        assert step.credit.logprobs == pytest.approx(TESTER[step.suffix])


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@LAYOUTS
def test_grpo(kl_coef, layout):
    algorithm = GRPO(layout(), clip_range=0.1, kl_coef=kl_coef)
    advantages = {"a": 0.5, "b": -1.0, "c": 0.5}
    steps = [GRPOStep("x", name, advantages[name], SAMPLING[name]) for name in "abc"]
    loss, _ = algorithm.step(algorithm.collate_fn(steps))
    expected = 0.0
    for name, t in TOKENS:
        d = TESTER[name][t] - BASELINE[name][t]
        expected += -gain(name, t, advantages[name], 0.1) + kl_coef * (math.exp(-d) - 1 + d)
    assert loss.item() == pytest.approx(expected / 6, abs=1e-5)


def test_a_mask_that_counts_the_context_trains_the_context(monkeypatch):
    """Mutation: the credit of a one-token probe with one column of context."""
    graph = Graph("x", [Node("x", "b", "", 1.0)])
    [step] = PPO(WithContext()).flatten(graph)
    assert (step.credit.logprobs, step.credit.begin) == ([-2.0], 1)
    monkeypatch.setattr(WithContext, "token_mask", count_the_context)
    [step] = PPO(WithContext()).flatten(graph)
    assert (step.credit.logprobs, step.credit.begin) == ([0.0, -2.0], 0)


def test_a_token_whose_probability_became_one_keeps_the_others_in_place():
    """Row b c with context: the first log-prob of c was -0.3 when it was sampled, and is exactly 0 now."""
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]).bool()
    rows = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    found = pad_rows(rows, [1, 1], mask, torch.zeros(1))
    assert found.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    with pytest.raises(EngineError, match="3 tokens from column 2 on when it was sampled, but now its row has 2"):
        pad_rows(rows[:1], [2], mask[1:], torch.zeros(1))


class OneColumnLate(WithContext):
    """Values as in astra-rl's example: the mask of positions instead of that of log-probs."""

    def value(self, context, continuation):
        values = super().value(context, continuation)
        return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


def test_values_that_are_one_column_late_are_named_once(caplog):
    graph = Graph("x", [Node("x", name, "", 1.0) for name in "ab"])
    PPO(WithContext()).flatten(graph)
    assert not caplog.records, "the values are where they belong"
    algorithm = PPO(OneColumnLate())
    algorithm.flatten(graph)
    algorithm.flatten(graph)
    [record] = caplog.records
    assert "exactly 0 for the first token of all 2 probes" in record.getMessage()
    still = OneColumnLate()
    still.values = {name: torch.zeros(len(row)) for name, row in VALUES.items()}
    PPO(still).flatten(graph)
    assert len(caplog.records) == 1, "a critic that is 0 everywhere is only untrained"


def test_grpo_compares_returns_of_siblings():
    """b has reward 0 and children with mean return 1; c has reward 0.5: the mean of the siblings is 0.75."""
    tree = [Node("xb", "a", "", 2.0), Node("xb", "c", "", 0.0)]
    graph = Graph("x", [Node("x", "b", "", 0.0, tree), Node("x", "c", "", 0.5)])
    found = [(step.suffix, step.advantage) for step in GRPO(Fixed()).flatten(graph)]
    assert found == [("b", 0.25), ("c", -0.25), ("a", 1.0), ("c", -1.0)]
    found = [(step.suffix, step.advantage) for step in GRPO(Fixed(), gamma=0.0).flatten(graph)]
    assert found[:2] == [("b", -0.25), ("c", 0.25)]
