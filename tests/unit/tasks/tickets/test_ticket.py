"""The schema: what is a ticket, and what the agent is told where it is none."""

import pytest

from reinforge.tasks.tickets.ticket import FIELDS, num_right, read_ticket, write_ticket

TICKET = {"product": "kettle", "issue": "defect", "priority": "high", "refund": True}


def test_a_ticket_survives_the_round_trip():
    text = write_ticket(TICKET)
    assert text == '{"product":"kettle","issue":"defect","priority":"high","refund":true}'
    assert read_ticket(text) == (TICKET, None)


def test_spaces_and_order_do_not_matter():
    text = '\n{ "refund": true, "priority": "high", "issue": "defect", "product": "kettle" } '
    assert read_ticket(text) == (TICKET, None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"product": "toaster"}, "product must be kettle, lamp, camera, vacuum, speaker or router"),
        ({"issue": ["defect"]}, "issue must be defect, delivery, wrong_item or billing"),
        ({"priority": None}, "priority must be low, normal or high"),
        ({"refund": 1}, "refund must be true or false"),  # 1 == True in Python, not in JSON
        ({"refund": "true"}, "refund must be true or false"),
        ({"colour": "red", "age": 3}, "there is no field age"),
    ],
)
def test_a_wrong_value_is_told_with_those_allowed(changes, problem):
    assert read_ticket(write_ticket({**TICKET, **changes})) == (None, problem)


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_named(name):
    rest = {key: value for key, value in TICKET.items() if key != name}
    assert read_ticket(write_ticket(rest)) == (None, f"{name} is missing")


@pytest.mark.parametrize("text", [None, "", "ticket", write_ticket(TICKET)[:-1], "[" * 100_000, "\ud83c", "{,}"])
def test_what_is_no_json_is_said_to_be_none(text):
    assert read_ticket(text) == (None, "this is not JSON")


@pytest.mark.parametrize("text", ["[]", "null", "true", '"kettle"', "NaN"])
def test_json_that_is_no_object_is_said_to_be_none(text):
    assert read_ticket(text) == (None, "this is not an object")


def test_right_fields_are_counted():
    assert num_right(TICKET, TICKET) == 4
    assert num_right(TICKET, {**TICKET, "refund": False, "issue": "billing"}) == 2
