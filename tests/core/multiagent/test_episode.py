"""Episodes: invalid replies, failing agents, values in trees, and independence of timing."""

import asyncio

import pytest

from reinforge.errors import BackendUnavailable, ContextOverflow
from reinforge.multiagent.dialogue import Step
from reinforge.multiagent.evaluators import InvalidReplies
from reinforge.multiagent.protocols.debate import Debate, DebateConfig
from reinforge.multiagent.protocols.nip import NIP, NIPConfig
from tests.doubles import PolicyModel, ScriptedPolicy
from tests.talk import Talk, build_groups, format_messages


def nip(**settings):
    return NIP(NIPConfig(agents={}, **{"verifier_first": False, "max_message_rounds": 2, **settings}))


def summary(groups):
    return sorted(
        sorted((t.agent, t.episode[-2].content, t.episode[-1].content, t.reward) for t in group) for group in groups
    )


async def test_an_invalid_reply_is_sampled_again_and_counted():
    talk = Talk(nip(), {"prover": ["", "  ", "red"], "verifier": ["I do not accept", "reject"]})
    (record,) = await talk.run()
    output = record.item.output_obj
    assert format_messages(output) == ["prover@main: red", "verifier@main: reject"]
    assert [m["num_retries"] for m in output["messages"]] == [2, 1]
    assert output["num_invalid"] == 3
    assert (await InvalidReplies().evaluate(record.item)).score == 3.0
    assert len(record.calls) == 5, "invalid replies stay in the record"
    trained = [item.content for (t,) in build_groups([record]) for item in t.episode if item.tokens]
    assert trained == ["red", "reject"], "and are not trained"


async def test_a_decision_before_min_message_rounds_is_invalid():
    talk = Talk(nip(max_message_rounds=4, min_message_rounds=3), {
        "prover": ["a", "b"], "verifier": ["accept", "Why?", "accept"]
    })  # fmt: skip
    output = await talk.output()
    assert format_messages(output)[1:] == ["verifier@main: Why?", "prover@main: b", "verifier@main: accept"]


async def test_only_the_agent_without_a_valid_reply_is_penalized():
    """Three replies at most (two retries); the prover's reward is not known, and so it is not trained."""
    talk = Talk(nip(), {"prover": ["red"], "verifier": ["maybe"] * 3})
    (record,) = await talk.run("collect")
    assert record.outcome == "policy_error"
    assert record.reason == "verifier: no decision in the last round, 3 times"
    (branch,) = record.item.output_obj["branches"]
    assert branch["rewards"] == {"verifier": -0.5}
    assert branch["failed"] == ["verifier", "no decision in the last round, 3 times"]
    assert record.item.output_obj["num_invalid"] == 3
    ((trajectory,),) = build_groups([record])
    assert (trajectory.agent, trajectory.reward) == ("verifier", -0.5), "the prover's reward is unknown"
    assert [turn.content for turn in trajectory.turns] == ["maybe"], "only the last of three replies is penalized"


async def test_earlier_replies_of_the_failing_agent_earn_the_penalty():
    talk = Talk(nip(max_message_rounds=4), {"prover": ["a", "b"], "verifier": ["Why?", *["maybe"] * 3]})
    (record,) = await talk.run("collect")
    ((view,),) = build_groups([record])
    assert (view.agent, view.reward, view.episode[-1].content) == ("verifier", -0.5, "maybe")


class Debater:
    """A script that repeats its lines."""

    def __init__(self, *lines):
        self.lines, self.count = lines, -1

    def __call__(self, request):
        self.count += 1
        return self.lines[self.count % len(self.lines)]


def verdict(request):
    return "accept" if request.messages[-1]["content"].split("\n")[-2].endswith("1") else "reject"


async def test_the_value_of_a_reply_in_a_tree_is_the_mean_of_its_dialogues():
    """The prover replies a1 and a0, the verifier accept and reject after each; the truth is accept."""
    talk = Talk(nip(num_responses=2), {"prover": Debater("a1", "a0"), "verifier": Debater("accept", "reject")})
    (record,) = await talk.run("collect")
    output = record.item.output_obj
    assert [m["path"] for m in output["messages"]] == [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]
    assert [b["path"] for b in output["branches"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [b["decision"] for b in output["branches"]] == ["accept", "reject"] * 2
    hint = "\nDecide now: accept or reject."
    assert summary(build_groups([record])) == [
        [("prover", "I am prover.", "a0", 0.5), ("prover", "I am prover.", "a1", 0.5)],
        [("verifier", f"I am verifier.\nprover: a0{hint}", word, r) for word, r in (("accept", 1.0), ("reject", -1.0))],
        [("verifier", f"I am verifier.\nprover: a1{hint}", word, r) for word, r in (("accept", 1.0), ("reject", -1.0))],
    ]


async def test_a_frozen_agent_does_not_branch():
    talk = Talk(
        nip(num_responses=3, max_message_rounds=4),
        {"prover": Debater("a1", "a0", "b1"), "verifier": lambda r: "why?" if len(r.messages) == 1 else verdict(r)},
        {"verifier": {"freeze_agent": True}},
    )
    (record,) = await talk.run("collect")
    output = record.item.output_obj
    assert [(m["agent"], m["path"]) for m in output["messages"][:6]] == [
        *(("prover", [index]) for index in range(3)),
        *(("verifier", [index]) for index in range(3)),
    ]
    assert len(output["branches"]) == 9
    groups = build_groups([record])
    assert {t.agent for group in groups for t in group} == {"prover"}
    assert sorted(len(group) for group in groups) == [3, 3, 3, 3]


async def test_a_branch_that_fails_leaves_the_others():
    """The first prover reply is met by a verifier that never decides: it earns nothing that is known, the other 1."""

    def verifier(request):
        return "maybe" if "a0" in request.messages[-1]["content"] else "accept"

    talk = Talk(nip(num_responses=2), {"prover": Debater("a0", "a1"), "verifier": verifier})
    (record,) = await talk.run("collect")
    assert record.outcome == "ok"
    assert [b["rewards"] for b in record.item.output_obj["branches"]] == [
        *[{"verifier": -0.5}] * 2,
        *[{"prover": 1.0, "verifier": 1.0}] * 2,
    ]
    assert record.item.output_obj["num_invalid"] == 6
    replies = {t.episode[-1].content for group in build_groups([record]) for t in group}
    assert replies == {"a1", "accept", "maybe"}, "the verifier's invalid reply, and no reply with an unknown value"


@pytest.mark.parametrize(("num_responses", "outcome"), [(1, "context_overflow"), (2, "ok")])
async def test_a_prompt_longer_than_the_context_ends_its_branch_alone(num_responses, outcome):
    def verifier(request):
        return ContextOverflow("9 tokens") if "long" in request.messages[-1]["content"] else "accept"

    talk = Talk(nip(num_responses=num_responses), {"prover": Debater("long", "short"), "verifier": verifier})
    (record,) = await talk.run("collect")
    assert record.outcome == outcome
    if num_responses == 2:
        output = record.item.output_obj
        assert [b["rewards"].get("prover") for b in output["branches"]] == [None, None, 1.0, 1.0]
        assert output["branches"][0]["failed"] == ["verifier", "9 tokens"]
        assert output["num_invalid"] == 0
    assert len(talk.prompts_of("verifier")) == num_responses**2, "a prompt that does not fit is not retried"


class Timed(ScriptedPolicy):
    def __init__(self, delays):
        super().__init__()
        self.delays, self.count = delays, 0

    async def sample(self, request):
        number, self.count = self.count, self.count + 1
        await asyncio.sleep(self.delays[number % len(self.delays)])
        self.script = lambda _: f"{request.sampling.seed}"
        return await super().sample(request)


@pytest.mark.parametrize("num_responses", [1, 2])
async def test_no_sample_depends_on_the_order_of_replies(num_responses):
    def check_reply(agent, text, dialogue):  # a third of the replies are invalid, depending on the seed
        return "odd" if int(text) % 3 == 0 else None

    seen = []
    for delays in ([0.0], [0.003, 0.0, 0.002, 0.001]):
        handler = Debate(DebateConfig(agents={}, max_message_rounds=3, num_responses=num_responses))
        handler.check_reply = check_reply
        talk = Talk(handler, {name: [] for name in handler.agent_names})
        talk.models.update({name: PolicyModel(Timed(delays)) for name in talk.models})
        output = await talk.output(phase="collect")
        seen.append([(m["path"], m["agent"], m["text"], m["call_id"]) for m in output["messages"]])
    assert seen[0] == seen[1]


async def test_a_failing_endpoint_ends_the_episode_and_cancels_its_requests():
    cancelled = []

    class Hangs(ScriptedPolicy):
        async def sample(self, request):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(request)
                raise

    handler = Debate(DebateConfig(agents={}, verifier_first=False))
    scripts = {"prover_accept": [BackendUnavailable("down")], "prover_reject": [], "verifier": []}
    talk = Talk(handler, scripts)
    talk.models["prover_reject"] = PolicyModel(Hangs())
    (record,) = await talk.run()
    assert (record.outcome, record.reason) == ("backend_error", "BackendUnavailable: down")
    await asyncio.sleep(0)
    assert len(cancelled) == 1, "the other prover's request is cancelled"


async def test_a_protocol_that_never_ends_stops_after_its_rounds():
    class Endless(NIP):
        def step_interaction_protocol(self, dialogue):
            return Step(rewards={"prover": 0.25})

    talk = Talk(Endless(NIPConfig(agents={}, max_message_rounds=3)), {"verifier": ["a", "accept"], "prover": ["x"]})
    (branch,) = (await talk.output())["branches"]
    assert (branch["terminated"], branch["rewards"]) == (True, {"prover": 0.75}), "and rewards of rounds add up"


@pytest.mark.parametrize(("epoch", "phase", "branches"), [(0, "collect", 1), (1, "collect", 4), (1, "validate", 1)])
async def test_epochs_before_the_first_with_trees_collect_single_dialogues(epoch, phase, branches):
    config = NIPConfig(agents={}, verifier_first=False, num_responses=2)
    talk = Talk(NIP(config), lambda request: "accept", first_tree_epoch=1)
    output = await talk.output(phase=phase, epoch=epoch)
    assert len(output["branches"]) == branches
