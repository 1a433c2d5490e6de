"""The file of outcomes: which tasks are near, and what order it gives the recipes of the next search."""

import math

import pytest

from reinforge.improvement.outcomes import SearchOutcome, TaskFeatures, rank_recipes, read_outcomes
from reinforge.improvement.recipes import SearchRecipe
from reinforge.improvement.record import FirstEpoch, SearchBudget, SearchRecord, Trial
from tests.improvement.test_search import RECIPES, make

TICKETS = TaskFeatures(signal=1.0, base=0.3, reply_tokens=20.0, prompt_tokens=50.0, parameters=3e5, rows=400.0)


def test_distances_are_in_shares_and_decades():
    base = TaskFeatures(signal=0.5, reply_tokens=10.0)
    assert base.compute_distance(base) == 0
    assert base.compute_distance(TaskFeatures(signal=0.9)) == pytest.approx(0.4)
    assert base.compute_distance(TaskFeatures(reply_tokens=100.0)) == pytest.approx(0.5)  # one decade of two
    both = TaskFeatures(signal=0.9, reply_tokens=100.0)
    assert base.compute_distance(both) == pytest.approx(math.sqrt((0.4**2 + 0.5**2) / 2))
    assert base.compute_distance(TaskFeatures(rows=10.0)) == math.inf  # nothing in common


def test_a_recipe_is_worth_its_gains_and_one_vote_of_the_default_order():
    equal = SearchOutcome("t", TICKETS, {"b": 0.2, "c": 0.05, "d": -0.1})
    ranked, why = rank_recipes("abcd", TICKETS, [equal])
    # votes of the order: 0.5, 0.333, 0.167, 0; of the search: none, 1, 0.25, 0
    assert why == (
        "order by what helped on the nearest tasks (t, distance 0.00, best b): b 0.67, a 0.50, c 0.21, d 0.00"
    )
    assert ranked == ["b", "a", "c", "d"]
    assert "b 0.78" in rank_recipes("abcd", TICKETS, [equal, equal])[1]  # (1 + 1 + 0.333) / 3
    half = SearchOutcome("h", TaskFeatures(signal=0.75), {"b": 0.2})  # 0.25 away, so it weighs a half
    assert "b 0.56" in rank_recipes("abcd", TICKETS, [half])[1]  # (0.333 + 1 / 2) / 1.5


def test_searches_of_other_tasks_say_nothing():
    assert rank_recipes("ab", TICKETS, []) is None
    assert rank_recipes("ab", TICKETS, [SearchOutcome("far", TaskFeatures(signal=0.5), {"b": 1.0})]) is None
    assert rank_recipes("ab", TaskFeatures(), [SearchOutcome("t", TICKETS, {"b": 1.0})]) is None


def test_only_the_nearest_five_are_asked():
    near = [SearchOutcome(f"t{number}", TICKETS, {"a": 1.0}) for number in range(5)]
    further = SearchOutcome("further", TaskFeatures(signal=0.9), {"b": 1.0})
    ranked, why = rank_recipes("ab", TICKETS, [further, *near])
    assert ranked == ["a", "b"]
    assert "further" not in why


def test_where_nothing_gained_the_default_order_stays():
    ranked, _ = rank_recipes("abc", TICKETS, [SearchOutcome("t", TICKETS, {"a": 0.0, "b": -0.1, "c": 0.0})])
    assert ranked == ["a", "b", "c"]


def test_what_is_written_is_read_again_beside_the_first_ones(tmp_path):
    path, outcome = tmp_path / "home" / "outcomes.jsonl", SearchOutcome("t", TICKETS, {"b": 0.2})
    first = read_outcomes(path)
    assert first
    assert all(each.get_value(each.best) == 1 for each in first)
    outcome.write(path)
    outcome.write(path)
    assert read_outcomes(path) == [*first, outcome, outcome]
    path.write_text('{"task": "t"}\n')
    assert read_outcomes(path) == first
    outcome.write(tmp_path / "home" / "outcomes.jsonl" / "below")  # cannot be written: nothing happens


def test_an_outcome_is_the_gain_per_minute_of_the_first_rung(tmp_path):
    trials = [
        Trial(number, recipe, gain_rate=rate)
        for number, (recipe, rate) in enumerate(zip(RECIPES, (0.01, None), strict=False))
    ]
    record = SearchRecord(tmp_path / "mine", SearchBudget(1000.0), trials)
    assert record.read_outcome() is None  # its first epoch is unknown
    record.first_epoch = FirstEpoch(100, 0.0, 1.0, 10, 5, is_solved=False, features=TICKETS)
    assert record.read_outcome() == SearchOutcome("mine", TICKETS, {"r0": 0.6})


async def test_a_search_tries_first_what_helped_before_and_leaves_its_own_outcome(tmp_path):
    first = FirstEpoch(138, 0.0, 1.0, num_groups=16, num_with_signal=5, is_solved=False, features=TICKETS)
    search = make(tmp_path / "s", {"r7": 0.05}, total=500.0, unit="s", first_epoch=first)
    search.outcomes = [SearchOutcome("earlier", TICKETS, {"r7": 0.3, "r1": 0.0})]
    await search.run()
    tried = [trial.recipe.name for trial in search.record.trials if trial.epochs]
    assert tried[:2] == ["r0", "r7"]  # the configuration itself shows what the task is
    assert "r1" not in tried
    assert search.record.decisions[0].startswith("order by what helped on the nearest tasks (earlier, distance 0.00,")
    found = SearchRecord.read(tmp_path / "s").read_outcome()
    assert list(found.gains) == tried
    first_rung = search.record.trials[0]
    assert found.gains["r0"] == pytest.approx(60 * first_rung.gain_rate)


async def test_a_recipe_that_needs_what_is_missing_is_not_tried_though_it_helped_before(tmp_path):
    first = FirstEpoch(138, 0.0, 0.0, num_groups=16, num_with_signal=0, is_solved=False, features=TICKETS)
    recipes = [
        SearchRecipe("r0", "why"),
        SearchRecipe("r1", "why", needs="rewards that differ"),
        SearchRecipe("r2", "why"),
    ]
    search = make(tmp_path / "s", total=500.0, unit="s", recipes=recipes, first_epoch=first)
    search.outcomes = [SearchOutcome("earlier", TICKETS, {"r1": 0.3})]
    await search.run()
    assert [trial.recipe.name for trial in search.record.trials] == ["r0", "r2", "r1"]
    assert not search.record.trials[-1].epochs
