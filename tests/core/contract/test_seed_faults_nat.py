"""Faults 1-15 of NAT core (seed-faults.md), each as a test that fails on the faulty behaviour."""

import json

import pytest
from pydantic import ValidationError

from reinforge.algorithms.curriculum import compute_included_share
from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.config.loader import load_config
from reinforge.errors import BackendUnavailable
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
from tests.scripted_run import ScriptedRun, ask

COVERED = {
    2: ["tests/core/e2e/test_user_components.py::test_a_failed_job_that_a_trainer_only_returns_fails_the_run"],
    4: ["tests/core/trainer/test_loop.py::test_status_is_a_pure_read_so_the_final_metrics_know_every_job"],
    6: ["tests/core/runs/test_plot.py::test_unknown_rewards_are_gaps_and_not_zero"],
    7: ["tests/core/rollout/test_runner.py::test_if_an_evaluator_fails_the_score_is_missing"],
    9: ["tests/core/contract/test_seed_fields.py::test_enabled_needs_all_three_parts_and_the_reward"],
    10: ["tests/core/algorithms/test_curriculum.py::test_subsampling_is_within_the_group"],
}


def test_every_fault_has_a_test():
    assert_every_fault_has_a_test(range(1, 16), "nat", __file__, COVERED, not_there_yet=())


def test_nat_1_overrides_apply_to_the_whole_configuration_before_anything_is_built(tmp_path):
    (tmp_path / "f.yml").write_text("finetuning: {num_epochs: 1}\ntrainers: {t: {_type: epoch}}\n")
    overrides = [("finetuning.num_epochs", "5"), ("trainers.t.save_every", "3"), ("eval.general.max_concurrency", "2")]
    config = load_config(tmp_path / "f.yml", overrides=overrides).config
    assert (config.finetuning.num_epochs, config.trainers["t"].save_every) == (5, 3)
    assert config.eval.general.max_concurrency == 2


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


async def test_nat_6_a_validation_that_fails_is_unknown_and_never_zero(tmp_path):
    """The world fails on every example: no figure, and the reason; the run says so instead of plotting 0."""

    async def down(item, llm, context):
        raise ConnectionError("the database is down")

    run = ScriptedRun(tmp_path, workflow=down)
    with pytest.raises(BackendUnavailable, match="the baseline could not be scored.*the database is down"):
        await run.run()
    baseline = json.loads((tmp_path / "r" / "summary.json").read_text())["baseline"]
    assert (baseline["mean"], baseline["num_unscored"]) == (None, 3)


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


async def test_nat_8_one_failing_item_leaves_the_others_alone(tmp_path):
    async def fragile(item, llm, context):
        if item.id == "3":
            raise ValueError("this row is odd")
        return await ask(item, llm, context)

    run = ScriptedRun(tmp_path, workflow=fragile)
    run.settings["finetuning"]["num_epochs"] = 1
    summary = await run.run()
    assert summary.status == "completed"
    collected = sum(len(job.groups) for job in run.adapter.jobs)
    assert collected >= 10, "the other examples of the epoch are there"
    assert summary.episodes["tool_error"] in (1, 2, 4)
    assert summary.episodes["ok"] > 40


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


def test_nat_12_a_repeated_user_turn_stays():
    histories = [USER], [USER, reply(0), NEXT], [USER, reply(0), NEXT, reply(1), NEXT]
    assert said(*histories) == [
        ("user", "begin"), ("assistant", "reply 0"), ("user", "next"), ("assistant", "reply 1"), ("user", "next"),
        ("assistant", "reply 2"),
    ]  # fmt: skip


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
