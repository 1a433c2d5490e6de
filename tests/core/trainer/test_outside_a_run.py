"""Builder and trainer by themselves: what a component's own tests call, before or without a run."""

import asyncio
import json
import sys

import pytest

from reinforge.errors import EvaluationError, TrajectoryError
from reinforge.finetuning import (
    ARTTrainer,
    ARTTrainerConfig,
    ARTTrajectoryBuilder,
    ARTTrajectoryBuilderConfig,
    CurriculumLearningConfig,
    FinetuneConfig,
    IntermediateStep,
    IntermediateStepPayload,
    TrajectoryBuilder,
    TrajectoryBuilderConfig,
)
from reinforge.trainer.builders.group import build_episode
from tests.core.contract.test_extension_guide import eval_output
from tests.doubles import RecordingAdapter, ScriptedPolicy
from tests.scripted_run import ScriptedRun

REWARD = {"name": "my_reward"}


class OneBuilder(TrajectoryBuilder):
    async def start_run(self, run_id, meta=None): ...

    async def finalize(self, run_id, meta=None): ...


class OwnEval(OneBuilder):
    def __init__(self, scores):
        super().__init__(TrajectoryBuilderConfig())
        self.scores, self.seen = scores, []

    async def run_eval(self):
        self.seen.append(self.run_config.run_configuration if self.run_config is not None else None)
        if self.scores is None:
            raise ConnectionError("the database is down")
        return eval_output(self.scores)


def trainer_with(builder, reward=None):
    trainer = ARTTrainer(ARTTrainerConfig(reward=reward))
    trainer.trajectory_builder, trainer.trainer_adapter = builder, RecordingAdapter(ScriptedPolicy())
    return trainer


@pytest.fixture
def project(tmp_path):
    sys.modules.pop("outside_task", None)  # each project has its own
    (tmp_path / "outside_task.py").write_text("def agent(item, llm, context):\n    return item.input_obj + 'aa'\n")
    (tmp_path / "data.jsonl").write_text('{"question": "b"}\n{"question": "a"}\n')
    (tmp_path / "held_out.jsonl").write_text('{"question": "bbbb"}\n')
    (tmp_path / "run.yml").write_text(
        "llms: {m: {_type: openai, model_name: m, base_url: 'http://127.0.0.1:9', api_key: unused}}\n"
        "workflow: {_type: python, function: 'outside_task:agent'}\n"
        "eval:\n"
        "  general: {dataset: {_type: jsonl, file_path: data.jsonl}}\n"
        "  evaluators: {my_reward: {_type: my_custom_evaluator}}\n"
    )
    from tests.guide import register  # noqa: F401  its evaluator: the share of vowels

    settings = {"config_file": tmp_path / "run.yml", "validation_dataset": str(tmp_path / "held_out.jsonl")}
    return FinetuneConfig(reward_function=REWARD, run_configuration=settings, output_dir=tmp_path / "out")


async def test_run_eval_evaluates_the_configured_file(project):
    builder = OneBuilder(TrajectoryBuilderConfig())
    await builder.initialize(project)
    output = await builder.run_eval()
    assert [item.output_obj for item in output.eval_input.eval_input_items] == ["baa", "aaa"]
    assert output.evaluation_results[0][1].average_score == pytest.approx((2 / 3 + 1) / 2)


async def test_run_eval_before_initialize_says_what_to_do():
    with pytest.raises(EvaluationError, match=r"or call builder\.initialize\(FinetuneConfig\(run_configuration="):
        await OneBuilder(TrajectoryBuilderConfig()).run_eval()


async def test_a_validation_evaluates_the_validation_dataset(project):
    """`bbbbaa` has 2 vowels among 6 letters; afterwards the builder has its own settings again."""
    builder = OneBuilder(TrajectoryBuilderConfig())
    trainer = trainer_with(builder)
    await trainer.initialize(project)
    found = await trainer.run_validation_evaluation(3, "run")
    assert found == {
        "epoch": 3, "dataset_type": "validation", "avg_reward": pytest.approx(1 / 3),
        "min_reward": pytest.approx(1 / 3), "max_reward": pytest.approx(1 / 3), "num_examples": 1,
    }  # fmt: skip
    assert builder.run_config is project
    assert project.run_configuration.dataset is None


async def test_a_validation_calls_an_overridden_run_eval(project):
    builder = OwnEval((0.5, 0.0, 1.0))
    trainer = trainer_with(builder)
    await trainer.initialize(project)
    assert trainer.trainer_config.reward.name == "my_reward"
    found = await trainer.run_validation_evaluation(0, "run")
    assert (found["avg_reward"], found["min_reward"], found["max_reward"], found["num_examples"]) == (0.5, 0.0, 1.0, 3)
    assert found["dataset_type"] == "validation"
    [seen] = builder.seen
    assert seen.dataset == project.run_configuration.validation_dataset


async def test_before_initialize_the_trainers_own_reward_names_the_scores():
    trainer = trainer_with(OwnEval((0.25, 0.75)), reward=REWARD)
    assert trainer._calculate_validation_metrics(eval_output((1.0,)))["avg_reward"] == 1.0
    assert (await trainer.run_validation_evaluation(0, "run"))["avg_reward"] == 0.5
    trainer.trainer_config.reward.name = "another"
    assert trainer._calculate_validation_metrics(eval_output((1.0,)))["num_examples"] == 0


async def test_a_validation_that_fails_is_unknown(project):
    trainer = trainer_with(OwnEval(None))
    await trainer.initialize(project)
    found = await trainer.run_validation_evaluation(1, "run")
    assert (found["avg_reward"], found["min_reward"], found["num_examples"]) == (None, None, 0)
    assert found["error"].startswith("ConnectionError: the database is down")
    assert trainer.trajectory_builder.run_config is project


async def test_without_a_builder_a_validation_says_so():
    with pytest.raises(EvaluationError, match="call bind_components"):
        await ARTTrainer(ARTTrainerConfig()).run_validation_evaluation(0, "run")


async def test_in_a_run_the_validation_has_the_same_keys(tmp_path):
    """The run's own evaluation of `select`: the answers of the baseline end in digits from 0 to 6."""
    run = ScriptedRun(tmp_path)
    await run.run()
    [baseline, *_] = json.loads((tmp_path / "r" / "validation_history.json").read_text())
    assert baseline["dataset_type"] == "validation"
    assert 0 <= baseline["min_reward"] < baseline["avg_reward"] < baseline["max_reward"] <= 6


def art_builder(outputs, num_generations=2):
    builder = ARTTrajectoryBuilder(ARTTrajectoryBuilderConfig(num_generations=num_generations))
    builder.run_config = FinetuneConfig(reward_function=REWARD)
    left = list(outputs)

    async def run_eval():
        await asyncio.sleep(0)
        return left.pop(0)

    builder.run_eval = run_eval
    return builder


async def test_a_group_builder_collects_with_run_eval():
    """Two generations over two examples: each example's rewards side by side, and the tokens of each reply."""
    builder = art_builder([eval_output((1.0, 0.0)), eval_output((0.0, 0.5))])
    assert builder.num_generations == 2
    await builder.start_run("r", {"epoch": 4})
    assert len(builder.evaluation_runs["r"]) == 2, "one task per generation"
    collection = await builder.finalize("r", {"epoch": 4})
    assert [[t.reward for t in group] for group in collection.trajectories] == [[1.0, 0.0], [0.0, 0.5]]
    assert (collection.run_id, collection.epoch) == ("r", 4)
    first = collection.trajectories[0][0]
    assert [(item.role, item.content) for item in first.episode] == [
        ("user", "question 0"), ("assistant", "answer 1.0")
    ]  # fmt: skip
    assert first.episode[1].tokens.token_ids == (4,)
    assert first.metadata == {"id": "0", "reasoning": "", "run_id": "r", "generation": 0}
    assert builder.evaluation_runs == {}


async def test_a_second_start_of_a_run_and_a_finalize_of_none():
    builder = art_builder([eval_output((1.0,))] * 2)
    await builder.start_run("r")
    with pytest.raises(ValueError, match='run "r" is being collected already; finalize it first'):
        await builder.start_run("r")
    with pytest.raises(TrajectoryError, match='run "s" was not started; started and not finalized: r'):
        await builder.finalize("s")
    await builder.finalize("r")
    with pytest.raises(TrajectoryError, match='run "r" was not started; started and not finalized: none'):
        await builder.finalize("r")


async def test_a_generation_that_fails_ends_the_collection_and_leaves_nothing_behind():
    builder = art_builder([eval_output((1.0,))])  # the second call finds no output
    await builder.start_run("r")
    with pytest.raises(IndexError):
        await builder.finalize("r")
    assert builder.evaluation_runs == {}


async def test_cleanup_cancels_what_is_being_collected():
    builder = art_builder([eval_output((1.0,))] * 2)
    never = asyncio.Event()
    builder.run_eval = never.wait
    await builder.start_run("r")
    tasks = builder.evaluation_runs["r"]
    await builder.cleanup()
    assert all(task.cancelled() for task in tasks)
    assert builder.evaluation_runs == {}


async def test_scores_of_another_evaluator_are_no_rewards():
    builder = art_builder([eval_output((1.0,))] * 2)
    builder.run_config.reward_function.name = "other"
    await builder.start_run("r")
    with pytest.raises(EvaluationError, match='the evaluation has no scores of "other"; it has my_reward'):
        await builder.finalize("r")


async def test_what_is_left_out_is_told(caplog):
    outputs = [eval_output(each) for each in ((1.0, 0.0), (0.5, 0.0), (1.0,), (1.0,))]
    outputs[0].evaluation_results[0][1].eval_output_items[1].score = None
    builder = art_builder(outputs)
    await builder.start_run("r")
    assert (await builder.finalize("r")).num_trajectories == 3
    assert "r: 3 trajectories; left out: 1 without a score" in caplog.text
    builder.run_config.target_functions = ["search"]
    await builder.start_run("s")
    await builder.finalize("s")
    assert "s: 0 trajectories; left out: 2 without a reply with log-probs" in caplog.text


def test_content_in_blocks_becomes_its_text():
    """Written with `str`, an episode held "[{'type': 'text', ...}]" as the user's words."""
    blocks = [{"type": "text", "text": "say "}, {"type": "text", "text": "hi"}]
    payload = IntermediateStepPayload(
        event_type="LLM_START", UUID="u", data={"payload": [{"role": "user", "content": blocks}]}
    )
    ended = IntermediateStepPayload(event_type="LLM_END", UUID="u", data={"output": "hi"})
    node = {"function_id": "f", "function_name": "f"}
    steps = [IntermediateStep(parent_id="root", function_ancestry=node, payload=each) for each in (payload, ended)]
    assert [item.content for item in build_episode(steps)] == ["say hi", "hi"]


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
async def test_progress_that_a_user_logs_is_in_the_history(tmp_path):
    trainer = trainer_with(OwnEval((1.0,)))
    await trainer.initialize(FinetuneConfig(reward_function=REWARD, output_dir=tmp_path))
    trainer.log_progress(0, {"avg_reward": 0.5, "num_trajectories": 8})
    [row] = json.loads((tmp_path / "reward_history.json").read_text())
    assert (row["epoch"], row["avg_reward"], row["num_trajectories"]) == (0, 0.5, 8)
    trainer.log_progress(0, {"avg_reward": 0.5})
    assert len(json.loads((tmp_path / "reward_history.json").read_text())) == 1
    assert trainer._reward_history[0]["avg_reward"] == 0.5
    assert trainer._reward_history[0].get("num_trajectories") == 8
    lines = [json.loads(line) for line in (tmp_path / "training_metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 0]
    assert {"timestamp", "run_id", "avg_reward"} <= lines[0].keys()
    assert (tmp_path / "reward_plot.png").exists(), "drawn as the training goes"


async def test_metrics_count_the_epochs_that_submitted_a_job(tmp_path):
    outputs = [eval_output(scores) for scores in ((1, 0), (0, 1), (1, 1), (1, 1))]
    trainer = trainer_with(art_builder(outputs))
    await trainer.initialize(FinetuneConfig(reward_function=REWARD, output_dir=tmp_path))
    await trainer.run(2)
    metrics = await trainer.get_metrics("run")
    assert (metrics["total_epochs"], metrics["num_epochs"]) == (1, 2), "the second epoch had no spread"


async def test_a_trainer_that_is_not_initialized_says_so():
    with pytest.raises(RuntimeError, match=r"ARTTrainer is not initialized: call initialize\(run_config\) before run"):
        await trainer_with(OwnEval((1.0,))).run(1)


async def test_an_epoch_outside_a_run_has_the_toolkits_fields_and_is_validated(project):
    """Two examples, two generations and a curriculum; after every epoch one validation, by the same `run_eval`."""
    metas = []

    class Collects(ARTTrajectoryBuilder):
        async def start_run(self, run_id, meta=None):
            metas.append(meta)
            await super().start_run(run_id, meta)

    builder = Collects(ARTTrajectoryBuilderConfig())
    outputs = [eval_output(scores) for scores in ((1, 0), (0, 0.25), (0.5, 0.75))] * 2
    builder.run_eval = lambda: asyncio.sleep(0, outputs.pop(0))
    trainer, settings = trainer_with(builder), project.run_configuration.model_copy(update={"validation_interval": 1})
    curriculum = {"enabled": True, "initial_percentile": 0.5}
    update = {"run_configuration": settings, "curriculum_learning": CurriculumLearningConfig(**curriculum)}
    await trainer.initialize(project.model_copy(update=update))
    await trainer.run(2)
    assert [row["avg_reward"] for row in trainer._validation_history] == [0.625, 0.625]
    assert [(row["epoch"], row["min_reward"], row["max_reward"]) for row in trainer._reward_history] == [
        (0, 0, 1), (1, 0, 1)
    ]  # fmt: skip
    first = json.loads((project.output_dir / "training_metrics.jsonl").read_text().splitlines()[0])
    assert (first["filtered_groups"], first["filtered_trajectories"]) == (1, 2)
    assert (first["filtered_min_reward"], first["filtered_avg_reward"], first["filtered_max_reward"]) == (0, 0.5, 1)
    assert first["curriculum_state"]["current_percentile"] == 0.5
    assert [(meta["epoch"], meta["run_id"]) for meta in metas] == [(0, first["run_id"]), (1, first["run_id"])]
    assert metas[0]["trainer_config"]["reward"]["name"] == "my_reward"


async def test_with_one_generation_all_examples_are_one_group(tmp_path):
    builder = art_builder([eval_output((1.0, 0.0, 0.5))], num_generations=1)
    await builder.start_run("r")
    [group] = (await builder.finalize("r")).groups
    assert (group.rewards, builder.example_rewards([group])) == (
        [1.0, 0.0, 0.5],
        [("all", 1.0), ("all", 0.0), ("all", 0.5)],
    )
    builder.log_progress("r", {"num_trajectories": 3}, str(tmp_path / "logs"))
    line = json.loads((tmp_path / "logs" / "trajectory_builder_r.jsonl").read_text())
    assert line.pop("timestamp")
    assert line == {"run_id": "r", "num_generations": 1, "num_trajectories": 3}
