"""E-mails of the grammar, and the rows of the dataset."""

import random

import pytest

from reinforge.tasks.tickets import grammar
from reinforge.tasks.tickets.dataset import TicketsDataset, TicketsDatasetConfig
from reinforge.tasks.tickets.grammar import ASKS, DENIALS, PRODUCTS, STORIES, URGENCY, write_email
from reinforge.tasks.tickets.ticket import (
    FIELDS,
    count_correct_fields,
    find_ticket_problem,
    format_ticket,
    parse_ticket,
)


class FirstChoice(random.Random):
    def random(self):
        return 0.0

    def choice(self, seq):
        return seq[0]

    def randrange(self, start, stop=None, step=1):
        return 0 if stop is None else start

    def shuffle(self, x):
        pass


def emails(count, wording_share=1.0):
    rng = random.Random(7)
    return [write_email(rng, wording_share) for _ in range(count)]


def in_email(wording, text):
    """True if the e-mail has the wording, with any values for its placeholders."""
    pieces = [piece for gap in wording.split("{") for piece in gap.split("}")[-1:]]
    return all(piece in text for piece in pieces)


def test_an_email_by_hand():
    email = write_email(FirstChoice())
    assert email.ticket == {"product": "kettle", "issue": "defect", "priority": "low", "refund": True}
    assert email.text == (
        "Subject: order 1000\n"
        "Hello,\n"
        "The order number is 1000. The lamp I bought last year works like new. My kettle stopped working after two "
        "weeks. I would like my money back. There is no hurry.\n"
        "Thanks, Mira"
    )


def test_the_text_determines_every_field():
    for email in emails(300):
        assert_text_determines_fields(email.text, email.ticket)


def assert_text_determines_fields(text, ticket):
    assert find_ticket_problem(ticket) is None
    assert "{" not in text
    assert [issue for issue, told in STORIES.items() if any(in_email(story, text) for story in told)] == [
        ticket["issue"]
    ]
    assert [refund for refund, asks in ASKS.items() if any(ask in text for ask in asks)] == [ticket["refund"]]
    urgencies = [name for name, cues in URGENCY.items() if any(cue and in_email(cue, text) for cue in cues)]
    assert urgencies == [ticket["priority"]] or (urgencies == [] and ticket["priority"] == "normal")
    assert any(name in text for name in PRODUCTS[ticket["product"]])
    assert not any(denial in text for denial in DENIALS[ticket["issue"]])


def test_no_wording_means_two_things():
    for table in (PRODUCTS, STORIES, ASKS, URGENCY, DENIALS):
        wordings = [wording for values in table.values() for wording in values]
        assert len(set(wordings)) == len(wordings)
    assert PRODUCTS.keys() == set(FIELDS["product"])
    assert STORIES.keys() == DENIALS.keys() == set(FIELDS["issue"])
    assert URGENCY.keys() == set(FIELDS["priority"])


def test_all_values_are_equally_likely():
    tickets = [email.ticket for email in emails(2000)]
    for name, values in FIELDS.items():
        for value in values:
            share = sum(ticket[name] == value for ticket in tickets) / len(tickets)
            assert share == pytest.approx(1 / len(values), abs=0.05)


def test_a_share_of_the_wordings_leaves_out_the_last_ones():
    texts = "\n".join(email.text for email in emails(1000, wording_share=0.75))
    assert "video doorbell" not in texts  # the last of four
    assert "tea kettle" in texts
    assert "Please reimburse me." not in texts  # the last of five
    assert "video doorbell" in "\n".join(email.text for email in emails(1000))


def test_a_repeated_email_is_sampled_again(monkeypatch):
    for name in ("STORIES", "ASKS", "URGENCY", "PRODUCTS"):
        few = {key: values[:1] for key, values in getattr(grammar, name).items()}
        monkeypatch.setattr(grammar, name, few)
    for name in ("subjects", "greetings", "closings", "names", "chatter", "praise"):
        monkeypatch.setitem(grammar._WORDS, name, [""])
    config = TicketsDatasetConfig(num_train=300, num_select=100, num_confirm=100)
    assert len({row["question"] for row in TicketsDataset(config).rows()}) == 500


def test_more_confirm_emails_keep_the_earlier_ones():
    few = TicketsDataset(TicketsDatasetConfig(num_train=10, num_select=2, num_confirm=5)).rows()
    more = TicketsDataset(TicketsDatasetConfig(num_train=10, num_select=2, num_confirm=9)).rows()
    assert more[: len(few)] == few


TICKET = {"product": "kettle", "issue": "defect", "priority": "high", "refund": True}


def test_a_ticket_survives_the_round_trip():
    text = format_ticket(TICKET)
    assert text == '{"product":"kettle","issue":"defect","priority":"high","refund":true}'
    assert parse_ticket(text) == (TICKET, None)


def test_spaces_and_order_do_not_matter():
    text = '\n{ "refund": true, "priority": "high", "issue": "defect", "product": "kettle" } '
    assert parse_ticket(text) == (TICKET, None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"product": "toaster"}, "product must be kettle, lamp, camera, vacuum, speaker or router"),
        ({"issue": ["defect"]}, "issue must be defect, delivery, wrong_item or billing"),
        ({"priority": None}, "priority must be low, normal or high"),
        ({"refund": 1}, "refund must be true or false"),  # 1 == True in Python, not in JSON
        ({"refund": "true"}, "refund must be true or false"),
        ({"color": "red", "age": 3}, "there is no field age"),
    ],
)
def test_a_wrong_value_is_reported_with_the_allowed_ones(changes, problem):
    assert parse_ticket(format_ticket({**TICKET, **changes})) == (None, problem)


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_named(name):
    rest = {key: value for key, value in TICKET.items() if key != name}
    assert parse_ticket(format_ticket(rest)) == (None, f"{name} is missing")


@pytest.mark.parametrize("text", [None, "", "ticket", format_ticket(TICKET)[:-1], "[" * 100_000, "\ud83c", "{,}"])
def test_text_that_is_not_json_is_reported(text):
    assert parse_ticket(text) == (None, "this is not JSON")


@pytest.mark.parametrize("text", ["[]", "null", "true", '"kettle"', "NaN"])
def test_json_that_is_not_an_object_is_reported(text):
    assert parse_ticket(text) == (None, "this is not an object")


def test_right_fields_are_counted():
    assert count_correct_fields(TICKET, TICKET) == 4
    assert count_correct_fields(TICKET, {**TICKET, "refund": False, "issue": "billing"}) == 2
