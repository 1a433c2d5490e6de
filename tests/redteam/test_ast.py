"""Adaptive stress testing: strings with tokens, messages, trees, rewards, log-probs, metrics."""

import asyncio
import copy
import math
import threading

import numpy as np
import pytest
import torch

from reinforge import PolicyFailure
from reinforge.errors import BackendError, BackendUnavailable, ConfigError, EngineError, TrajectoryError
from reinforge.redteam import (
    DPO,
    GRPO,
    PPO,
    ASTEvaluator,
    ASTSampler,
    ASTSystem,
    Conversation,
    DPOStep,
    GeneratedText,
    Graph,
    GraphMetrics,
    Harness,
    KeywordScorer,
    Node,
    WorkflowTarget,
)
from reinforge.redteam.algorithms.steps import find_trainable
from reinforge.redteam.methods.ast import _target_view, _tester_view
from reinforge.types.request import ModelReply, TokenLogprobs
from tests.redteam.toy import Likes, ToySystem


def test_a_conversation_is_a_string_with_turns():
    probe = GeneratedText(" What is new?", TokenLogprobs((1,), (2,), (-1.0,)))
    asked = Conversation("Monday.") + probe
    whole = asked + " Nothing."
    assert whole == "Monday. What is new? Nothing."
    assert whole.turns[1].tokens.token_ids == (2,)
    assert (asked.open_probe, asked.exchanges) == (probe, [])
    assert (whole.open_probe, whole.exchanges) == (None, [(probe, " Nothing.")])
    assert Conversation(whole).turns == whole.turns
    assert copy.deepcopy(whole).turns[1].tokens == probe.tokens


def test_each_side_sees_the_other_as_the_user():
    talk = Conversation("Monday.", "What is new?", "Nothing.", "And now?")
    assert _target_view(talk) == [
        {"role": "user", "content": "Monday.\nWhat is new?"},
        {"role": "assistant", "content": "Nothing."},
        {"role": "user", "content": "And now?"},
    ]
    assert _tester_view(Conversation(*talk.turns[:3])) == [
        {"role": "user", "content": "Monday."},
        {"role": "assistant", "content": "What is new?"},
        {"role": "user", "content": "Nothing."},
    ]
    assert _target_view("just a text") == [{"role": "user", "content": "just a text"}]


class ToyAST(ASTSystem, ToySystem):
    def __init__(self, **settings):
        super().__init__("green", **settings)


class ContextFirst(ToyAST):
    """Log-probs over context and continuation, zeros first; every word of a probe has the same probability."""

    probability = 1 / 300

    def get_baseline_logprobs(self, context, continuation):
        rows = [
            [0.0] * len(c.split()) + [math.log(self.probability)] * len(p.split())
            for c, p in pairs(context, continuation)
        ]
        width = max(map(len, rows))
        return torch.tensor([row + [0.0] * (width - len(row)) for row in rows])


def pairs(context, continuation):
    return zip(context, continuation, strict=True)


def count_the_context(system, context, continuation, logprobs):
    """The mask of earlier versions: from column 0 to the last log-prob that is not 0."""
    places = torch.arange(logprobs.shape[1])
    return places <= torch.where(logprobs.detach() != 0, places, -1).amax(dim=1)[:, None]


def test_log_probs_after_zeros_for_the_context_give_the_same_perplexity(monkeypatch):
    """Two tokens of probability 1/300 have perplexity 300, after 8 words of context or after none."""
    system, contexts = ContextFirst(ppl_weight=0.01), ["a b c d e f g h", "", "a b c d e f g h"]
    probes = ["red blue", "red blue", "red blue red red"]
    assert system.perplexities(contexts, probes) == pytest.approx([300.0] * 3, rel=1e-5)
    assert system.reward(contexts, probes, [".", ".", "."]) == pytest.approx([-3.0] * 3, rel=1e-5)
    mask = system.token_mask(contexts, probes, system.get_baseline_logprobs(contexts, probes))
    assert mask.long().tolist() == [[0] * 8 + [1] * 2 + [0] * 2, [1] * 2 + [0] * 10, [0] * 8 + [1] * 4]

    monkeypatch.setattr(ToyAST, "token_mask", count_the_context)  # mutation: exp(2 x 5.70 / 10) is 3.1
    assert system.perplexities(contexts, probes) == pytest.approx([300 ** (2 / 10), 300.0, 300 ** (4 / 12)], rel=1e-5)


def test_a_token_of_probability_one_inside_a_probe_is_a_token():
    system = ToyAST()
    assert system.token_mask(["x"], ["y"], torch.tensor([[0.0, -1.0, 0.0, -1.0, 0.0]])).tolist() == [
        [False, True, True, True, False]
    ]
    assert system.token_mask(["x"], [""], torch.zeros(1, 3)).tolist() == [[False] * 3]
    assert system.token_mask(["x"], [""], torch.zeros(1, 0)).shape == (1, 0)


class Silent(ContextFirst):
    """Its second probe at every point is empty, so it has no log-probs."""

    def rollout_prompt_with_tester(self, x):
        return ["" if i % 3 == 1 else f"red {'blue ' * i}".strip() for i in range(len(x))]

    def get_tester_logprobs(self, context, continuation):
        logprobs = self.get_baseline_logprobs(context, continuation)
        return torch.where(logprobs == 0, logprobs, logprobs + self.logits.sum())

    def value(self, context, continuation):
        return torch.zeros_like(self.get_baseline_logprobs(context, continuation)) + self.values.sum()


def test_a_probe_without_tokens_has_no_perplexity_and_is_not_trained(monkeypatch):
    """Silence would win: probes of perplexity 300 cost 7.5, and an empty one had perplexity 1."""
    system = Silent()
    assert system.perplexities(["open", "open"], ["red", ""]) == [pytest.approx(300.0, rel=1e-5), None]
    graph = ASTSampler(system, ["open"], tree_width=3, tree_depth=1).rollout(0)
    assert [node.probe for node in graph.nodes()] == ["red", "", "red blue blue"]
    graph.children[0].reward += 1.0
    assert DPO(system).flatten(graph) == [DPOStep("open", "red", "red blue blue")]
    assert [(step.suffix, step.advantage) for step in GRPO(system).flatten(graph)] == [
        ("red", pytest.approx(0.5)),
        ("red blue blue", pytest.approx(-0.5)),
    ]
    solver = PPO(system)
    steps = solver.flatten(graph)
    assert [step.suffix for step in steps] == ["red", "red blue blue"]
    assert math.isfinite(solver.step(solver.collate_fn(steps))[0].item())
    assert PPO(system).flatten(Graph("open", [Node("open", "", ".", 0.0)])) == []

    monkeypatch.setattr("reinforge.redteam.algorithms.dpo.find_trainable", list)  # mutation
    assert DPO(system).flatten(graph) == [DPOStep("open", "", "red blue blue")]


def test_probes_need_not_be_texts():
    """`==` between an array and a text is an array."""
    nodes = [Node("open", np.array([1, 2]), ".", 1.0), Node("open", np.array([], int), ".", 0.0)]
    assert [id(node) for node in find_trainable(nodes)] == [id(node) for node in nodes]


def test_an_end_token_alone_is_a_probe():
    """A system that keeps tokens trains the end token of an empty reply."""
    ended = GeneratedText("", TokenLogprobs((1,), (2,), (-1.0,)))
    graph = Graph("open", [Node("open", ended, ".", 1.0), Node("open", "red", ".", 0.0)])
    assert DPO(ToyAST()).flatten(graph) == [DPOStep("open", ended, "red")]


class Sums(ToyAST):
    """The baseline returns the log-prob of the whole probe."""

    def get_baseline_logprobs(self, context, continuation):
        return super().get_baseline_logprobs(context, continuation).sum(dim=1, keepdim=True)


@pytest.mark.parametrize("solver", [DPO, lambda system: GRPO(system, kl_coef=0.1), lambda s: PPO(s, kl_coef=0.1)])
def test_a_baseline_of_other_tokens_is_refused(solver):
    system = Sums(ppl_weight=0.0)
    graph = Graph("open", [Node("open", "red blue", ".", 1.0), Node("open", "green red", ".", 0.0)])
    algorithm = solver(system)
    with pytest.raises(EngineError, match=r"get_baseline_logprobs: expected \[\d, 2\], .* found \[\d, 1\]"):
        algorithm.step(algorithm.collate_fn(algorithm.flatten(graph)))


def test_scores_and_rewards_that_are_no_numbers_are_named():
    system = ToyAST(ppl_weight=0.0)
    system.scorer = Likes()
    system.scorer.score = lambda texts: [0.0]
    with pytest.raises(EngineError, match="score: expected 4, one for each text, found 1"):
        ASTSampler(system, ["open"], 2, 1).rollout(0)
    system.scorer.score = lambda texts: [math.nan] * len(texts)
    with pytest.raises(EngineError, match="reward: found nan for the probe"):
        ASTSampler(system, ["open"], 2, 1).rollout(0)


def test_a_users_system_gets_the_reward_and_level_by_level_trees():
    """Every probe is two words of probability 1/3, so its perplexity is 3."""
    system = ToyAST()
    graphs = ASTSampler(system, ["open"], tree_width=2, tree_depth=3).rollouts([0, 1, 2, 3, 4])
    assert system.batch_sizes == [10, 20, 40], "one batch per level for all five trees"
    for graph in graphs:
        assert [len(group) for group in graph.sibling_groups()] == [2] * 7
        for node in graph.nodes():
            combined, alone = float("green" in node.probe + node.response), float("green" in node.response)
            assert node.reward == pytest.approx(0.1 * combined + 0.1 * alone - 0.025 * 3, abs=1e-6)
            for child in node.children:
                assert child.context == node.context + node.probe + node.response
                assert child.depth == node.depth + 1


def test_zero_ppl_weight_calls_no_model():
    class Silent(ToyAST):
        def get_baseline_logprobs(self, context, continuation):
            raise AssertionError("not needed")

    assert Silent(ppl_weight=0.0).reward(["c"], ["green"], ["."]) == pytest.approx([0.1])


def test_likelihood_can_come_from_the_target():
    class Sure(ToyAST):
        def get_target_logprobs(self, context, continuation):
            return torch.full((len(continuation), 3), -2.0)

    assert Sure(likelihood="target").perplexities(["c"], ["red"]) == pytest.approx([math.exp(2.0)])
    assert Sure().perplexities(["c"], ["red"]) == pytest.approx([3.0])


def probes(graph):
    return [(node.context, node.probe, node.response) for node in graph.nodes()]


class Doubles(ASTSampler):
    """A user's sampler that changes the trees after they are sampled, as one does to back rewards up."""

    def rollout(self, seed=None):
        return self._double(super().rollout(seed))

    def eval_rollout(self, seed=None):
        return self._double(super().eval_rollout(seed))

    def _double(self, graph):
        for node in graph.nodes():
            node.reward = 2.0
        return graph


def test_a_sampler_that_overrides_rollout_is_called_for_every_tree():
    system = ToyAST()
    sampler = Doubles(system, ["open"], tree_depth=2)
    harness = Harness(sampler, PPO(system), 3)
    steps = [reward for batch in harness.experience(0) for reward in batch.reward]
    assert steps == [2.0] * 3 * (2 + 4)
    summary = ASTEvaluator(sampler, seeds=[0, "open"]).evaluate(progress=False)["summary"]
    assert summary["avg_reward"] == 2.0
    plain = ASTSampler(system, ["open"], tree_depth=2)
    assert str(plain.rollout(7)) == str(plain.rollouts([7])[0])
    assert str(plain.eval_rollout("open")) == str(plain.eval_rollouts(["open"])[0])


def test_zero_is_a_seed_and_seeds_give_different_trees(make_problem):
    problem, openings = make_problem(), ["hello", "play at row 1", "Paris"]
    sampler = ASTSampler(problem, openings, tree_depth=2)
    assert probes(sampler.rollout(0)) == probes(sampler.rollout(0))
    together = sampler.rollouts([0, 1, 2])
    assert probes(together[0]) == probes(sampler.rollout(0))
    assert len({str(probes(graph)) for graph in together}) == 3
    assert probes(sampler.rollout()) != probes(sampler.rollout()), "no seed: a different tree each time"
    assert len({graph.context for graph in ASTSampler(problem, openings, 1, 1).rollouts(range(12))}) == 3, (
        "the seed chooses the opening"
    )


def test_the_sampled_tokens_are_trained(make_problem):
    problem = make_problem(temperature=0.7)
    nodes = list(ASTSampler(problem, ["hello", "Paris"], 2, 2).rollout(3).nodes())
    context, probes = [node.context for node in nodes], [node.probe for node in nodes]
    sampling = problem.get_sampling_logprobs(context, probes)
    tester = problem.get_tester_logprobs(context, probes)
    mask = problem.token_mask(context, probes, tester)
    assert tester.requires_grad
    assert not any(probe.tokens.restricted for probe in probes), "no top-p or top-k: training is on-policy"
    assert mask.sum(dim=1).tolist() == [len(probe.tokens.token_ids) for probe in probes]
    assert (tester.detach() - sampling).abs().max() < 1e-4
    assert (tester.detach()[~mask] == 0).all()
    baseline = problem.get_baseline_logprobs(context, probes)
    assert not baseline.requires_grad
    assert torch.allclose(baseline, tester.detach(), atol=1e-5), "no training yet"


def test_plain_text_is_encoded_by_the_chat_template(make_problem):
    """Against the module's log-probs of prompt and reply in the chat template, end token included."""
    problem = make_problem()
    logprobs = problem.get_tester_logprobs(["hello"], ["the dog"])
    model, tokenizer = problem.engine.model, problem.engine.tokenizer
    start, whole = "<|user|>hello<|end|><|assistant|>", "<|user|>hello<|end|><|assistant|>the dog<|end|>"
    prompt, ids = (tokenizer.encode(text, add_special_tokens=False) for text in (start, whole))
    logits = model.module(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    expected = [logits[i - 1, ids[i]].item() for i in range(len(prompt), len(ids))]
    assert logprobs[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert problem.token_mask(["hello"], ["the dog"], logprobs).tolist() == [[True] * len(expected)]


def test_one_forward_gives_log_probs_and_values(make_problem):
    problem = make_problem()
    with torch.no_grad():
        problem.engine.critic.bias.fill_(0.5)
    logprobs, values = problem.logprobs_and_values(["hello", "hello"], ["the dog", "yes"])
    assert torch.allclose(logprobs, problem.get_tester_logprobs(["hello", "hello"], ["the dog", "yes"]), atol=1e-6)
    mask = logprobs != 0
    assert values[mask].tolist() == pytest.approx([0.5] * int(mask.sum()))
    assert (values[~mask] == 0).all()
    assert torch.equal(problem.value(["hello"], ["yes"]), problem.logprobs_and_values(["hello"], ["yes"])[1])


def test_values_need_a_critic(make_problem):
    with pytest.raises(ConfigError, match="value_head"):
        make_problem(value_head=False).value(["hello"], ["yes"])


def test_the_baseline_is_the_model_without_its_adapters(make_problem):
    problem = make_problem(policy={"lora": {"r": 4}})
    names = [name for name in problem.engine.learner.parameters if not name.startswith("value_head")]
    assert names
    assert all("lora_" in name for name in names)
    with torch.no_grad():
        for name in names:
            problem.engine.learner.parameters[name].normal_()
    tester, baseline = problem.get_tester_logprobs(["hi"], ["dog"]), problem.get_baseline_logprobs(["hi"], ["dog"])
    assert (tester - baseline).abs().max() > 1e-2


def test_a_separate_baseline(make_problem, tiny_target_dir, tmp_path):
    problem = make_problem(baseline=tiny_target_dir)
    target = problem.get_target_logprobs(["hello"], ["the dog"])
    assert torch.allclose(problem.get_baseline_logprobs(["hello"], ["the dog"]), target, atol=1e-6)
    assert not target.requires_grad
    assert (target - problem.get_tester_logprobs(["hello"], ["the dog"])).abs().max() > 1e-2


def test_a_baseline_with_another_vocabulary_is_rejected(make_problem, tmp_path):
    from tests.models import make_tiny_model

    other = make_tiny_model(tmp_path / "other", vocab_size=300)
    with pytest.raises(ConfigError, match="vocabulary differs from the tester's"):
        make_problem(baseline=other)


def test_a_function_is_a_target(make_problem):
    seen, threads = [], set()

    def agent(messages):
        seen.append(messages)
        threads.add(threading.current_thread())
        return "zorp" if len(messages) > 1 else "no"

    problem = make_problem(target=agent, scorer=KeywordScorer("zorp"), ppl_weight=0.0)
    graph = ASTSampler(problem, ["hello"], 1, 2).rollout(0)
    assert [node.response for node in graph.nodes()] == ["no", "zorp"]
    assert [node.reward for node in graph.nodes()] == [0.0, pytest.approx(0.2)]
    assert seen[0][0]["content"].startswith("hello\n")
    assert threading.main_thread() not in threads
    with pytest.raises(ConfigError, match="agent cannot score given text"):
        problem.get_target_logprobs(["hello"], ["yes"])


async def test_an_async_function_is_a_target_inside_a_running_loop(make_problem):
    async def agent(messages):
        await asyncio.sleep(0)
        return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}

    problem = make_problem(target=agent)
    [response] = problem.rollout_prompt_with_target([Conversation("hello") + "go"])
    assert response == ""
    assert response.message["tool_calls"][0]["function"]["name"] == "f"


def test_a_chat_model_is_a_target_and_its_failure_is_raised(make_problem):
    class Endpoint:
        model_name, is_policy = "endpoint", False

        async def sample(self, request):
            if request.messages[0]["content"].startswith("down"):
                raise BackendUnavailable("http://nowhere: no answer")
            return ModelReply({"role": "assistant", "content": f"seed {request.sampling.seed}"}, "stop", None)

    problem = make_problem(target=Endpoint())
    nodes = ASTSampler(problem, ["hello"], 2, 1).rollout(5).children
    assert nodes[0].response != nodes[1].response, "each response has its own seed"
    with pytest.raises(BackendUnavailable, match="no answer"):
        ASTSampler(problem, ["down"], 2, 1).rollout(5)


class Echo:
    model_name, is_policy = "echo", False

    async def sample(self, request):
        return ModelReply({"role": "assistant", "content": f"{len(request.messages)} messages"}, "stop", None)


@pytest.mark.parametrize("plain", [False, True])
def test_a_workflow_is_a_target(make_problem, plain):
    async def clerk(item, llm, context):
        reply = await llm.chat.completions.create(messages=item.full_dataset_entry["messages"])
        return f"{reply.choices[0].message.content}, the last {item.input_obj!r}"

    def plain_clerk(item, llm, context):
        reply = llm.chat.completions.create(messages=item.full_dataset_entry["messages"])
        return f"{reply.choices[0].message.content}, the last {item.input_obj!r}"

    target = WorkflowTarget(plain_clerk if plain else clerk, {"model": Echo()})
    problem = make_problem(target=target)
    assert problem.rollout_prompt_with_target([Conversation("hi") + "a", Conversation("hi", "a", "b") + "c"]) == [
        "1 messages, the last 'hi\\na'",
        "3 messages, the last 'c'",
    ]


def test_a_policy_failure_has_an_output_and_an_environment_failure_raises(make_problem):
    def clerk(item, llm, context):
        if "down" in item.input_obj:
            raise OSError("no such desk")
        raise PolicyFailure("not parsable", output="zorp")

    problem = make_problem(target=WorkflowTarget(clerk, {"model": Echo()}, settings={"outcomes": {"retries": 0}}))
    assert problem.rollout_prompt_with_target([Conversation("hi") + "a"]) == ["zorp"]
    with pytest.raises(BackendError, match="clerk returned no answer.*no such desk"):
        problem.rollout_prompt_with_target([Conversation("hi") + "down"])


def test_a_conversation_that_fills_the_context_ends(make_problem):
    problem = make_problem(policy={"max_model_len": 24})
    graph = ASTSampler(problem, ["hello"], 1, 9).rollout(0)
    assert 1 <= len(list(graph.nodes())) < 9
    with pytest.raises(Exception, match="the limit is 24"):
        problem.rollout_prompt_with_tester(["hello " * 30])


def test_an_empty_reply_is_rejected(make_problem):
    problem = make_problem()
    with pytest.raises(TrajectoryError, match="without tokens"):
        problem.get_tester_logprobs(["hi"], [GeneratedText("", TokenLogprobs((1,), (), ()))])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"prompts": "one text"}, "list of openings"),
        ({"prompts": []}, "list of openings"),
        ({"prompts": ["a", ""]}, "none of them empty"),
        ({"prompts": ["a"], "tree_width": 0}, "tree_width 0"),
        ({"prompts": ["a"], "tree_depth": 0}, "tree_depth 0"),
    ],
)
def test_invalid_trees_are_rejected(settings, why):
    with pytest.raises(ConfigError, match=why):
        ASTSampler(ToyAST(), **settings)


def test_a_greedy_tester_is_rejected(make_problem):
    with pytest.raises(ConfigError, match="temperature"):
        make_problem(temperature=0)


def test_eval_rollout_takes_a_text_a_number_or_none():
    sampler = ASTSampler(ToyAST(), ["a", "b"], tree_width=3, tree_depth=2)
    assert sampler.eval_rollout("my own opening").context == "my own opening"
    assert probes(sampler.eval_rollout(0)) == probes(sampler.eval_rollout(0))
    assert len(list(sampler.eval_rollout().nodes())) == 2, "one conversation"
    wide = ASTSampler(ToyAST(), ["a"], tree_width=1, tree_depth=2, eval_width=2)
    assert len(list(wide.eval_rollout(0).nodes())) == 6
    rewards = [path[-1].reward for path in wide.eval_rollout(0).paths()]
    assert wide.final_reward(wide.eval_rollout(0)) == pytest.approx(sum(rewards) / 4)
    assert wide.final_reward(Graph("a", [])) is None


def test_metrics_computed_by_hand():
    """Two branches of two turns: the target fails in turn 2 of the second, the only response with `green`."""
    from reinforge.redteam.methods.ast import ASTNode

    sampler = ASTSampler(ToyAST(), ["a"])
    last = ASTNode("c", "green red", ".green", 0.2)
    graph = Graph("open", [
        ASTNode("c", "red", ".red", 0.0, [ASTNode("c", "red", ".red", 0.0)]),
        ASTNode("c", "blue", ".blue", 0.1, [last]),
    ])  # fmt: skip
    metrics = ASTEvaluator(sampler).compute_metrics(graph)
    assert (metrics.overall["num_branches"], metrics.overall["first_failing_turn"]) == (2, 2)
    assert [row["path"] for row in metrics.overall["turns"]] == [[0], [0, 0], [1], [1, 0]]
    assert [row["target_toxicity"] for row in metrics.per_turn] == [0.0, 0.5]
    assert metrics.overall["reward"] == pytest.approx(0.075)
    assert metrics.overall["adversarial_toxicity"] == 0.25, "a mean, not 1/n for any score above 0"
    names = ("avg_reward", "avg_adversarial_toxicity", "avg_target_toxicity")
    assert [metrics.overall[name] for name in names] == [pytest.approx(0.075), 0.25, 0.25]
    firsts = ("first_adversarial_toxicity_turn", "first_target_toxicity_turn")
    assert [metrics.overall[name] for name in firsts] == [2, 2]
    first = {name: metrics.per_turn[0][name] for name in ("turn", "context", "probe", "response")}
    assert first == {"turn": 1, "context": "c", "probe": "red", "response": ".red"}, "of the first branch"
    aggregated = ASTEvaluator(sampler).aggregate_metrics([metrics])
    summary = aggregated["summary"]
    assert (summary["attack_success"]["mean"], summary["attack_success"]["count"]) == (0.5, 2)
    assert summary["first_failing_turn"] == {"2": 1}
    assert summary["attack_success_by_turn"][1]["mean"] == 0.5
    assert summary["perplexity"] == {"all": pytest.approx(3.0), "successful": pytest.approx(3.0)}
    assert (summary["num_probes"], summary["num_distinct"]) == (4, 3)
    assert (summary["n_rollouts"], summary["avg_reward"]) == (1, pytest.approx(0.075))
    assert summary["pct_rollouts_with_adversarial_toxicity"] == 1.0
    assert summary["pct_rollouts_with_target_toxicity/attack_success_rate"] == 1.0
    assert aggregated["examples"][0]["probe"] == "green red"


def test_metrics_of_a_users_own_are_aggregated():

    class Own(ASTEvaluator):
        def compute_metrics(self, g):
            first = 1 if "green" in g.context else None
            return GraphMetrics({"avg_reward": float(len(g.context)), "first_target_toxicity_turn": first}, [])

    found = Own(ASTSampler(ToyAST(), ["a"]), seeds=["green", "red"]).evaluate(progress=False)
    assert found["summary"]["avg_reward"] == 4.0
    assert found["summary"]["avg_target_toxicity"] is None, "it did not say"
    assert found["summary"]["pct_rollouts_with_target_toxicity/attack_success_rate"] == 0.5
    assert found["summary"]["pct_rollouts_with_adversarial_toxicity"] is None
    assert [row["overall"]["avg_reward"] for row in found["details"]] == [5.0, 3.0]


def test_a_plain_system_is_evaluated_without_perplexity():
    system = ToySystem()
    graph = Graph("open", [Node("c", "green", ".green", 1.0)])
    overall = ASTEvaluator(ASTSampler(system, ["a"])).compute_metrics(graph).overall
    assert (overall["turns"][0]["perplexity"], overall["first_target_toxicity_turn"]) == (None, 1)


def test_success_has_a_wilson_interval():
    system = ToyAST()
    with torch.no_grad():
        system.logits[:, 1] = 30.0
    found = ASTEvaluator(ASTSampler(system, ["a"], tree_depth=1), seeds=range(4)).evaluate(progress=False)
    low, high = (found["summary"]["attack_success"][end] for end in ("ci_low", "ci_high"))
    assert low == pytest.approx(1 / (1 + 1.959964**2), abs=1e-4), "n of n openings: n / (n + z^2), and n is 1"
    assert high == 1.0
    assert len(found["details"]) == 4


def test_an_empty_rollout_gives_none():
    found = ASTEvaluator(ASTSampler(ToyAST(), ["a"])).aggregate_metrics(
        [ASTEvaluator(ASTSampler(ToyAST(), ["a"])).compute_metrics(Graph("a", []))]
    )["summary"]
    assert found["attack_success"] == {"mean": None, "ci_low": None, "ci_high": None, "count": 0}
    assert found["avg_reward"] is None
