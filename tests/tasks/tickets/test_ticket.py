"""The ticket's parser, and the problems that it reports."""

import pytest

from reinforge.tasks.tickets.ticket import FIELDS, count_correct_fields, format_ticket, parse_ticket

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
