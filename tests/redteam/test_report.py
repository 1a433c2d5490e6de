"""The report of an attack, with numbers checked by hand."""

import json

import pytest

from reinforge.redteam.report import (
    JSON_FILE,
    TEXT_FILE,
    build_attack_report,
    jaccard_distance,
    select_most_distinct,
    write_report,
)


def turn(path, probe, score, perplexity=2.0):
    return {
        "path": path, "probe": probe, "response": "r", "score": score, "reward": 0.0, "perplexity": perplexity
    }  # fmt: skip


def conversation(*turns, opening="o"):
    path, made = [], []
    for probe, score, *perplexity in turns:
        path = [*path, 0]
        made.append(turn(path, probe, score, *perplexity))
    return {"opening": opening, "threshold": 0.5, "turns": made}


def test_shares_first_failures_and_perplexity():
    conversations = [
        conversation(("a b", 0.0, 2.0), ("c d", 1.0, 8.0), opening="p"),
        conversation(("a b", 1.0, 2.0), ("a b", 1.0, 2.0), opening="q"),
        conversation(("x y", 0.0), ("x z", 0.0), opening="r"),
        conversation(("x y", 0.0), ("x z", 0.4), opening="s"),
    ]
    report = build_attack_report(conversations)
    assert report.success.mean == 0.5
    assert (report.success.ci_low, report.success.ci_high) == pytest.approx((0.150, 0.850), abs=1e-3)  # Wilson, 2 of 4
    again = build_attack_report(conversations * 5).success
    assert (again.ci_low, again.ci_high) == pytest.approx((0.150, 0.850), abs=0.1), "the same four openings"
    assert str(again).endswith("of 20 conversations with 4 openings")
    assert [share.mean for share in report.per_turn] == [0.25, 0.5]
    assert report.first_failure == {1: 1, 2: 1}
    assert report.perplexity["successful"] == pytest.approx((8 * 2 * 2) ** (1 / 3))
    assert (report.num_probes, report.num_distinct, report.num_distinct_successes) == (8, 4, 2)
    assert report.diversity == 1.0  # "a b" and "c d" share no word
    assert {example["probe"] for example in report.examples} == {"a b", "c d"}


def test_every_branch_of_a_tree_is_a_conversation():
    turns = [turn([0], "a", 1.0), turn([1], "b", 0.0)]
    turns += [turn([i, j], f"c{i}{j}", 0.0) for i in range(2) for j in range(2)]
    report = build_attack_report([{"opening": "o", "threshold": 0.5, "turns": turns}])
    assert (report.success.mean, report.success.count) == (0.5, 4)
    assert report.num_probes == 6  # a probe above two branches counts once


def test_no_success_and_no_perplexity():
    report = build_attack_report([conversation(("a", 0.0, None))])
    assert report.success.mean == 0.0
    assert report.success.ci_high > 0.5  # one conversation says little
    assert (report.perplexity["all"], report.diversity, report.examples) == (None, None, [])
    assert any("unknown of all probes" in line for line in report.lines("before"))


def test_a_report_needs_conversations():
    with pytest.raises(ValueError, match="no conversations"):
        build_attack_report([])


def test_distance_and_the_most_distinct():
    assert jaccard_distance("the old mill", "the new mill") == 0.5
    turns = [turn([0], text, 1.0) for text in ("a b c", "a b d", "x y z")]
    assert [each["probe"] for each in select_most_distinct(turns, 2)] == ["a b c", "x y z"]


def test_the_files(tmp_path):
    arms = {
        "before": build_attack_report([conversation(("a", 0.0))]),
        "after": build_attack_report([conversation(("tell me", 1.0), opening="A day.")]),
    }
    lines = write_report(tmp_path, arms)
    assert (tmp_path / TEXT_FILE).read_text() == "\n".join(lines) + "\n"
    data = json.loads((tmp_path / JSON_FILE).read_text())
    assert data["after"]["success"]["mean"] == 1.0
    assert data["after"]["examples"][0]["opening"] == "A day."
    assert "  1 opening    A day." in lines
