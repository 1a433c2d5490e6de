"""One e-mail filed by a scripted model: at once, after a correction, or not at all, and the scores."""

import json

import pytest

from reinforge.rollout.workflow import PolicyFailure
from reinforge.tasks.tickets.evaluators import TicketExact, TicketFields, TicketReward, TicketRewardConfig, TicketSchema
from reinforge.tasks.tickets.ticket import format_ticket
from reinforge.tasks.tickets.workflow import TicketAgent
from reinforge.types.evaluation import EvalInputItem
from tests.doubles import ScriptedChat
from tests.episodes import make_context

TICKET = {"product": "lamp", "issue": "billing", "priority": "low", "refund": False}
VALID = format_ticket(TICKET)
NO_REFUND = format_ticket({"product": "lamp", "issue": "billing", "priority": "low"})
EMAIL = "Subject: order 4821\nHello,\nI was charged twice for the desk lamp."


def example():
    return EvalInputItem(id="t", input_obj=EMAIL, expected_output_obj=TICKET, full_dataset_entry={})


async def score(evaluator, filed):
    return (await evaluator.evaluate(example().copy_with_updates(output_obj=filed))).score


async def test_a_valid_ticket_is_filed_at_once():
    llm = ScriptedChat(VALID)
    assert await TicketAgent()(example(), llm, make_context()) == {"ticket": TICKET, "num_answers": 1}
    assert llm.requests == [{"messages": [{"role": "user", "content": EMAIL}], "max_tokens": 32}]


async def test_an_invalid_ticket_may_be_corrected():
    llm = ScriptedChat(NO_REFUND, VALID)
    assert await TicketAgent()(example(), llm, make_context()) == {"ticket": TICKET, "num_answers": 2}
    first, second = (request["messages"] for request in llm.requests)
    assert second == [
        {"role": "user", "content": EMAIL},
        {"role": "assistant", "content": NO_REFUND},
        {"role": "user", "content": "Invalid ticket: refund is missing."},
    ]
    assert first == second[:1]  # the history grows, so both answers train in one sample


@pytest.mark.parametrize("answer", ["", None, "{", "[]", NO_REFUND, "\ud83c"])
async def test_twice_invalid_is_the_policys_own_failure(answer):
    llm = ScriptedChat(NO_REFUND, answer)
    with pytest.raises(PolicyFailure, match="answer 2 was") as failure:
        await TicketAgent()(example(), llm, make_context())
    filed = failure.value.output
    assert json.loads(json.dumps(filed)) == {"ticket": None, "num_answers": 2}
    for evaluator in (TicketExact(), TicketFields(), TicketSchema()):
        assert await score(evaluator, filed) == 0.0


async def test_instructions_stand_before_the_email():
    llm = ScriptedChat(NO_REFUND, VALID)
    await TicketAgent(instructions="Answer in JSON.")(example(), llm, make_context())
    assert [message["role"] for message in llm.requests[1]["messages"]] == ["system", "user", "assistant", "user"]


async def test_a_prompt_replaces_the_instructions():
    llm = ScriptedChat(VALID)
    await TicketAgent(instructions="Answer in JSON.")(example(), llm, make_context(system="JSON!"))
    assert llm.requests[0]["messages"][0] == {"role": "system", "content": "JSON!"}


@pytest.mark.parametrize(
    ("changes", "num_answers", "exact", "fields", "schema", "reward"),
    [
        ({}, 1, 1.0, 1.0, 1.0, 1.0),
        ({}, 2, 1.0, 1.0, 0.5, 0.8),
        ({"refund": True}, 1, 0.0, 0.75, 1.0, 0.375),
        ({"refund": True, "product": "kettle"}, 2, 0.0, 0.5, 0.5, 0.05),
        ({"refund": True, "product": "kettle", "issue": "defect", "priority": "high"}, 1, 0.0, 0.0, 1.0, 0.0),
    ],
)
async def test_scores_by_hand(changes, num_answers, exact, fields, schema, reward):
    filed = {"ticket": {**TICKET, **changes}, "num_answers": num_answers}
    assert await score(TicketExact(), filed) == exact
    assert await score(TicketFields(), filed) == fields
    assert await score(TicketSchema(), filed) == schema
    assert await score(TicketReward(TicketRewardConfig(exact=0.5, fields=0.5, correction=0.2)), filed) == pytest.approx(
        reward
    )


async def test_a_score_says_what_was_filed_and_expected():
    found = await TicketExact().evaluate(example().copy_with_updates(output_obj={"ticket": TICKET, "num_answers": 1}))
    assert found.reasoning == f"{VALID} after 1 answer, expected {VALID}"


async def test_without_an_answer_the_score_is_missing():
    found = await TicketExact().evaluate(example())
    assert found.score is None
    assert found.error == "the agent filed nothing"
