"""The page of a search: what it shows of the trials, and that nothing in it is markup."""

import json

import pytest

from reinforge.improvement.api import Improvements
from reinforge.improvement.page import build_page, find_front, write_page
from reinforge.improvement.recipes import SearchRecipe
from reinforge.improvement.record import SearchBudget, SearchRecord, Trial
from reinforge.runs.page.elements import Line, Point, draw_chart
from reinforge.runs.rows import ValidationRow
from reinforge.types.evaluation import MetricSummary
from tests.core.runs.test_page import HOSTILE, Page


def make_trial(number, why, used, scores, **fields):
    best = max(scores, key=scores.get, default=None)
    known = {"baseline": scores.get(-1), "score": scores.get(best), "best_epoch": best, "rung": 0, "epochs": 4}
    return Trial(number, SearchRecipe(f"r{number}", why), used, **{**known, **fields})


@pytest.fixture
def found(tmp_path):
    """Three trials, the first in two rungs: 0.2 -> 0.6 after epoch 3, 0.5 after epoch 1; 0.2 -> 0.7; and 0.2 -> 0.2."""
    scores = [{-1: 0.2, 1: 0.5, 3: 0.6}, {-1: 0.2, 1: 0.7}, {-1: 0.2}]
    trials = [
        make_trial(1, "as it is", 600.0, scores[0], rung=1, rung_best=[1, 3]),
        make_trial(2, HOSTILE, 300.0, scores[1], rung_best=[1], stopped=f"{HOSTILE}\nmore"),
        make_trial(3, "why", 90.0, scores[2], rung_best=[-1], stopped="behind"),
        Trial(4, SearchRecipe("left-out", "why"), stopped="the budget does not allow it"),
    ]
    record = SearchRecord(tmp_path, SearchBudget(1200.0), trials, [HOSTILE], sizes=[3, 1])
    for trial, measured in zip(trials, scores, strict=False):
        record.locate(trial).mkdir(parents=True)
        rows = [
            ValidationRow(epoch, summaries={"m": MetricSummary("m", mean, mean - 0.1, mean + 0.1, 9, 0)})
            for epoch, mean in measured.items()
        ]
        (record.locate(trial) / "validation_history.json").write_text(json.dumps([row.as_dict() for row in rows]))
    (record.locate(trials[0]) / "report.html").write_text("x")
    (tmp_path / "recipe.yml").write_text(f"llms: '{HOSTILE}'")
    record.result = {"winner": "02-r2", "promoted": False, "reason": HOSTILE, "epoch": 1}
    return Improvements(tmp_path, record)


def find_rows(page, title):
    table = next(each for each in page.iter("table") if each.find("caption").text == title)
    return [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]


def test_the_trials_are_a_tree_with_a_column_for_each_rung(found):
    head, *rows = find_rows(build_page(found.record, found.facts(), "m"), "Trials by how far they came")
    assert head[2:4] == ["rung 1", "rung 2"]
    assert rows[0] == [
        *["01-r1", "as it is", "0.500 [0.400, 0.600]", "0.600 [0.500, 0.700]", "4", "10 min 0 s"],
        "trained to the end of the budget",
    ]
    assert [row[2:4] for row in rows[1:]] == [["0.700 [0.600, 0.800]", ""], ["0.200 [0.100, 0.300]", ""]]
    page = Page(write_page(found.record, found.facts(), "m").read_text())
    assert "Not tried, the budget does not allow it: 04-left-out" in page.text
    assert ("href", "trials/01-r1/report.html") in page.attributes
    assert ("href", "trials/02-r2/report.html") not in page.attributes, "it has none"


def test_the_front_has_what_nothing_cheaper_beats(found):
    points = [Point(10.0, 0.6), Point(5.0, 0.7), Point(1.5, 0.2), Point(0.0, 0.2), Point(0.0, 0.1), Point(1.0, None)]
    assert [(point.epoch, point.value) for point in find_front(points)] == [(0.0, 0.2), (5.0, 0.7)]
    titles = [each.text for each in build_page(found.record, found.facts(), "m").iter("title")]
    assert titles[1:] == [  # the first is that of the page
        "trials, 01, 10 minutes: 0.6 [0.5, 0.7]",
        "trials, 03, 1.5 minutes: 0.2 [0.1, 0.3]",
        "Pareto front, untouched, 0 minutes: 0.2 [0.1, 0.3]",
        "Pareto front, 02, 5 minutes: 0.7 [0.6, 0.8]",
    ]


def test_a_chart_over_costs_names_its_axis():
    chart = draw_chart("cost", [Line("a", "training", [Point(0, 0.0), Point(3700, 1.0, name="01")])], axis="tokens")
    texts = [each.text for each in chart.iter("text")]
    assert texts[-6:] == ["0", "1,000", "2,000", "3,000", "4,000 tokens", "01"]


def test_nothing_on_the_page_is_markup_and_nothing_is_loaded(found):
    page = Page(write_page(found.record, found.facts(), "m").read_text())
    assert page.tags & {"script", "img", "link", "iframe"} == set()
    assert page.text.count("<script>alert(1)</script>") == 5  # why, ended, reason, decision, recipe
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_a_search_without_any_measured_trial_has_a_page(tmp_path):
    record = SearchRecord(tmp_path, SearchBudget(100.0, "tokens"), [make_trial(1, "why", 5.0, {}, stopped="failed")])
    record.result = {"winner": None, "promoted": False, "reason": "no trial could be measured"}
    text = Page(write_page(record, Improvements(tmp_path, record).facts(), "m").read_text()).text
    assert "Nothing is promoted: no trial could be measured." in text
