"""A regression set: examples that a promoted model must not be worse on, in whole runs without torch."""

import json

import pytest

from reinforge.errors import ConfigError
from reinforge.runs.summary import load_summary
from reinforge.trainer.setup import further_sets
from tests.core.evaluation.test_reference import Replacement


class Pinned(Replacement):
    """The trained model fails at one in `student_fails` of the rows, and at one in `pinned_fails` of the 40 pinned
    ones, all of which the untrained one knows."""

    def __init__(self, folder, pinned_fails, *, count=40, margin=0.02):
        folder.mkdir(exist_ok=True)
        self.file, self.pinned_fails = folder / "pinned.jsonl", pinned_fails
        rows = [
            {"id": n, "messages": [{"role": "user", "content": f"q{1000 + n}"}], "gold": "yes"} for n in range(count)
        ]
        self.file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        super().__init__(folder, regression=str(self.file), regression_margin=margin)
        dataset = self.settings["eval"]["general"]["dataset"]
        self.rows, rows_file = dataset.pop("rows"), folder / "rows.jsonl"
        rows_file.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        dataset |= {"_type": "jsonl", "file_path": str(rows_file)}

    def answer(self, request):
        number = int(request.messages[-1]["content"][1:])
        if number < 1000:
            return super().answer(request)
        is_trained = self.adapter.server.version > 0 if self.adapter.trained == 0 else True
        return "no" if is_trained and number % self.pinned_fails == 0 else "yes"


async def test_a_model_that_is_as_good_on_the_regression_set_is_promoted(tmp_path):
    summary = await Pinned(tmp_path, 5000, margin=0.1).run()
    assert summary.promoted is True
    said = (
        "reward on the regression set pinned.jsonl (1.000 -> 1.000) passed: the interval of its change is [-0.09, 0.09]"
    )
    assert summary.reason.endswith(f"; {said}, above -0.1")
    assert (tmp_path / "r" / "model").is_dir()


async def test_too_few_pinned_examples_say_so_although_none_has_changed(tmp_path):
    summary = await Pinned(tmp_path, 5000).run()
    assert summary.promoted is False
    assert "but 40 examples are too few to rule out that reward on the regression set pinned.jsonl" in summary.reason


@pytest.mark.slow
async def test_a_model_that_forgot_pinned_examples_is_not_promoted_although_it_improved(tmp_path):
    summary = await Pinned(tmp_path, 4, margin=0.1).run()
    assert summary.improvement.ci_low > 0.3
    assert summary.promoted is False
    said = (
        "but reward on the regression set pinned.jsonl (1.000 -> 0.750) may have dropped by more than 0.1: the interval"
    )
    assert said in summary.reason
    assert not (tmp_path / "r" / "model").exists()
    assert load_summary(tmp_path / "r").explanations[0].reason == "worse on the regression set"


@pytest.mark.slow
@pytest.mark.parametrize(("margin", "promoted"), [(0.3, True), (0.02, False)])
async def test_the_whole_interval_must_be_above_the_margin(tmp_path, margin, promoted):
    """One of 40 fails: -0.025, with an interval that ends below -0.02 and above -0.3."""
    summary = await Pinned(tmp_path, 1000, margin=margin).run()
    assert summary.promoted is promoted
    assert f"(1.000 -> 0.975) {'passed' if promoted else 'may have dropped by more than 0.02'}" in summary.reason


@pytest.mark.slow
async def test_a_gate_that_judges_no_regression_set_promotes_the_forgetful_model(tmp_path, monkeypatch):
    """Mutation: the regression set is not asked."""

    async def skip(*arguments):
        return True, ""

    monkeypatch.setattr(further_sets, "judge_regression", skip)
    assert (await Pinned(tmp_path, 4, margin=0.1).run()).promoted is True


@pytest.mark.slow
async def test_one_example_decides_nothing(tmp_path):
    summary = await Pinned(tmp_path, 5000, count=1).run()
    assert summary.promoted is None
    assert "could not be checked: only 1 of 1 examples have a score" in summary.reason


async def test_a_broken_line_is_named_before_anything_runs(tmp_path):
    run = Pinned(tmp_path, 5000)
    run.file.write_text('{"messages": [{"role": "user", "content": "hi"}], "gold": "yes"}\n{"messages": \n')
    with pytest.raises(ConfigError, match=r"pinned.jsonl:2"):
        await run.run()


@pytest.mark.slow
async def test_what_is_pinned_may_be_trained_on_and_has_ids_of_its_own(tmp_path):
    run = Pinned(tmp_path, 5000, margin=0.1)
    run.settings["finetuning"]["splits"]["near_duplicates"] = "refuse"
    run.file.write_text("".join(json.dumps({**row, "id": n + 1}) + "\n" for n, row in enumerate(run.rows[:40])))
    assert (await run.run()).promoted is True
