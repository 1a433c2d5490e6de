"""Faults 1-15 of NAT core (seed-faults.md), each as a test that fails on the faulty behaviour."""

import pytest
from pydantic import ValidationError

from reinforge.algorithms.curriculum import compute_included_share
from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.finetuning import (
    CurriculumLearningConfig,
    EvalInputItem,
    EvalOutputItem,
    EvaluationRunOutput,
    FinetuneConfig,
)
from reinforge.rollout.episode import build_episode_items, build_steps, build_trajectory
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from reinforge.trainer.loop import EpochTrainer, EpochTrainerConfig
from reinforge.types.episode import EpisodeKey, EpisodeRecord, Mark, ModelCall
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprobs
from tests.faults import assert_every_fault_has_a_test
from tests.scripted_run import ScriptedRun

COVERED = {
    1: ["tests/core/config/test_loader.py::test_overrides_take_precedence_and_are_parsed_as_yaml"],
    2: ["tests/core/e2e/test_user_components.py::test_a_failed_job_that_a_trainer_only_returns_fails_the_run"],
    4: ["tests/core/trainer/test_loop.py::test_status_is_a_pure_read_so_the_final_metrics_know_every_job"],
    6: [
        "tests/core/runs/test_plot.py::test_unknown_rewards_are_gaps_and_not_zero",
        "tests/core/trainer/test_outside_a_run.py::test_a_validation_that_fails_is_unknown",
        "tests/fault/test_evaluators.py::test_a_validation_without_scores_stops_the_run_and_names_the_commonest_reason",
    ],
    8: ["tests/core/rollout/test_runner.py::test_an_exception_in_a_workflow_affects_only_its_episode"],
    7: ["tests/core/rollout/test_runner.py::test_if_an_evaluator_fails_the_score_is_missing"],
    9: ["tests/core/contract/test_seed_fields.py::test_enabled_needs_all_three_parts_and_the_reward"],
    10: ["tests/core/algorithms/test_curriculum.py::test_subsampling_is_within_the_group"],
    12: ["tests/core/rollout/test_step_messages.py::test_a_message_that_the_agent_repeats_stays"],
}


def test_every_fault_has_a_test():
    assert_every_fault_has_a_test(range(1, 16), "nat", __file__, COVERED, not_there_yet=())


async def test_nat_3_components_are_open_while_training_and_closed_after_it(tmp_path):
    run = ScriptedRun(tmp_path)
    submit = run.adapter.submit

    async def recorded(trajectories):
        run.events.append("submit")
        return await submit(trajectories)

    run.adapter.submit = recorded
    await run.run()
    assert run.events == ["open", "submit", "submit", "closed"]


async def test_nat_3_components_are_closed_when_the_run_fails(tmp_path):
    """Also where the teardown stands after a bare `yield`, as the guide writes it."""
    run = ScriptedRun(tmp_path)
    run.adapter.healthy = False
    with pytest.raises(RuntimeError, match="not healthy"):
        await run.run()
    assert run.events == ["open", "closed"]


@pytest.mark.parametrize(
    ("interval", "shares"), [(1, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]), (5, [0.2] * 5 + [0.4]), (3, [0.2] * 3 + [0.4] * 3)]
)
def test_nat_5_the_curriculum_expands_after_full_intervals(interval, shares):
    config = CurriculumLearningConfig(initial_percentile=0.2, increment_percentile=0.2, expansion_interval=interval)
    assert [compute_included_share(config, epoch) for epoch in range(6)] == shares


def test_nat_6_missing_scores_do_not_break_the_average():
    trainer = EpochTrainer(EpochTrainerConfig())
    trainer.run_config = FinetuneConfig(reward_function={"name": "reward"})
    scored = [EvalOutputItem(id="1", score=0.5, reasoning=""), EvalOutputItem(id="2", score=None, reasoning="")]
    output = EvaluationRunOutput(
        workflow_output_file=None,
        evaluator_output_files=[],
        workflow_interrupted=False,
        eval_input={"eval_input_items": []},
        evaluation_results=[("reward", {"average_score": 0.5, "eval_output_items": scored})],
    )
    assert trainer._calculate_validation_metrics(output) == {
        "avg_reward": 0.5, "min_reward": 0.5, "max_reward": 0.5, "num_examples": 1
    }  # fmt: skip
    output.evaluation_results[0][1].eval_output_items.pop(0)
    assert trainer._calculate_validation_metrics(output)["avg_reward"] is None


@pytest.mark.parametrize(
    ("score", "error", "reward"),
    [
        (0.0, None, 0.0),
        (None, None, None),
        (0.0, "the judge is down", None),
        (float("nan"), None, None),
        (True, None, 1.0),
    ],
)
async def test_nat_7_a_missing_score_is_no_reward(score, error, reward):
    builder = GroupTrajectoryBuilder(GroupTrajectoryBuilderConfig())
    item = EvalOutputItem(id="1", score=score, reasoning="", error=error)
    assert await builder.compute_reward(item) == reward


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_nat_10_the_share_of_a_subsample_is_checked(share):
    with pytest.raises(ValidationError, match="random_subsample"):
        CurriculumLearningConfig(random_subsample=share)


def record(*histories, marks=()):
    """An episode with one call for each history; the reply to the n-th is `reply n`."""
    item = EvalInputItem(id="1", input_obj="q", expected_output_obj=None, full_dataset_entry={})
    calls = []
    for index, messages in enumerate(histories):
        tokens = TokenLogprobs(tuple(range(10 * index + 1)), (100 + index,), (-0.1,))
        reply = ModelReply({"role": "assistant", "content": f"reply {index}"}, "stop", tokens, 1, 1)
        calls.append(ModelCall(f"c{index}", "agent", "m", ModelRequest(list(messages)), reply, (), 0.0, 1.0))
    return EpisodeRecord(EpisodeKey("collect", 0, "1"), item, calls=calls, marks=list(marks))


def said(*histories):
    made = record(*histories)
    return [(item.role.value, item.content) for item in build_episode_items(made, [True] * len(made.calls))]


USER, NEXT = {"role": "user", "content": "begin"}, {"role": "user", "content": "next"}


def reply(index):
    return {"role": "assistant", "content": f"reply {index}"}


def test_nat_11_shaped_rewards_reach_the_samples_by_turn():
    marks = [Mark(1, 0.25, None, (), 0.0), Mark(2, 0.5, None, (), 0.0)]
    trajectory = build_trajectory(record([USER], [USER, reply(0), NEXT], marks=marks), 1.0, [True, True])
    assert trajectory.shaped_rewards == [0.25, 0.5]
    assert {tuple(sample.turn_rewards) for sample in samples_from_trajectory(trajectory)} == {(0.25, 0.5)}


def test_nat_13_what_follows_a_tool_result_stays():
    tool = {"role": "tool", "content": "42", "tool_call_id": "t1"}
    reminder = {"role": "system", "content": "be brief"}
    histories = [USER], [USER, reply(0), tool, reminder, NEXT]
    assert said(*histories)[2:5] == [("tool", "42"), ("system", "be brief"), ("user", "next")]


def test_nat_14_several_system_prompts_and_consecutive_roles_are_accepted():
    system = {"role": "system", "content": "s"}
    tool = {"role": "tool", "content": "early", "tool_call_id": "t"}
    assert said([tool, system, system, USER, USER]) == [
        ("tool", "early"), ("system", "s"), ("system", "s"), ("user", "begin"), ("user", "begin"),
        ("assistant", "reply 0"),
    ]  # fmt: skip
    assert said([USER], [system, NEXT])[2:4] == [("system", "s"), ("user", "next")], "a second agent's own prompt"


@pytest.mark.parametrize(
    ("content", "text"), [([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"), (None, ""), ([], "")]
)
def test_nat_15_content_of_any_shape_is_one_episodes_data(content, text):
    message = {"role": "user", "content": content}
    assert said([message])[0] == ("user", text)
    assert said([{"role": "user"}])[0] == ("user", ""), "a message without content"
    assert [step.event_type for step in build_steps(record([message]))] == ["LLM_START", "LLM_END"]
