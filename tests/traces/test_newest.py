"""Which requests are kept apart as the newest ones, and what is said of a model that is worse on them."""

import pytest

from reinforge.evaluation.non_inferiority import NonInferiority
from reinforge.evaluation.reference import list_losses
from reinforge.traces.entries import format_time
from reinforge.traces.newest import keep_newest_apart


def build_rows(count, days=10.0, **changed):
    """Returns rows that are spread over days, each a conversation of its own with its own words."""
    rows = []
    for number in range(count):
        hours = int(24 * days * number / count)
        words = " ".join(f"w{number}x{each}" for each in range(8))
        messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "yes"}]
        time = f"2026-01-{1 + hours // 24:02}T{hours % 24:02}:00:00Z"
        row = {"id": f"r{number}", "conversation": f"c{number}", "messages": messages, "time": time}
        rows.append(row | changed.get(f"r{number}", {}))
    return rows


def list_newest(rows):
    return [row["id"] for row in keep_newest_apart(rows)[0] if row.get("transfer")]


def test_the_newest_tenth_is_kept_apart_and_named_as_a_task_of_its_own():
    rows, newest = keep_newest_apart(build_rows(200))
    kept = [row for row in rows if row.get("transfer")]
    assert [row["id"] for row in kept] == [f"r{number}" for number in range(180, 200)]
    assert {row["task"] for row in kept} == {"newest requests"}
    assert newest.num_rows == 20
    assert newest.text.startswith("the 20 since 2026-01-10 00:00 ")


def test_a_conversation_and_repeated_questions_are_as_old_as_their_first_request():
    repeated = build_rows(200)[3]["messages"]
    rows = build_rows(200, r190={"conversation": "c5"}, r195={"messages": repeated})
    assert list_newest(rows) == [f"r{n}" for n in range(178, 200) if n not in (190, 195)]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (build_rows(200, days=0.5), "the log spans 11.0 hours, and it takes 2 days"),
        (build_rows(90), "9 of the newest tenth repeat no older request, and it takes 10"),
        ([*build_rows(200), {**build_rows(1)[0], "id": "x", "time": None}], ""),
    ],
)
def test_where_none_are_kept_apart_it_says_why(rows, why):
    rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
    found, newest = keep_newest_apart(rows)
    assert found == rows
    assert newest.num_rows == 0
    assert newest.text.endswith(why or "1 of 201 rows have no time")


def judge(difference, low, high, **parts):
    fixed = {"num_pairs": 100, "num_clusters": 100, "num_more": None, "confidence": 0.95, "method": "score"}
    return NonInferiority("not decided", 0.05, difference, low, high, **fixed, **parts)


def test_a_loss_on_the_newest_requests_has_the_interval_of_two_independent_differences():
    """0.1 and 0.02 from the ends: sqrt(0.1^2 + 0.02^2) = 0.102."""
    rest, newest = judge(0.0, -0.02, 0.02), judge(-0.1, -0.2, 0.0)
    assert newest.subtract(rest) == pytest.approx((-0.1, -0.10198 - 0.1, 0.10198 - 0.1), abs=1e-5)
    assert newest.subtract(judge(0.0, None, None)) == (-0.1, None, None)
    warned = judge(0.0, -0.02, 0.02, transfer={"newest requests": newest, "others": judge(-0.04, -0.2, 0.1)})
    [sentence] = list_losses(warned)
    assert sentence == (
        "newest requests: compared with the teacher, the model is worse there than on the confirm examples, by "
        "-0.100 [-0.202, +0.002]; more than the margin 0.05"
    )
    assert NonInferiority.from_dict(warned.as_dict()) == warned


@pytest.mark.parametrize(
    ("start", "time"),
    [
        ("2026-01-01T10:00:00+01:00", "2026-01-01T09:00:00Z"),
        ("1767258000.5", "2026-01-01T09:00:00Z"),
        ("1767258000500", "2026-01-01T09:00:00Z"),
        ("1767258000500000000", "2026-01-01T09:00:00Z"),
        ("17", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("", None),
    ],
)
def test_times_of_logs_are_read_in_any_unit(start, time):
    assert format_time(start) == time
