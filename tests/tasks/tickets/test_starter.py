"""The starter: tokenizer and training episodes."""

import itertools
import random

import pytest

from reinforge.tasks.tickets.grammar import write_email
from reinforge.tasks.tickets.starter import (
    DeskRecipe,
    break_ticket,
    generate_careless_filings,
    make_tokenizer,
    write_careless_ticket,
)
from reinforge.tasks.tickets.ticket import FIELDS, format_ticket, parse_ticket


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_emails_and_tickets_are_short_in_tokens(tokenizer):
    rng = random.Random(0)
    emails = [write_email(rng) for _ in range(200)]
    assert max(len(tokenizer.encode(email.text)) for email in emails) < 90
    assert {len(tokenizer.encode(format_ticket(email.ticket))) for email in emails} == {17}
    for values in FIELDS.values():
        for value in values:
            if isinstance(value, str):
                assert len(tokenizer.encode(value)) == 1


def test_its_positions_reach_an_email_a_correction_and_two_answers(tokenizer):
    episodes = itertools.islice(generate_careless_filings(DeskRecipe(fault_rate=1.0), tokenizer), 100)
    last = [trajectory.episode[-1].tokens for trajectory in episodes]
    assert max(len(tokens.prompt_token_ids) for tokens in last) + 32 < DeskRecipe().max_model_len


def test_a_careless_ticket_has_the_configured_accuracy():
    rng = random.Random(0)
    truth = {"product": "kettle", "issue": "defect", "priority": "high", "refund": True}
    tickets = [write_careless_ticket(rng, truth, field_accuracy=0.7) for _ in range(4000)]
    for name, values in FIELDS.items():
        share = sum(ticket[name] == truth[name] for ticket in tickets) / len(tickets)
        assert share == pytest.approx(0.7 + 0.3 / len(values), abs=0.03)


def test_a_broken_ticket_is_never_valid():
    rng = random.Random(0)
    problems = {parse_ticket(break_ticket(rng, write_email(rng).ticket))[1] for _ in range(500)}
    assert None not in problems
    assert len(problems) == 1 + 2 * len(FIELDS)  # no JSON; each field missing, or with another's value


def test_it_is_shown_valid_tickets_in_the_end_and_corrections_before(tokenizer):
    first = list(itertools.islice(generate_careless_filings(DeskRecipe(fault_rate=0.2), tokenizer), 100))
    for trajectory in first:
        answers = [turn for turn in trajectory.episode if turn.tokens is not None]
        valid = [parse_ticket(answer.content)[1] is None for answer in answers]
        assert valid in ([True], [False, True])
        assert tokenizer.decode(answers[-1].tokens.token_ids) == f"{answers[-1].content}<|end|>"
    corrected = [trajectory.episode for trajectory in first if len(trajectory.episode) == 4]
    assert 10 < len(corrected) < 30
    assert all(episode[2].content.startswith("Invalid ticket: ") for episode in corrected)
