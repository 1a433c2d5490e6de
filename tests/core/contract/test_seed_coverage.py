"""Every symbol of the five seeds is there, with its signature or a stated deviation, and with a test."""

import json
import re
from dataclasses import replace

import pytest

from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError
from reinforge.finetuning import ARTTrainer, ARTTrainerConfig, EvaluationRun, EvaluationRunConfig, TrajectoryBuilder
from reinforge.interfaces import TrajectoryBuilder as Port
from tests.doubles import RecordingAdapter, ScriptedPolicy
from tests.faults import functions_of
from tests.generated import assert_page_is
from tests.seed_symbols import TABLE, document, exists, missing, rows, same_signature

ROWS = rows()


def find_gap(row):
    path, _, name = row.test.partition("::")
    if not exists(row):
        return f"{row.place} is not there"
    if name not in functions_of(path):
        return f"{row.test}, the test of {row.place}, is not there"
    if row.signature is not None and not same_signature(row) and not row.deviation:
        return f"{row.place} differs from {row.signature} and nobody says why"
    return None


def test_each_symbol_is_there_as_the_seed_prints_it():
    assert [gap for row in ROWS if (gap := find_gap(row))] == []


@pytest.mark.parametrize(
    ("change", "gap"),
    [
        ({"name": "wait"}, "TrainerAdapter.wait is not there"),
        (
            {"test": "tests/core/contract/test_output.py::test_of_nothing"},
            "::test_of_nothing, the test of .*, is not there",
        ),
        ({"signature": "(self)"}, r"differs from \(self\) and nobody says why"),
    ],
)
def test_a_gap_in_the_table_is_found(change, gap):
    row = next(row for row in ROWS if row.symbol == "TrainerAdapter.wait_until_complete")
    assert find_gap(row) is None
    assert re.search(gap, find_gap(replace(row, **change)))


@pytest.mark.parametrize(
    "wrong",
    [
        "async (self, ref: TrainingJobRef, poll_interval: float=5.0) -> TrainingJobStatus",
        "(self, ref: TrainingJobRef, poll_interval: float=10.0) -> TrainingJobStatus",
        "async (self, ref: TrainingJobRef, poll_interval: int=10.0) -> TrainingJobStatus",
        "async (self, ref: TrainingJobRef) -> TrainingJobStatus",
        "async (self, reference: TrainingJobRef, poll_interval: float=10.0) -> TrainingJobStatus",
    ],
)
def test_a_signature_that_differs_is_noticed(wrong):
    row = next(row for row in ROWS if row.symbol == "TrainerAdapter.wait_until_complete")
    assert same_signature(row)
    assert not same_signature(replace(row, signature=wrong))


def test_coverage_does_not_shrink():
    assert len(ROWS) >= TABLE["covered"], "a symbol was taken off the list"


def test_what_is_not_there_yet_is_not_there():
    assert [symbol for _, symbol, _, there in missing() if there] == [], "it is there: move it to `groups`"


def test_the_page_is_made_from_the_list():
    assert_page_is("notes/seed-coverage.md", document())


def test_names_are_the_objects_that_the_package_uses():
    assert TrajectoryBuilder is Port


@pytest.mark.slow
async def test_art_trainer_runs_outside_a_run(tmp_path, plots):
    """Seed 001's class by itself: bound to parts of a user's own, two epochs, histories, files and plot."""
    from tests.core.contract.test_extension_guide import eval_output
    from tests.guide.my_trajectory_builder import MyTrajectoryBuilder, MyTrajectoryBuilderConfig

    builder = MyTrajectoryBuilder(MyTrajectoryBuilderConfig())
    outputs = [eval_output(scores) for scores in ((1, 0), (0, 1), (1, 0), (0, 0))]

    async def run_eval():
        return outputs.pop(0)

    builder.run_eval = run_eval
    trainer = ARTTrainer(trainer_config=ARTTrainerConfig())
    assert trainer._run_id is None
    assert trainer._job_refs == trainer._reward_history == trainer._validation_history == []
    await trainer.bind_components(builder, RecordingAdapter(ScriptedPolicy()))
    await trainer.initialize(FinetuneConfig(reward_function={"name": "my_reward"}, output_dir=tmp_path / "out"))
    statuses = await trainer.run(num_epochs=2)
    assert [status.status for status in statuses] == ["completed", "completed"]
    assert len(trainer._job_refs) == 2
    assert trainer._run_id is not None
    metrics = await trainer.get_metrics(trainer._run_id)
    assert [row["num_groups_kept"] for row in metrics["reward_history"]] == [2, 1]
    assert len((tmp_path / "out" / "training_metrics.jsonl").read_text().splitlines()) == 2
    trainer.log_progress(2, {"avg_reward": 0.5}, output_dir=str(tmp_path / "other"))
    assert (tmp_path / "other" / "reward_plot.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "other" / "curriculum_state.json").read_text())["total_groups"] == 2
    await trainer.cleanup()


async def test_an_evaluation_run_gives_outputs_and_scores(tmp_path, monkeypatch):
    from tests.guide import register  # noqa: F401  its evaluator

    (tmp_path / "mytask.py").write_text("def agent(item, llm, context):\n    return item.input_obj + 'aa'\n")
    (tmp_path / "data.jsonl").write_text('{"question": "b"}\n{"question": "a"}\n')
    (tmp_path / "eval.yml").write_text(
        "llms: {m: {_type: openai, model_name: m, base_url: 'http://127.0.0.1:9', api_key: unused}}\n"
        "workflow: {_type: python, function: 'mytask:agent'}\n"
        "eval:\n"
        "  general: {output_dir: %s, dataset: {_type: jsonl, file_path: data.jsonl}}\n"
        "  evaluators: {my_reward: {_type: my_custom_evaluator}}\n" % (tmp_path / "out")
    )
    config = EvaluationRunConfig(config_file=tmp_path / "eval.yml", reps=2)
    output = await EvaluationRun(config).run_and_evaluate()
    assert [item.output_obj for item in output.eval_input.eval_input_items] == ["baa", "aaa"] * 2
    assert output.evaluation_results[0][1].average_score == pytest.approx((2 / 3 + 1) / 2)
    assert output.workflow_interrupted is False
    assert json.loads(output.evaluator_output_files[0].read_text())["average_score"] == pytest.approx(5 / 6)
    with pytest.raises(ConfigError, match="skip_workflow: not supported: scoring outputs that the dataset already"):
        EvaluationRun(config.model_copy(update={"skip_workflow": True}))
