"""Teams: who hears whom, whose message is the answer, and the rewards."""

import pytest

from reinforge.config.finetuning_blocks import LimitsConfig
from reinforge.errors import ConfigError
from reinforge.multiagent.protocols.roles import Roles, RolesConfig
from tests.doubles import Scored
from tests.talk import Talk, assistant, build_groups, example, format_messages, user


class Run:
    def __init__(self, score):
        self.evaluator = Scored(score)
        self.config = self
        self.eval, self.finetuning = self, self
        self.evaluators, self.limits = {"solved": None}, LimitsConfig()

    async def get_evaluator(self, name):
        return self.evaluator


async def team(score=lambda item: float(item.output_obj == item.expected_output_obj), **settings):
    settings = {"roles": ["planner", "worker", "critic"], "evaluator": "solved", **settings}
    handler = Roles(RolesConfig(agents={}, **settings))
    await handler.setup(Run(score))
    return handler


async def test_all_roles_hear_each_other_and_the_answer_is_scored():
    handler = await team(answer="worker", role_rewards={"critic": 0.5, "planner": 0.0})
    talk = Talk(handler, {"planner": ["Count."], "worker": ["42"], "critic": ["Fine."]})
    output = await talk.output(item=example("42"))
    assert format_messages(output) == ["planner@planner: Count.", "worker@worker: 42", "critic@critic: Fine."]
    assert talk.prompts_of("critic") == [[user("I am critic.", "planner: Count.", "worker: 42")]]
    assert output["branches"] == [
        {
            "path": [],
            "decision": None,
            "terminated": False,
            "answer": "42",
            "rewards": {"planner": 0.0, "worker": 1.0, "critic": 0.5},
            "failed": None,
        }
    ]
    assert (str(output), output["truth"]) == ("42", None)


async def test_several_passes_and_who_hears_whom():
    handler = await team(passes=2, hears={"critic": ["worker"], "planner": []})
    talk = Talk(handler, {"planner": ["p", "q"], "worker": ["1", "2"], "critic": ["no", "7"]})
    output = await talk.output(item=example("7"))
    assert talk.prompts_of("critic")[1] == [
        user("I am critic.", "worker: 1"), assistant("no"), user("worker: 2")
    ]  # fmt: skip
    assert talk.prompts_of("planner")[1] == [user("I am planner."), assistant("p"), user("Go on.")]
    assert talk.prompts_of("worker")[1][-1] == user("critic: no", "planner: q")
    assert output["branches"][0]["answer"] == "7", "by default the last role's last message"
    assert output["branches"][0]["rewards"] == {"planner": 1.0, "worker": 1.0, "critic": 1.0}


async def test_a_role_may_speak_twice_in_a_pass():
    handler = await team(roles=["worker", "critic", "worker"])
    assert handler.agent_names == ("worker", "critic")
    assert (handler.max_message_rounds, handler.agent_first_active_round("critic")) == (3, 1)
    talk = Talk(handler, {"worker": ["1", "2"], "critic": ["no"]})
    assert (await talk.output(item=example("2")))["branches"][0]["rewards"] == {"worker": 1.0, "critic": 1.0}


async def test_a_tree_of_a_team_backs_up_scores():
    """Worker 1 or 2; critic keeps it or says 2; the answer is the critic's and 2 is right."""
    replies = {"worker": iter("12"), "critic": iter("1222")}
    handler = await team(roles=["worker", "critic"], num_responses=2)
    talk = Talk(handler, {name: lambda request, said=said: next(said) for name, said in replies.items()})
    records = await talk.run("collect", item=example("2"))
    found = sorted((t.agent, t.episode[-1].content, t.reward) for group in build_groups(records) for t in group)
    assert found == [
        ("critic", "1", 0.0), ("critic", "2", 1.0), ("critic", "2", 1.0), ("critic", "2", 1.0),
        ("worker", "1", 0.5), ("worker", "2", 1.0),
    ]  # fmt: skip


async def test_an_evaluator_that_gives_no_score_makes_the_episode_missing():
    handler = await team(lambda item: None, roles=["worker"])
    (record,) = await Talk(handler, {"worker": ["1"]}).run()
    assert record.outcome.is_missing
    assert "the evaluator solved returned no score" in record.reason


async def test_an_unknown_evaluator_is_refused():
    handler = Roles(RolesConfig(agents={}, roles=["worker"], evaluator="solvd"))
    with pytest.raises(ConfigError, match='eval.evaluators has no entry "solvd", did you mean "solved"'):
        await handler.setup(Run(None))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"answer": "boss"}, 'answer: unknown role "boss"'),
        ({"hears": {"critik": []}}, 'hears: unknown role "critik", did you mean "critic"'),
        ({"hears": {"critic": ["boss"]}}, 'hears: unknown role "boss"'),
        ({"role_rewards": {"boss": 1.0}}, 'role_rewards: unknown role "boss"'),
        ({"max_message_rounds": 3}, "max_message_rounds"),
    ],
)
async def test_contradictory_teams_are_refused(settings, found):
    with pytest.raises(ValueError, match=found):
        await team(**settings)
