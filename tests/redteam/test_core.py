"""Graphs, the defaults of a system, and the validation of what a system returns."""

from typing import Any

import pytest
import torch

from reinforge.errors import ConfigError, EngineError
from reinforge.redteam.core import (
    ActionT,
    Algorithm,
    Evaluator,
    Graph,
    GraphMetrics,
    Node,
    Sampler,
    Scorer,
    StateT,
    System,
)
from reinforge.redteam.core.system import check_logprobs, check_rewards, check_values
from tests.redteam.toy import ToySystem


def leaf(name, reward=0.0, children=()):
    return Node("c", name, "r", reward, list(children))


TREE = Graph("open", [leaf("a", 1, [leaf("aa"), leaf("ab")]), leaf("b", 0, [leaf("ba"), leaf("bb")])])


def test_a_tree_by_groups_nodes_and_paths():
    names = [[node.probe for node in group] for group in TREE.sibling_groups()]
    assert names == [["a", "b"], ["aa", "ab"], ["ba", "bb"]]
    assert [node.probe for node in TREE.nodes()] == ["a", "b", "aa", "ab", "ba", "bb"]
    assert [[node.probe for node in path] for path in TREE.paths()] == [
        ["a", "aa"],
        ["a", "ab"],
        ["b", "ba"],
        ["b", "bb"],
    ]


@pytest.mark.parametrize("abstract", [System, Scorer, Sampler, Algorithm, Evaluator])
def test_base_classes_are_abstract(abstract):
    with pytest.raises(TypeError, match="abstract"):
        abstract() if abstract is Scorer else abstract(None)


def test_sampling_is_reproducible_and_leaves_the_generator_alone():
    system = ToySystem()
    before = torch.get_rng_state()
    first = system.sample_probes(["x"] * 20, list(range(20)))
    assert torch.equal(torch.get_rng_state(), before)
    assert system.sample_probes(["x"] * 20, list(range(20))) == first
    assert system.sample_probes(["x"] * 20, list(range(1, 21))) != first


def test_sampling_logprobs_default_to_the_testers_without_gradient():
    system = ToySystem()
    found = system.get_sampling_logprobs(["x"], ["red blue"])
    assert not found.requires_grad
    assert found.tolist() == [pytest.approx([-1.0986, -1.0986], abs=1e-4)]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (torch.zeros(2, 3, requires_grad=True), r"B = 1 rows, found \[2, 3\]"),
        (torch.zeros(1, requires_grad=True), "expected a tensor"),
        ([[0.0]], "found list"),
        (torch.full((1, 2), -1.0), "carries no gradient"),
        (torch.full((1, 2), 0.5, requires_grad=True), "are these probabilities"),
    ],
)
def test_invalid_logprobs_are_rejected(wrong, why):
    with pytest.raises(EngineError, match=why):
        check_logprobs(wrong, 1, "tester")


def test_only_the_tester_needs_gradient():
    assert check_logprobs(torch.full((1, 2), -1.0), 1, "baseline").shape == (1, 2)


def test_values_lose_a_last_axis_of_one():
    logprobs = torch.zeros(2, 3)
    assert check_values(torch.ones(2, 3, 1), logprobs).shape == (2, 3)
    with pytest.raises(EngineError, match=r"expected \[2, 3\].*found \[2, 4\]"):
        check_values(torch.ones(2, 4), logprobs)


class Wrong(ToySystem):
    def get_tester_logprobs(self, context, continuation):
        return super().get_tester_logprobs(context[1:], continuation[1:])

    def get_baseline_logprobs(self, context, continuation):
        return self._logprobs(self.logits, continuation).exp()

    def rollout_prompt_with_tester(self, x):
        return super().rollout_prompt_with_tester(x)[1:]

    def rollout_prompt_with_target(self, x):
        return "one text"


def test_what_a_system_returns_is_validated():
    system, rows = ToySystem(), (["x", "y"], ["red", "blue red"])
    assert system._get_tester_logprobs_and_validate(*rows).requires_grad
    for whose in ("baseline", "target"):
        validated = getattr(system, f"_get_{whose}_logprobs_and_validate")(*rows)
        assert torch.equal(validated, getattr(system, f"get_{whose}_logprobs")(*rows))
    assert len(system._rollout_prompt_with_tester_and_validate(["x", "y"])) == 2
    assert system._rollout_prompt_with_target_and_validate(["x red", "y blue"]) == [".red", ".blue"]

    class Tensors(ToySystem):
        def rollout_prompt_with_tester(self, x):
            return torch.zeros(len(x), 3)

    assert len(Tensors()._rollout_prompt_with_tester_and_validate(["x", "y"])) == 2, "actions need not be texts"

    class Trainable(ToySystem):
        def get_target_logprobs(self, context, continuation):
            return self.get_tester_logprobs(context, continuation)

    assert not Trainable()._get_target_logprobs_and_validate(*rows).requires_grad, "only the tester is trained"


@pytest.mark.parametrize(
    ("method", "arguments", "why"),
    [
        ("_get_tester_logprobs_and_validate", (["x", "y"], ["red", "red"]), r"B = 2 rows, found \[1, 1\]"),
        ("_get_baseline_logprobs_and_validate", (["x"], ["red"]), "get_baseline_logprobs: .* are these probabilities"),
        ("_rollout_prompt_with_tester_and_validate", (["x", "y"],), "with_tester: expected 2, .* found 1"),
        ("_rollout_prompt_with_target_and_validate", (["x", "y"],), "expected a list of 2, .*, found 'one text'"),
        ("sample_probes", (["x", "y"], [0, 1]), "with_tester: expected 2, .* found 1"),
        ("sample_responses", (["x", "y"], [0, 1]), "expected a list of 2, .*, found 'one text'"),
    ],
)
def test_a_system_that_returns_something_else_is_named(method, arguments, why):
    with pytest.raises(EngineError, match=why):
        getattr(Wrong(), method)(*arguments)


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([1.0], "reward: expected 2, one for each probe, found 1"),
        ([1.0, float("nan")], "reward: found nan for the probe 'blue', expected a number"),
        ([None, 1.0], "reward: found None for the probe 'red', expected a number"),
    ],
)
def test_invalid_rewards_are_rejected(rewards, why):
    with pytest.raises(EngineError, match=why):
        check_rewards(rewards, ["red", "blue"])


class Counts(Sampler):
    def rollout(self, seed=None):
        return Graph(f"seed {seed}", [])


class Contexts(Evaluator):
    def compute_metrics(self, g):
        return GraphMetrics({"context": g.context}, [])

    def aggregate_metrics(self, all_metrics):
        return [metrics.overall["context"] for metrics in all_metrics]


def test_an_evaluator_uses_its_seeds_or_counts_from_zero(tmp_path):
    assert Contexts(Counts(None), seeds=range(5, 8)).evaluate(2, progress=False) == ["seed 5", "seed 6"]
    assert Contexts(Counts(None)).evaluate(2, progress=False) == ["seed 0", "seed 1"]
    evaluator = Contexts(Counts(None))
    assert evaluator.sampler is evaluator.env, "either name"
    Evaluator.write_json({"a": [1.5]}, tmp_path / "metrics.json")
    assert (tmp_path / "metrics.json").read_text() == '{\n "a": [\n  1.5\n ]\n}\n'


def test_an_evaluator_takes_two_types_or_three():
    assert Evaluator[str, str, int].__args__ == (str, str, int)
    assert Evaluator[str, str].__args__ == (str, str, Any), "the type of seeds may be left out"

    class Typed(Contexts, Evaluator[StateT, ActionT, str]):
        """With type variables, as a generic evaluator of a user's own."""

    assert Typed(Counts(None), seeds=["a"]).evaluate(progress=False) == ["seed a"]


@pytest.mark.parametrize(("seeds", "count"), [(None, None), ([1], 2), (None, 0), ([], None), ([1], -1)])
def test_an_evaluation_without_rollouts_is_rejected(seeds, count):
    with pytest.raises(ConfigError, match="evaluate: "):
        Contexts(Counts(None), seeds=seeds).evaluate(count, progress=False)
