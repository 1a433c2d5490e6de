"""Each adapter's view of an episode has its own calls with their marks and rewards, and no calls of other adapters."""

import pytest

from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.config.finetuning_blocks import OutcomesConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.rollout.episode import build_adapter_trajectories, build_trajectory, select_calls
from reinforge.rollout.models.policy_llm import PolicyLLM, PolicyLLMConfig, find_adapters
from reinforge.rollout.tree import groups_from_tree
from reinforge.rollout.workflow import bind_workflow
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from reinforge.types.episode import EpisodeKey, EpisodeRecord, Mark, ModelCall
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams, TokenLogprobs
from tests.doubles import PolicyModel, Scored, ScriptedPolicy, examples
from tests.episodes import make_runner

POLICIES = {"planner": "a", "worker": "b", "helper": "b"}


def call(number, llm, prompt, reply):
    tokens = TokenLogprobs((1, number), (10 + number,), (-0.1,))
    request = ModelRequest([{"role": "user", "content": prompt}], SamplingParams(seed=number))
    answer = ModelReply({"role": "assistant", "content": reply}, "stop", tokens, 2, 1)
    return ModelCall(f"c{number}", llm, llm, request, answer, (), 0.0, 0.0)


def mark(after_call, step_reward, call_id=None):
    return Mark(after_call, step_reward, None, (), 0.0, call_id)


def record(*calls, marks=()):
    return EpisodeRecord(EpisodeKey("collect", 0, "e", 3), examples(1)[0], calls=list(calls), marks=list(marks))


EPISODE = record(
    call(1, "planner", "plan", "p1"),
    call(2, "worker", "do p1", "w1"),
    call(3, "judge", "look", "j"),
    call(4, "planner", "again", "p2"),
    call(5, "helper", "do p2", "w2"),
    marks=[mark(1, 1.0), mark(2, 2.0), mark(3, 4.0), mark(5, 8.0, "c4"), mark(5, 16.0)],
)
TARGETS = [True, True, False, True, True]


def contents(trajectory):
    return [item.content for item in trajectory.episode]


def test_each_adapters_view_has_its_own_calls():
    planner, worker = build_adapter_trajectories(EPISODE, 0.5, TARGETS, POLICIES)
    assert [(t.model_group, t.group_id, t.agent) for t in (planner, worker)] == [("a", "e/a", None), ("b", "e/b", None)]
    assert contents(planner) == ["plan", "p1", "again", "p2"]
    assert contents(worker) == ["do p1", "w1", "do p2", "w2"]
    assert [t.reward for t in (planner, worker)] == [0.5, 0.5]
    assert planner.episode_id == worker.episode_id == "collect/0/0/e/3"


def test_marked_rewards_stay_with_their_calls():
    """1 for the first plan, 8 for the second by its id; 2 and 16 for the worker; the judge's 4 is dropped."""
    planner, worker = build_adapter_trajectories(EPISODE, 0.5, TARGETS, POLICIES)
    assert planner.shaped_rewards == [1.0, 8.0]
    assert worker.shaped_rewards == [2.0, 16.0]
    (first, second) = samples_from_trajectory(planner)
    assert [first.token_ids.tolist(), second.token_ids.tolist()] == [[1, 1, 11], [1, 4, 14]]


def test_selecting_calls_does_not_change_the_episode():
    part = select_calls(EPISODE, [False, True, False, False, True])
    assert [each.call_id for each in part.calls] == ["c2", "c5"]
    assert [(each.after_call, each.step_reward) for each in part.marks] == [(1, 2.0), (2, 16.0)]
    assert (len(EPISODE.calls), len(EPISODE.marks)) == (5, 5)
    ahead = select_calls(record(call(1, "planner", "x", "y"), marks=[mark(0, 3.0)]), [False])
    assert [each.step_reward for each in ahead.marks] == [3.0], "a mark before the first call belongs to no call"


def test_without_adapter_names_there_is_one_view_of_all_calls():
    policies = {"planner": None, "worker": None}
    (found,) = build_adapter_trajectories(EPISODE, 0.5, TARGETS, policies)
    assert found.model_dump() == build_trajectory(EPISODE, 0.5, TARGETS).model_dump()
    assert (found.group_id, found.model_group, len(found.episode)) == ("e", None, 10)


def test_an_adapter_that_was_not_called_has_no_view():
    (found,) = build_adapter_trajectories(record(call(1, "worker", "x", "y")), 1.0, [True], POLICIES)
    assert found.model_group == "b"
    (empty,) = build_adapter_trajectories(record(call(1, "judge", "x", "y")), 1.0, [False], POLICIES)
    assert (empty.model_group, empty.episode) == ("a", []), "if no policy was called, the first one has an empty view"


def test_a_view_can_have_an_agent_and_an_adapter():
    """Used by builders with several agents on one model."""
    found = build_trajectory(EPISODE, 1.0, TARGETS, chosen=[True] + [False] * 4, agent="planner", model_group="a")
    assert (found.agent, found.model_group, found.group_id, contents(found)) == ("planner", "a", "e", ["plan", "p1"])


def test_replies_of_two_adapters_to_one_prompt_are_not_siblings():
    calls = [call(n, llm, "go", str(n)) for n, llm in enumerate(("planner", "planner", "worker", "worker"))]
    groups = groups_from_tree(record(*calls), [True] * 4, "none", POLICIES)
    assert [[(t.model_group, t.turns[-1].content) for t in group] for group in groups] == [
        [("a", "0"), ("a", "1")],
        [("b", "2"), ("b", "3")],
    ]
    assert len({group[0].group_id for group in groups}) == 2
    (together,) = groups_from_tree(record(*calls), [True] * 4)
    assert len(together) == 4


async def plan_and_work(item, llm, context):
    """The worker's prompt contains the planner's reply."""
    plan = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
    text = plan.choices[0].message.content
    work = await context.llm("worker").chat.completions.create(messages=[{"role": "user", "content": f"do {text}"}])
    return work.choices[0].message.content


async def test_the_group_builder_makes_a_group_for_each_example_and_adapter():
    config = FinetuneConfig(reward_function={"name": "reward"})
    planner, worker = (ScriptedPolicy(lambda request, who=who: f"{who} {request.sampling.seed % 7}") for who in "pw")
    llms = {"planner": PolicyModel(planner), "worker": PolicyModel(worker)}
    runner = make_runner(bind_workflow(plan_and_work, "planner"), llms=llms, seed=0)
    settings = GroupTrajectoryBuilderConfig(num_generations=3)
    builder = GroupTrajectoryBuilder(settings, {"planner": "a", "worker": "b"})
    builder.evaluation = DatasetEvaluation(
        runner,
        {"train": examples(2)},
        {"reward": Scored(lambda item: float(item.output_obj[-1]))},
        reward_metric="reward",
        outcomes=OutcomesConfig(),
        listener=lambda record: None,
    )
    await builder.initialize(config)
    await builder.start_run("x", {"epoch": 0})
    groups = (await builder.finalize("x", {"epoch": 0})).groups
    assert builder.plan(0).groups_per_example == 2
    assert [(group.group_id, group.model_group, len(group.trajectories)) for group in groups] == [
        ("1/a", "a", 3),
        ("1/b", "b", 3),
        ("0/a", "a", 3),
        ("0/b", "b", 3),
    ], "in the epoch's order of the examples"
    for plans, works in (groups[:2], groups[2:]):
        assert plans.rewards == works.rewards, "siblings of both are the same episodes"
        for plan, work in zip(plans.trajectories, works.trajectories, strict=True):
            assert [turn.content[0] for turn in plan.turns + work.turns] == ["p", "w"]
            assert work.episode[0].content == f"do {plan.turns[0].content}"


def test_find_adapters():
    llms = {"planner": PolicyLLMConfig(adapter="a"), "plain": PolicyLLMConfig(), "worker": PolicyLLMConfig(adapter="b")}
    assert find_adapters(llms) == {"planner": "a", "worker": "b"}
    for bad in ("two words", "a-b", "", "training"):
        with pytest.raises(ValueError, match="is not a valid adapter name"):
            PolicyLLMConfig(adapter=bad)


async def test_a_server_with_one_policy_rejects_other_names():
    policy = ScriptedPolicy()
    assert PolicyLLM(lambda: policy).model_name == "scripted"
    with pytest.raises(ConfigError, match="ScriptedPolicy serves a single policy, none named a"):
        _ = PolicyLLM(lambda: policy, "a").model_name
