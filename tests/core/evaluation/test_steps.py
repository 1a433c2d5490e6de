"""Evaluators get the steps of the episode that they score: model calls, and what the agent marked."""

from reinforge.types.steps import IntermediateStepType
from tests.core.e2e.test_reporting import LearningRun


async def marking(item, llm, context):
    for number in range(2):
        reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
        context.mark(step_reward=0.25 * (number + 1))
    return reply.choices[0].message.content


def sum_of_steps(item):
    """Each reply's digit, and the rewards of the steps: known only from `item.trajectory`."""
    replies = [step.payload.data.output for step in item.trajectory if step.event_type == IntermediateStepType.LLM_END]
    marks = [(step.payload.metadata or {}).get("step_reward", 0.0) for step in item.trajectory if step.name == "mark"]
    assert replies[-1] == item.output_obj
    return sum(float(reply[-1]) for reply in replies) + sum(marks)


async def test_a_reward_computed_from_steps_trains(tmp_path):
    run = LearningRun(tmp_path, workflow=marking, reward=sum_of_steps)
    summary = await run.run()
    assert (summary.status, summary.num_jobs) == ("completed", 2), summary.reason
    rewards = [
        trajectory.reward for job in run.adapter.jobs for group in job.groups for trajectory in group.trajectories
    ]
    assert {reward % 1 for reward in rewards} == {0.75}, "0.25 and 0.5 of the two marks"
    assert len(set(rewards)) > 2
