"""Views of a protocol's agents, their groups and their advantages, on hand-written episodes."""

import math
from dataclasses import replace

import pytest

from reinforge.algorithms.dpo import DPO
from reinforge.algorithms.expert_iteration import ExpertIteration
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.algorithms.malt import MALT, MALTConfig
from reinforge.algorithms.samples import weight_by_agent
from reinforge.algorithms.sft import SFT
from reinforge.errors import ContextOverflow, EvaluationError
from reinforge.multiagent.builder import AgentsTrajectoryBuilderConfig
from reinforge.multiagent.protocols.nip import NIP, NIPConfig
from reinforge.multiagent.protocols.roles import RolesConfig
from reinforge.multiagent.protocols.solo_verifier import SoloVerifierConfig
from reinforge.types.request import ChatPrompt, TokenLogprobs
from reinforge.types.trajectory import Outcome
from reinforge.types.workflow import BoundWorkflow
from tests.dialogues import collect_groups, make_branch, make_episode, make_message
from tests.doubles import ScriptedPolicy, ids_of

TALK = [
    make_message("verifier", "why", round_=0),
    make_message("prover", "since", round_=1),
    make_message("verifier", "accept", round_=2),
]


def dialogue(verifier, prover, **more):
    """An episode of three messages, with the rewards of both agents."""
    return make_episode(TALK, [make_branch({"verifier": verifier, "prover": prover})], **more)


def texts(trajectory):
    return [(item.role.value, item.content) for item in trajectory.episode]


async def test_each_agent_sees_itself_as_assistant_and_is_grouped_by_example():
    _, collection = await collect_groups([dialogue(1, 0), dialogue(-1, 1, generation=1), dialogue(1, 1, example="y")])
    assert [(group.group_id, group.rewards) for group in collection.groups] == [
        ("x/verifier", [1, -1]),
        ("x/prover", [0, 1]),
        ("y/verifier", [1]),
        ("y/prover", [1]),
    ]
    verifier, prover = (group.trajectories[0] for group in collection.groups[:2])
    assert texts(verifier) == [("user", "verifier!"), ("assistant", "why"), ("user", "Go on."), ("assistant", "accept")]
    assert texts(prover) == [("user", "prover!"), ("assistant", "since")]
    assert (verifier.agent, prover.agent) == ("verifier", "prover")
    [sample] = GRPO().build_samples(collection.groups)[:1]
    assert sample.num_trained == len("why") + len("accept"), "one row: the second prompt continues the first reply"


async def test_grpo_compares_each_agent_with_itself():
    """Verifier 1, -1, -1, -1: mean -0.5. Prover 1, 1, 0, 1: mean 0.75. Of all eight the mean would be 0.125."""
    earned = [(1, 1), (-1, 1), (-1, 0), (-1, 1)]
    _, collection = await collect_groups([dialogue(*each, generation=n) for n, each in enumerate(earned)])
    grpo = GRPO(GRPOConfig(scale_rewards=False))
    samples = grpo.build_samples(collection.groups)
    found = {
        name: [
            float(a.max() if a.max() > 0 else a.min())
            for s, a in zip(samples, grpo.credit(samples), strict=True)
            if s.agent == name
        ]
        for name in ("verifier", "prover")
    }
    assert found == {"verifier": [1.5, -0.5, -0.5, -0.5], "prover": [0.25, 0.25, -0.75, 0.25]}


async def test_the_chattiest_role_counts_no_more_than_the_others():
    """9 tokens of the verifier, 5 of the prover: each counts 7 of the 14, or 3.5 and 10.5 with the weights 1 and 3."""
    _, collection = await collect_groups([dialogue(1, 1)])
    samples = SFT().build_samples(collection.groups)
    assert [sample.num_trained for sample in samples] == [9, 5]
    weight_by_agent(samples)
    assert [sample.weight * sample.num_trained for sample in samples] == [pytest.approx(7), pytest.approx(7)]
    _, collection = await collect_groups([dialogue(1, 1)], agent_weights={"prover": 3.0})
    samples = SFT().build_samples(collection.groups)
    weight_by_agent(samples)
    assert [sample.weight * sample.num_trained for sample in samples] == [pytest.approx(3.5), pytest.approx(10.5)]


async def test_the_epochs_mean_is_the_runs_reward_and_not_what_agents_earned():
    records = [
        dialogue(9, 9, score=1.0),
        dialogue(9, 9, score=0.0, generation=1),
        dialogue(9, 9, example="y", score=1.0),
    ]
    builder, collection = await collect_groups(records)
    assert builder.example_rewards(collection.groups) == [("x", 0.5), ("y", 1.0)]


def tree(**more):
    """Two questions with two answers each; the values of the verifier's questions are 0.75 and 0.25."""
    messages, branches, worth = [], [], []
    earned = {(0, 0): 1.0, (0, 1): 0.5, (1, 0): 0.5, (1, 1): 0.0}
    for question in (0, 1):
        messages.append(make_message("verifier", f"why {question}", [question]))
        worth.append(0.75 - question / 2)
        for answer in (0, 1):
            path = [question, answer]
            messages.append(make_message("prover", f"since {answer}", path))
            worth.append(earned[question, answer])
            branches.append(
                make_branch({"verifier": earned[question, answer], "prover": earned[question, answer]}, path)
            )
    return make_episode(messages, branches, worth=worth, **more)


async def test_a_trees_first_round_has_a_pair_too():
    """No fixed mid-point: 0.75 is preferred to 0.25, 1 to 0.5, and 0.5 to 0."""
    _, collection = await collect_groups([tree()], num_generations=1)
    assert [(group.group_id, group.rewards) for group in collection.groups] == [
        ("x/0//verifier", [0.75, 0.25]),
        ("x/0//prover", [1.0, 0.5, 0.5, 0.0]),
    ], "both questions lead the prover to the same prompt here, and so to one group"
    malt = MALT()
    samples = malt.build_samples(collection.groups)
    assert [(s.agent, s.reward) for s in samples] == [
        ("verifier", 0.75),
        ("verifier", 0.25),
        ("prover", 1.0),
        ("prover", 0.0),
    ]
    assert [a.max() + a.min() for a in malt.credit(samples)] == [1.0, -1.0, 1.0, -1.0]
    assert malt.loss.params["sft_coef"] == 1.0


async def test_ids_are_their_own_in_every_tree_and_epoch():
    """The same example twice in this epoch and once in the previous one: six groups, none shared."""
    _, collection = await collect_groups(
        [tree(epoch=1), tree(epoch=1, generation=1)],
        epoch=1,
        earlier={0: [tree(epoch=0)]},
        fine_tune_on_all_previous_rollouts=True,
    )
    assert [group.group_id for group in collection.groups] == [
        "x/0//verifier",
        "x/0//prover",
        "x/1//verifier",
        "x/1//prover",
        "epoch 0/x/0//verifier",
        "epoch 0/x/0//prover",
    ]
    assert [len(group.trajectories) for group in collection.groups] == [2, 4, 2, 4, 2, 4]


async def test_a_reply_with_an_unknown_value_is_left_out():
    record = tree()
    record.marks = [mark for mark in record.marks if mark.call_id != "0-x-0-1"]
    _, collection = await collect_groups([record], num_generations=1)
    assert collection.groups[1].rewards == [0.5, 0.5, 0.0]


async def test_an_episode_that_left_nothing_is_no_view_and_no_error():
    record = dialogue(1, 1)
    record.outcome, record.item = Outcome.CONTEXT_OVERFLOW, record.item.copy_with_updates(output_obj=None)
    _, collection = await collect_groups([record, dialogue(1, 1, generation=1)])
    assert [group.rewards for group in collection.groups] == [[1], [1]]
    record.outcome = Outcome.OK
    with pytest.raises(EvaluationError, match="needs a workflow that is a protocol"):
        await collect_groups([record])


class Writer(ScriptedPolicy):
    """Writes replies as their bytes."""

    room = 100

    async def encode(self, request, reply):
        prompt = tuple(sum((ids_of(str(message["content"])) for message in request.messages), ()))
        ids = ids_of(reply["content"])
        if len(prompt) + len(ids) > self.room:
            raise ContextOverflow("too long")
        return TokenLogprobs(prompt, ids, (math.nan,) * len(ids), policy_version=-1)


class Backwards(NIP):
    """Parses decisions as their opposite."""

    def parse_decision(self, text):
        return {"accept": "reject", "reject": "accept"}.get(text)


def bound(handler_type=NIP):
    handler = handler_type(NIPConfig(agents={}))

    async def workflow():
        talk = type("Talk", (), {"handler": handler})()
        return BoundWorkflow(talk, None, True)

    return workflow


async def test_a_share_of_the_decisions_is_replaced_by_the_truth():
    records = [dialogue(-1, 1, truth="reject", generation=n) for n in range(4)]
    policy = Writer()
    wanted = {"verifier_guess_replacement_proportion": 0.5, "workflow": bound(), "policy": lambda: policy}
    _, collection = await collect_groups(records, **wanted)
    verifier, prover = collection.groups
    assert sorted(verifier.rewards) == [-1, -1, 1, 1], "a right decision earns verifier_reward"
    assert prover.rewards == [1, 1, 1, 1]
    replaced = [t for t in verifier.trajectories if (t.metadata or {}).get("guess_replaced")]
    assert [texts(t)[-1] for t in replaced] == [("assistant", "reject")] * 2
    kept = ExpertIteration().build_samples([verifier])
    assert len(kept) == 1, "both have equal tokens now"
    assert bytes(kept[0].token_ids.tolist()) == b"verifier!whyGo on.reject"
    assert kept[0].num_trained == len("why") + len("reject")
    assert [math.isnan(p) for p in kept[0].sampling_logprobs[-len("reject") :]] == [True] * len("reject")
    _, again = await collect_groups(records, **wanted)
    assert again.groups[0].rewards == verifier.rewards, "which ones is the seed's choice, in every process"


class Service(ScriptedPolicy):
    """A policy that returns no tokens, neither for samples nor for encoded replies."""

    async def encode(self, request, reply):
        return ChatPrompt(tuple(request.messages), None, -1)


@pytest.mark.parametrize("logprobs", [None, {"content": []}])
async def test_decisions_are_replaced_without_tokens_of_a_service(logprobs):
    record = dialogue(-1, 1, truth="reject")
    for call in record.calls:
        call.reply = replace(call.reply, tokens=None, policy_version=0, logprobs=logprobs)
    wanted = {"verifier_guess_replacement_proportion": 1.0, "workflow": bound(), "policy": Service}
    _, collection = await collect_groups([record], **wanted)
    (verifier,) = collection.groups[0].trajectories
    assert (verifier.reward, texts(verifier)[-1]) == (1, ("assistant", "reject"))
    assert [turn.prompt.policy_version for turn in verifier.turns] == [0, -1]


async def test_decisions_that_cannot_be_replaced_stay():
    policy = Writer()
    wanted = {"verifier_guess_replacement_proportion": 1.0, "workflow": bound(), "policy": lambda: policy}
    undecided = make_episode(TALK[:2], [make_branch({"verifier": -1, "prover": 0}, decision=None)])
    unknown = dialogue(0, 0, truth=None, generation=1)
    _, collection = await collect_groups([undecided, unknown], **wanted)
    assert collection.groups[0].rewards == [-1, 0]
    policy.room = 3
    _, collection = await collect_groups([dialogue(-1, 1, truth="reject")], **wanted)
    assert collection.groups[0].rewards == [-1]
    policy.room = 100
    with pytest.raises(EvaluationError, match="override Backwards.format_decision"):
        await collect_groups([dialogue(-1, 1)], **{**wanted, "workflow": bound(Backwards)})


@pytest.mark.parametrize(
    ("annealing", "shares"),
    [("none", [0.5, 0.5, 0.5]), ("linear", [0.5, 0.4, 0.0]), ("exponential", [0.5, 0.45, 0.2657205])],
)
def test_the_share_of_replaced_guesses_is_annealed(annealing, shares):
    config = AgentsTrajectoryBuilderConfig(
        verifier_guess_replacement_proportion=0.5, verifier_guess_replacement_annealing=annealing
    )
    assert [config.guess_replacement_share(epoch) for epoch in (0, 1, 6)] == [pytest.approx(share) for share in shares]


def problems(algorithm, protocol=None, **config):
    from reinforge.config.schema import Config
    from reinforge.multiagent.builder import AgentsTrajectoryBuilder

    builder = AgentsTrajectoryBuilder(AgentsTrajectoryBuilderConfig(**config))
    protocol = protocol or NIPConfig(agents={"prover": {}, "verifier": {}})
    problems = builder.validate(Config(workflow=protocol), algorithm, [], {})
    return {problem.path: problem.message for problem in problems}


def test_settings_that_do_not_fit_the_algorithm_are_refused():
    tree_of_two = NIPConfig(agents={"prover": {}, "verifier": {}}, num_responses=2)
    assert problems(GRPO()) == problems(ExpertIteration()) == problems(MALT(), tree_of_two, num_generations=1) == {}
    assert problems(GRPO(), tree_of_two, num_generations=1) == {}
    assert list(problems(GRPO(), num_generations=1)) == ["num_generations"]
    assert 'did you mean "prover"?' in problems(GRPO(), agent_weights={"provers": 2.0})["agent_weights.provers"]
    for setting in ({"fine_tune_on_all_previous_rollouts": True}, {"verifier_guess_replacement_proportion": 0.5}):
        assert list(problems(GRPO(), **setting)) == list(setting)
        assert problems(ExpertIteration(), **setting) == {}
    assert list(problems(ExpertIteration(), tree_of_two, verifier_guess_replacement_proportion=0.5)) == [
        "verifier_guess_replacement_proportion"
    ]
    assert list(problems(MALT())) == ["workflow.num_responses"]
    assert list(problems(MALT(), SoloVerifierConfig(agents={"verifier": {}}))) == ["workflow.num_responses"]


def test_pairs_of_a_team_want_a_tree():
    team = RolesConfig(agents={"planner": {}, "worker": {}}, roles=["planner", "worker"], evaluator="score")
    assert list(problems(DPO(), team)) == ["workflow.num_responses"]
    assert problems(DPO(), SoloVerifierConfig(agents={"verifier": {}})) == {}, "one message: all answer the same prompt"


async def test_malt_trains_its_first_epochs_on_single_dialogues():
    """Expert iteration of epoch 0 imitates what earned 0.9; epoch 1 pairs the replies of trees."""
    malt = MALT(MALTConfig(num_initial_ei_epochs=1))
    first, later = malt.for_epoch(0), malt.for_epoch(1)
    assert (type(first), later, malt.for_epoch(None)) == (ExpertIteration, malt, malt)
    assert (first.needs_groups, later.needs_groups) == (False, True)
    _, collection = await collect_groups([dialogue(1, 0.5), dialogue(0, 1, generation=1)])
    samples = first.build_samples(collection.groups)
    assert [(sample.agent, sample.reward) for sample in samples] == [("verifier", 1), ("prover", 1)]
    assert [set(advantages.tolist()) for advantages in first.credit(samples)] == [{0.0, 1.0}] * 2


async def test_pairs_are_not_made_of_the_single_dialogues_of_previous_epochs():
    """Epoch 2 trains on its own tree and on that of epoch 1; epoch 0 collected single dialogues."""
    earlier = {0: [dialogue(1, 1, epoch=0)], 1: [tree(epoch=1)]}
    _, collection = await collect_groups(
        [tree(epoch=2)],
        num_generations=1,
        epoch=2,
        earlier=earlier,
        fine_tune_on_all_previous_rollouts=True,
        algorithm=MALTConfig(num_initial_ei_epochs=1),
    )
    assert [group.group_id.partition("/")[0] for group in collection.groups] == ["x", "x", "epoch 1", "epoch 1"]
