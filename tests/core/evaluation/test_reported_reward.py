"""A reward that the agent itself reports, in this process and in a worker."""

import pytest

from reinforge.errors import PolicyFailure
from reinforge.evaluation.evaluators.reported_reward import ReportedReward, ReportedRewardConfig
from reinforge.rollout.episode import with_steps
from reinforge.rollout.isolation.isolated_agent import open_isolated
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.trajectory import Outcome
from tests.doubles import examples
from tests.episodes import collect, make_evaluation, make_runner


async def score(record, metric="reward"):
    return await ReportedReward(ReportedRewardConfig(metric=metric)).evaluate(with_steps(record))


async def run(agent):
    return (await collect(make_evaluation(make_runner(bind_workflow(agent)), examples(1))))[0]


def report(item, llm, context):
    context.reward(0)
    context.mark({"another": "mark"})
    context.reward(0.75, tests=3)
    return "done"


async def test_the_last_report_counts():
    record = await run(report)
    assert ((await score(record)).score, (await score(record, "tests")).score) == (0.75, 3.0)
    assert (await score(record, "speed")).error == "context.reward(...) reported no 'speed'"


async def test_the_report_of_an_agent_in_a_worker_counts(tmp_path):
    (tmp_path / "agents.py").write_text("def report(item, llm, context):\n    context.reward(0.5)\n    return 'done'\n")
    async with open_isolated("agents:report", tmp_path, None, share_environment_seed=True) as workflow:
        (record,) = await collect(make_evaluation(make_runner(workflow), examples(1)))
    assert (await score(record)).score == 0.5


async def test_an_agent_without_a_report_has_no_score():
    result = await score(await run(lambda item, llm, context: "done"))
    assert (result.score, result.error) == (None, "the agent did not call context.reward(...)")


async def test_a_failure_has_its_penalty_as_reward_and_a_share_stays_a_share():
    """Of an episode that ends before the agent reports, `solved` is 0 where the reward of failures is -1."""

    def fail(item, llm, context):
        raise PolicyFailure("no move")

    evaluation = make_evaluation(make_runner(bind_workflow(fail), policy_error=-1.0), examples(1))
    for name, failed in (("reward", None), ("tests", None), ("solved", 0.0)):
        evaluation.evaluators[name] = ReportedReward(ReportedRewardConfig(metric=name, failed=failed))
    (record,) = await collect(evaluation)
    assert {name: output.score for name, output in record.scores.items()} == {"reward": -1, "tests": -1, "solved": 0}


async def test_a_reward_that_is_not_finite_is_the_agents_error():
    record = await run(lambda item, llm, context: context.reward(float("nan")))
    assert (record.outcome, "must be finite" in record.reason) == (Outcome.TOOL_ERROR, True)


@pytest.mark.parametrize("value", ["high", None])
async def test_a_reward_that_is_no_number_is_the_agents_error(value):
    record = await run(lambda item, llm, context: context.reward(value))
    assert record.outcome is Outcome.TOOL_ERROR
