"""The search over recipes: how it shares its budget, whom it stops, and that choosing never flatters the verdict."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reinforge.config.schema import GateConfig
from reinforge.errors import ConfigError
from reinforge.evaluation.non_inferiority import judge_non_inferiority
from reinforge.evaluation.statistics import compute_paired_difference
from reinforge.improvement import search as search_module
from reinforge.improvement.recipes import ANSWERS, PAIRS, REWARDS, SIGNAL, SearchRecipe
from reinforge.improvement.record import FirstEpoch, SearchBudget, SearchRecord
from reinforge.improvement.search import Search, compare_passes, compute_share, plan_sizes
from reinforge.trainer.evaluate import Evaluation
from reinforge.types.evaluation import EvaluationReport, MetricSummary

RECIPES = [SearchRecipe(f"r{number}", "because", (("finetuning.seed", str(number)),)) for number in range(12)]


class SimulatedTrials:
    """Trials of an agent that solves each example with a probability, which an epoch changes by `gains[name]`.

    An epoch costs 10, the start 20, of which `select_cost` measures it on `select`, and a model on `confirm`
    `arm_cost`, of which `predicted` is known before. Replies grow by `growth` an epoch, and with them what an epoch
    and a measurement cost. Scores are drawn from the trial's number and
    its epoch, so that equal searches have equal results.
    """

    metric, seed = "reward", 0

    def __init__(self, record, gains=None, *, seed=0, num_select=60, num_confirm=200, **settings):
        self.record, self.gains, self.most = record, gains or {}, settings.get("most", 0.4)
        self.first, self.num_select, self.num_confirm = seed, num_select, num_confirm
        self.arm_cost, self.first_epoch = settings.get("arm_cost", 0.0), settings.get("first_epoch")
        self.predicted, self.growth = settings.get("predicted", self.arm_cost), settings.get("growth", 0.0)
        self.select_cost, self.resume_cost = settings.get("select_cost", 0.0), settings.get("resume_cost", 0.0)
        self.kept, self.judged, self.reference = None, [], settings.get("reference")
        self.writes_epochs = settings.get("writes_epochs", False)
        self.rewards = settings.get("rewards", {})  # mean reward of each example, by the recipe's name

    def draw(self, trial, epoch, size, *stream):
        gain = min(self.most, self.gains.get(trial.recipe.name, 0.0) * (epoch + 1)) if trial is not None else 0.0
        stream += () if trial is None or trial.seed is None else (trial.seed,)
        random = np.random.default_rng([self.first, 0 if trial is None else trial.number, epoch + 1, *stream])
        return (random.random(size) < 0.3 + gain).astype(float)

    async def train(self, trial):
        self.record.arm_cost = self.record.arm_cost or self.predicted
        trial.used += self.resume_cost
        if not trial.epochs:
            trial.used, trial.start_cost, trial.select_cost = 20.0, 20.0, self.select_cost
            trial.baseline = trial.score = float(self.draw(None, -1, self.num_select, 0).mean())
            trial.best_epoch = -1
        while not trial.has_used_share():
            trial.growth = 1 + self.growth * trial.epochs
            trial.used, trial.epochs = trial.used + 10.0 * trial.growth, trial.epochs + 1
            if self.writes_epochs:
                self.record.write()
        trial.used += self.select_cost * trial.growth
        score = float(self.draw(trial, trial.epochs - 1, self.num_select, 0).mean())
        if score > trial.score:
            trial.score, trial.best_epoch = score, trial.epochs - 1

    async def read_first_epoch(self, trial):
        return self.first_epoch

    def compare(self, trial, other):
        scores = [
            dict(enumerate(self.draw(each if each.best_epoch >= 0 else None, each.best_epoch, self.num_select, 0)))
            for each in (other, trial)
        ]
        return compute_paired_difference(*scores)

    def compare_rewards(self, trial, other):
        scores = [
            {number: self.rewards.get(each.recipe.name, 0.0) + number % 2 / 10 for number in range(self.num_select)}
            for each in (other, trial)
        ]
        return compute_paired_difference(*scores) if self.rewards else None

    async def judge(self, trial, *, with_reference=False):
        self.judged.append(trial and trial.name)
        epoch, stream = (-1, 1) if trial is None else (trial.best_epoch, 2)
        scores = self.draw(trial, epoch, self.num_confirm, stream)
        by_metric, count = (
            {"reward": dict(zip(map(str, range(len(scores))), scores.tolist(), strict=True))},
            len(scores),
        )
        report = EvaluationReport("confirm", 0, by_metric, count, {}, "reward")
        cost = self.arm_cost * (1.0 if trial is None else trial.growth)
        found = None
        if with_reference and self.reference is not None:
            found = judge_non_inferiority(
                by_metric["reward"], dict.fromkeys(by_metric["reward"], 1.0), None, self.reference
            )
        return Evaluation("m", "confirm", report, [], cost, [], non_inferiority=found)

    def keep(self, trial, overrides, *, promoted):
        self.kept = overrides
        return Path("model") if promoted else None


def make(folder, gains=None, *, total=2000.0, unit="tokens", recipes=RECIPES, num_seeds=1, gate=None, **options):
    folder.mkdir(exist_ok=True)
    record = SearchRecord(folder, SearchBudget(total, unit), num_seeds=num_seeds)
    trials = SimulatedTrials(record, gains, **options)
    return Search(record, trials, recipes, gate or GateConfig(), lambda line: None)


@pytest.mark.parametrize(
    ("most", "margin", "promoted", "said"),
    [
        (0.7, 0.1, True, "not worse than the teacher by more than 0.1 (difference +0.000 "),
        (0.4, 0.1, False, "worse than the teacher by more than 0.1 (difference -"),
        (0.4, None, None, "logs and the winner have too few examples with both scores to be compared"),
    ],
)
async def test_the_verdict_against_a_reference(tmp_path, most, margin, promoted, said):
    gate = GateConfig(reference="logs", margin=0.1)
    search = make(
        tmp_path / "s", dict.fromkeys((each.name for each in RECIPES), most), gate=gate, most=most, reference=margin
    )
    result = await search.run()
    assert (result["promoted"], result["reason"][: len(said)]) == (promoted, said)
    assert result["improvement"]["ci_low"] > 0
    assert ("non_inferiority" in result) == (margin is not None)


async def test_where_nothing_helped_the_untouched_agent_is_compared_with_the_reference(tmp_path):
    gate = GateConfig(reference="logs", margin=0.1)
    search = make(tmp_path / "s", {each.name: -0.3 for each in RECIPES}, gate=gate, reference=0.1)
    result = await search.run()
    said = (
        "nothing helped: no trial beat the untouched agent on the select examples; the untouched agent: worse than the "
    )
    assert (result["promoted"], result["winner"]) == (False, None)
    assert result["reason"].startswith(said)
    assert (result["non_inferiority"]["outcome"], search.trials.judged) == ("worse", [None])


@pytest.mark.parametrize("rewards", [{"r3": 0.2}, {}])
async def test_the_reward_decides_where_the_metric_does_not(tmp_path, rewards):
    """Nobody gains on `select` at first; a known difference of the metric is never overruled. Mutation: no rewards."""
    search = make(tmp_path / "s", {}, recipes=RECIPES[:4], total=600.0, rewards=rewards)
    await search.run()
    last = search.record.trials[3]
    assert (last.stopped is None) == bool(rewards)
    put = [each for each in search.record.decisions if "is put before" in each]
    assert bool(put) == bool(rewards)
    assert all("04-r3 is put before" in each and "and its reward is higher (+0.200" in each for each in put)
    known = make(tmp_path / "known", {"r0": 0.4}, recipes=RECIPES[:2], total=600.0, rewards={"r1": 0.2}, num_select=500)
    await known.run()
    assert [each.stopped is None for each in known.record.trials] == [True, False]


@pytest.mark.parametrize(("total", "count"), [(300.0, 4), (200.0, 3), (4000.0, 6)])
async def test_the_stage_of_answers_is_as_long_as_the_budget_allows(tmp_path, total, count):
    """300 tokens, 240 of them for trials: rungs of 120, so the winner has 60 + 120 - 20 for its start: 16 epochs."""
    path = "finetuning.pipeline.imitate.num_epochs"
    learns = SearchRecipe(
        "learns", "", ((path, "6"),), needs=ANSWERS, epochs_path="last", epochs_before=6, first_path=path
    )
    search = make(tmp_path / "s", {}, recipes=[RECIPES[0], learns], total=total)
    await search.run()
    recipe = search.record.trials[1].recipe
    assert (recipe.overrides, recipe.epochs_before) == (((path, str(count)),), count)
    assert recipe.set_epochs(10) == ("last", str(10 - count))


@pytest.mark.parametrize(("unit", "sizes"), [("s", [2, 1]), ("tokens", [1])])
async def test_a_second_recipe_is_tried_if_one_epoch_of_it_fits(tmp_path, unit, sizes):
    """160, of which 128 are for trials: 32 each at first; an epoch takes 25, the start 20, or 5 with the baseline."""
    search = make(tmp_path / "s", {}, recipes=RECIPES[:2], total=160.0, unit=unit, select_cost=15.0)
    await search.run()
    assert search.record.sizes[: len(sizes)] == sizes


def test_halves():
    assert plan_sizes(6) == [6, 3, 2, 1]
    assert plan_sizes(1) == [1]


async def test_the_budget_is_shared_and_kept(tmp_path):
    search = make(tmp_path / "s", total=1000.0)
    await search.run()
    # 800 for the trials at first; one of two epochs costs 20 + 2 x 10, so 4 rungs of 5 trials fit (800 / 4 / 5 = 40)
    assert search.record.sizes == [5, 3, 2, 1]
    assert 950 <= search.record.used <= 1000  # the verdict took nothing, so the last trial had what was kept for it
    first = search.record.trials[:5]
    assert all(trial.epochs >= 2 for trial in first)
    assert [trial.stopped for trial in search.record.trials[5:]] == ["the budget does not allow it"] * 7


async def test_the_best_recipe_wins_and_is_judged_once(tmp_path):
    search = make(tmp_path / "s", {"r2": 0.02}, total=4000.0)
    result = await search.run()
    assert result["winner"] == "03-r2"
    assert result["promoted"] is True
    assert search.trials.judged == [None, "03-r2"]
    assert search.trials.kept == (("finetuning.seed", "2"), ("finetuning.num_epochs", str(result["epoch"] + 1)))
    assert result["improvement"]["mean_difference"] == pytest.approx(result["after"]["mean"] - result["before"]["mean"])
    assert any("is stopped" in line for line in search.record.decisions)


def test_the_verdict_shows_what_one_try_solves_and_what_the_most_tries_solve():
    def evaluate(metric, **means):
        passed = {f"{metric} {k.replace('_', '@')}": mean for k, mean in means.items()}
        summaries = {name: MetricSummary(name, mean, None, None, 9, 0) for name, mean in passed.items()}
        return Evaluation("m", "confirm", EvaluationReport("confirm", 0, {}, 9, {}, "r"), [], 0.0, [], summaries)

    surer = (
        evaluate("solved", pass_1=0.2, pass_2=0.3, pass_4=0.5),
        evaluate("solved", pass_1=0.4, pass_2=0.5, pass_4=0.5),
    )
    for metric in ("solved", "reward"):  # a reward that is not 0 or 1 has none
        changes = list(map(str, compare_passes(metric, *surer)))
        assert changes == ["solved pass@1 0.200 -> 0.400", "solved pass@4 0.500 -> 0.500"]
    assert compare_passes("reward", evaluate("judged", pass_1=0.1, pass_2=0.1), surer[1]) == []
    assert compare_passes("solved", evaluate("solved"), evaluate("solved")) == []


async def test_the_winner_is_trained_again_with_other_seeds(tmp_path):
    search = make(tmp_path / "s", {"r2": 0.02}, total=4000.0, num_seeds=3, arm_cost=10.0)
    result = await search.run()
    record, seeds = search.record, result["seeds"]
    assert search.trials.judged == [None, "03-r2", "seed-1", "seed-2"]
    assert [trial.epochs for trial in record.repeats] == [result["epoch"] + 1] * 2
    rows = seeds["trainings"]
    assert [row["seed"] for row in rows] == [0, 1, 2]
    assert rows[0]["improvement"] == result["improvement"]
    gains = [row["improvement"]["mean_difference"] for row in rows]
    assert seeds["mean"] == pytest.approx(sum(gains) / 3)
    assert seeds["std"] == pytest.approx((sum((gain - seeds["mean"]) ** 2 for gain in gains) / 2) ** 0.5)
    scores = search.trials.draw(record.repeats[0], record.repeats[0].best_epoch, 200, 2)
    assert gains[1] == pytest.approx(scores.mean() - result["before"]["mean"])
    assert record.used <= 1.05 * 4000
    assert record.verdict_cost == 1.25 * 4 * 10  # the untouched agent and three trainings


async def test_further_seeds_have_their_part_of_the_budget(tmp_path):
    assert compute_share(60, [2, 1], 0) == 15
    assert compute_share(60, [2, 1], 1) == pytest.approx(60 / 3.5 / 2)
    search = make(
        tmp_path / "s", dict.fromkeys(["r0", "r1", "r2"], 0.004), total=4000.0, recipes=RECIPES[:3], num_seeds=2
    )
    await search.run()
    trials, winner = search.record.trials, max(search.record.trials, key=lambda trial: trial.used)
    assert 0.95 * 4000 <= sum(trial.used for trial in trials) + winner.used <= 4000
    with pytest.raises(ConfigError, match=r"90 tokens are too few for 3 trainings of 2 epochs .*\n.*allow 150 tokens"):
        await make(tmp_path / "small", total=90.0, num_seeds=3).run()


async def test_a_trial_that_fails_costs_itself(tmp_path):
    search = make(tmp_path / "s", {"r0": 0.1, "r1": 0.02}, total=4000.0)
    train = search.trials.train

    async def train_or_fail(trial):
        if trial.number == 1 and trial.epochs:
            trial.stopped = "it failed: out of luck"
        else:
            await train(trial)

    search.trials.train = train_or_fail
    result = await search.run()
    assert "01-r0 is stopped: it failed: out of luck" in search.record.decisions
    assert result["winner"]


async def test_nothing_helped_is_an_answer(tmp_path):
    search = make(tmp_path / "s", dict.fromkeys([recipe.name for recipe in RECIPES], -0.3))
    result = await search.run()
    assert result["promoted"] is False
    assert result["reason"] == "nothing helped: no trial beat the untouched agent on the select examples"
    assert search.trials.judged == []


async def test_a_budget_without_room_for_a_trial_is_refused_with_what_it_takes(tmp_path):
    told = r"--budget_tokens: 40 tokens are too few for a trial of 2 epochs \(40 tokens\) and the verdict \(10 tokens\)"
    with pytest.raises(ConfigError, match=rf"{told}.*\n.*allow 50 tokens or more"):
        await make(tmp_path / "s", total=40.0).run()
    # two models on `confirm` are predicted to take 2 x 60, and a quarter of that is kept in case they take more
    with pytest.raises(
        ConfigError, match=r"--minutes: 40 s .* \(40 s\) and .* \(2 min 30 s\).*\n.*allow 3 min 10 s or"
    ):
        await make(tmp_path / "s", total=40.0, unit="s", arm_cost=60.0).run()
    await make(tmp_path / "s", total=190.0, unit="s", arm_cost=60.0).run()


@pytest.mark.parametrize(("arm_cost", "sizes"), [(0.0, [5, 3, 2, 1]), (10.0, [5, 3, 2, 1]), (200.0, [4, 2, 1])])
async def test_what_the_verdict_is_predicted_to_take_is_kept(tmp_path, arm_cost, sizes):
    search = make(tmp_path / "s", {"r1": 0.1}, total=1000.0, unit="s", arm_cost=arm_cost)
    await search.run()
    assert search.record.sizes == sizes  # 500 / 3 / 4 = 42 is enough for two epochs
    assert search.record.judged == 2 * arm_cost
    assert 950 <= search.record.used <= 1000


@pytest.mark.parametrize("predicted", [60.0, 100.0, 160.0, 250.0])
@pytest.mark.parametrize("growth", [0.0, 0.02])
@pytest.mark.parametrize("seed", range(2))
async def test_the_budget_is_used_and_kept_whatever_the_verdict_was_predicted_to_take(
    tmp_path, predicted, growth, seed
):
    """An arm of the verdict takes 100; with growth, the winner's takes more, as its replies got longer."""
    costs = {"arm_cost": 100.0, "predicted": predicted, "growth": growth, "select_cost": 12.0, "resume_cost": 8.0}
    search = make(tmp_path / "s", {"r1": 0.02}, total=2000.0, unit="s", seed=seed, **costs)
    search.record.write = lambda: None
    result = await search.run()
    assert result["winner"]
    assert 0.9 * 2000 <= search.record.used <= 1.05 * 2000


def fail_in_the_last_rung(search):
    """Returns the names of the trials that have failed: the first one that trains in the last rung."""
    train, record, failed = search.trials.train, search.record, []

    async def train_or_fail(trial):
        if record.sizes and record.rung == len(record.sizes) - 1 and not failed:
            trial.stopped = "it failed: out of luck"
            failed.append(trial.name)
        else:
            await train(trial)

    search.trials.train = train_or_fail
    return failed


async def test_if_the_last_trial_fails_the_best_of_the_others_has_what_is_left(tmp_path):
    search = make(tmp_path / "s", {"r1": 0.03, "r2": 0.02}, total=2000.0, unit="s", arm_cost=50.0)
    record, failed = search.record, fail_in_the_last_rung(search)
    await search.run()
    assert record.sizes[-2:] == [1, 1]
    [other] = record.open_trials
    assert other.name not in failed
    assert any(line.startswith(f"{other.name} is trained on: ") for line in record.decisions)
    assert len(other.rung_best) == len(record.sizes)
    assert 0.9 * 2000 <= record.used <= 2000


async def test_what_is_left_is_not_spent_on_trials_that_are_known_to_be_worse(tmp_path):
    costs = {"total": 2000.0, "unit": "s", "arm_cost": 50.0}
    search = make(tmp_path / "s", {"r1": 0.1}, recipes=RECIPES[:6], num_select=2000, **costs)
    record, failed = search.record, fail_in_the_last_rung(search)
    result = await search.run()
    assert (result["winner"], failed) == ("02-r1", ["02-r1"])
    assert record.open_trials == []
    assert (record.sizes.count(1), record.used) == (1, 1520)


@pytest.mark.parametrize(("margin", "tried"), [(1.1, ["r0", "r1", "r5"]), (10.0, ["r0", "r1"])])
async def test_what_is_left_is_for_recipes_that_did_not_fit(tmp_path, monkeypatch, margin, tried):
    """First for those that learn from what the best one does; if two epochs and the verdict fit."""
    monkeypatch.setattr(search_module, "MARGIN", margin)
    recipes = [replace(each, needs=ANSWERS) if each.name in ("r1", "r5") else each for each in RECIPES[:6]]
    gains = {"r1": 0.1, "r5": 0.2}
    costs = {"total": 200.0, "unit": "s", "arm_cost": 20.0}
    search = make(tmp_path / "s", gains, recipes=recipes, num_select=2000, **costs)
    record, failed = search.record, fail_in_the_last_rung(search)
    result = await search.run()
    assert failed == ["02-r1"]
    assert [trial.recipe.name for trial in record.trials if trial.epochs] == tried
    assert result["winner"].endswith(tried[-1])
    assert any(line.startswith("06-r5 is tried after all: ") for line in record.decisions) == ("r5" in tried)
    assert record.used <= 200


async def test_a_gain_that_comes_last_still_has_its_verdict_and_the_rest(tmp_path):
    """Nothing helps before the last rung, so what was predicted is kept; then the real cost is known."""
    search = make(tmp_path / "s", recipes=RECIPES[:1], total=1000.0, unit="s", arm_cost=50.0, predicted=300.0)
    trials = search.trials
    draw = trials.draw
    trials.draw = lambda trial, epoch, *rest: draw(None, -1, *rest) + 0.2 * (trial is not None and epoch > 10)
    assert (await search.run())["winner"] == "01-r0"
    assert search.record.sizes == [1, 1]
    assert 950 <= search.record.used <= 1000


NEEDY = [
    SearchRecipe(f"r{number}", "because", needs=needs)
    for number, needs in enumerate((None, SIGNAL, SIGNAL, REWARDS, REWARDS, None))
]


FIRST_EPOCH = FirstEpoch(138, 0.0, 1.0, num_groups=16, num_with_signal=5, is_solved=False)


async def prune(folder, recipes=NEEDY, **changes):
    """Returns a search that is over, whose first epoch was `FIRST_EPOCH` but for the changes."""
    search = make(folder / "s", total=4000.0, recipes=recipes, first_epoch=replace(FIRST_EPOCH, **changes))
    await search.run()
    return search


def list_untried(search):
    return [trial.name for trial in search.record.trials if not trial.epochs]


@pytest.mark.parametrize(("samples", "untried"), [(1.004, []), (3.0, ["02-r1"])])
async def test_without_two_replies_to_one_prompt_no_preference_is_tried(tmp_path, samples, untried):
    recipes = [NEEDY[0], replace(NEEDY[1], needs=PAIRS), NEEDY[2]]
    search = await prune(tmp_path, recipes, samples_per_episode=samples)
    assert list_untried(search) == untried
    assert any("no groups with a better and a worse reply" in each for each in search.record.decisions) == bool(untried)


async def test_a_solved_task_ends_the_search_after_one_epoch(tmp_path):
    search = await prune(tmp_path, is_solved=True)
    why = "nothing to do: the untouched agent has the score 1 on every select example"
    assert search.record.result == {"promoted": False, "reason": why, "winner": None}
    assert search.record.decisions == [f"the search ends: {why}"]
    assert search.record.trials[0].epochs == 1
    assert len(list_untried(search)) == 5
    assert (await Search(SearchRecord.read(tmp_path / "s"), search.trials, NEEDY, GateConfig(), print).run()) == (
        search.record.result
    )


async def test_recipes_without_anything_to_learn_from_are_not_tried_and_leave_their_share_to_the_others(tmp_path):
    search = await prune(tmp_path, num_with_signal=0)
    assert list_untried(search) == ["02-r1", "03-r2"]
    assert [trial.number for trial in search.record.trials] == [1, 4, 5, 6, 2, 3]
    assert search.record.sizes == [4, 2, 1]
    assert search.record.decisions[:2] == [
        "not tried, as untouched the agent has no groups whose rewards differ (138 episodes have rewards from 0 to 1, "
        "which differ in 0 of 16 groups): 02-r1, 03-r2",
        "4 of 4 recipes fit the budget: a trial costs 20 tokens to start and 10 tokens an epoch",
    ]
    assert list_untried(await prune(tmp_path, highest=0.1)) == []  # whatever the scale of the rewards
    assert list_untried(await prune(tmp_path, num_groups=0, num_with_signal=0)) == []  # siblings are not compared
    assert list_untried(await prune(tmp_path, num_episodes=29, num_with_signal=0)) == []  # it may be chance


async def test_a_reward_that_never_differs_leaves_only_what_others_teach(tmp_path):
    search = await prune(tmp_path, NEEDY[:5], highest=0.0)
    assert search.record.result["reason"] == (
        "the reward never differs: all 138 episodes have the reward 0; test it with `reinforge reward test FILE` "
        "(docs/rewards.md)"
    )
    assert len(list_untried(search)) == 4
    search = await prune(tmp_path, highest=0.0)
    assert list_untried(search) == ["02-r1", "03-r2", "04-r3", "05-r4"]
    assert SearchRecord.read(tmp_path / "s").first_epoch == search.trials.first_epoch


@pytest.mark.slow
async def test_stopped_anywhere_and_resumed_it_ends_with_the_same_result(tmp_path):
    known = {"writes_epochs": True, "gains": {"r2": 0.01}, "first_epoch": replace(FIRST_EPOCH, num_with_signal=0)}
    recipes = [replace(recipe, needs=SIGNAL if place % 3 == 1 else None) for place, recipe in enumerate(RECIPES)]
    undisturbed = await make(tmp_path / "whole", recipes=recipes, num_seeds=3, **known).run()
    random = np.random.default_rng(0)
    for attempt in range(2):
        folder, stops = tmp_path / f"stopped-{attempt}", sorted(random.integers(1, 120, 3).tolist())
        search, number = make(folder, recipes=recipes, num_seeds=3), 0
        search.record.write()
        for stop in [*stops, None]:
            record = DyingRecord.read(folder)
            record.num_left = stop
            search = Search(record, SimulatedTrials(record, **known), recipes, GateConfig(), lambda line: None)
            try:
                result = await search.run()
            except Stopped:
                number += 1
        assert number > 0
        assert result == undisturbed
        assert sum(line.startswith("not tried") for line in record.decisions) == 1
        assert len(result["seeds"]["trainings"]) == 3


class Stopped(BaseException):
    """The process dies."""


class DyingRecord(SearchRecord):
    """A record whose process dies before it is written once more than `num_left` times; None: never."""

    num_left = None

    def write(self):
        if self.num_left == 0:
            raise Stopped
        self.num_left = self.num_left and self.num_left - 1
        super().write()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "most"), [(100, 5), pytest.param(1000, 35, marks=pytest.mark.slow)])
def test_choosing_among_twelve_trials_does_not_leak_into_the_verdict(tmp_path, count, most):
    """Without any effect at most 2.5 % of the searches promote, give or take two standard errors."""
    promoted = 0
    for seed in range(count):
        search = make(tmp_path / "s", seed=seed, total=3000.0)
        search.record.write = lambda: None
        promoted += asyncio.run(search.run())["promoted"] is True
        assert sum(trial.epochs > 0 for trial in search.record.trials) == 12
    assert promoted <= most
