"""The extension guide (seed 002): components, registration, test and complete file work with other import lines."""

from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from reinforge.config.loader import load_config
from reinforge.finetuning import (
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluationRunOutput,
    FinetuneConfig,
    Trainer,
    TrajectoryCollection,
)
from reinforge.rollout.episode import build_steps
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprobs
from tests.guide import register
from tests.guide.my_trainer import MyTrainer, MyTrainerConfig
from tests.guide.my_trainer_adapter import MyBackendConfig, MyTrainerAdapter, MyTrainerAdapterConfig
from tests.guide.my_trajectory_builder import MyTrajectoryBuilder, MyTrajectoryBuilderConfig
from tests.guide.registry import guide_registry

COMPLETE = Path(__file__).parents[2] / "data" / "002-complete.yml"


def eval_output(scores=(1.0, 0.0)):
    """What `run_eval` gives: one item a score, each with one model call."""
    items = []
    for index, score in enumerate(scores):
        tokens = TokenLogprobs((1, 2), (3 + int(score),), (-0.1,))
        reply = ModelReply({"role": "assistant", "content": f"answer {score}"}, "stop", tokens, 2, 1)
        request = ModelRequest([{"role": "user", "content": f"question {index}"}])
        call = ModelCall(f"call-{index}", "agent", "m", request, reply, (), 0.0, 1.0)
        item = EvalInputItem(id=str(index), input_obj="q", expected_output_obj="a", full_dataset_entry={})
        record = EpisodeRecord(EpisodeKey("collect", 0, str(index)), item, calls=[call])
        items.append(item.copy_with_updates(trajectory=build_steps(record)))
    scored = [EvalOutputItem(id=item.id, score=score, reasoning="") for item, score in zip(items, scores, strict=True)]
    return EvaluationRunOutput(
        workflow_output_file=None,
        evaluator_output_files=[],
        workflow_interrupted=False,
        eval_input=EvalInput(eval_input_items=items),
        evaluation_results=[("my_reward", EvalOutput(average_score=0.5, eval_output_items=scored))],
        profiler_results=None,
    )


mock_eval_output = eval_output()


# As the guide prints it.
@pytest.mark.asyncio
async def test_trajectory_builder():
    config = MyTrajectoryBuilderConfig(num_generations=2)
    builder = MyTrajectoryBuilder(trajectory_builder_config=config)
    # Mock the run_eval method
    builder.run_eval = AsyncMock(return_value=mock_eval_output)
    # Test start_run
    await builder.start_run("test-run")
    assert "test-run" in builder.evaluation_runs
    # Test finalize
    result = await builder.finalize("test-run")
    assert isinstance(result, TrajectoryCollection)


def test_the_complete_file_loads_once_its_components_are_registered():
    loaded = load_config(COMPLETE, registry=guide_registry(), environ={"TRAINING_API_KEY": "sk-1"})
    config = loaded.config
    builder = config.trajectory_builders["my_builder"]
    assert (builder.num_generations, builder.include_tool_calls, builder.min_episode_length) == (4, True, 3)
    backend = config.trainer_adapters["my_adapter"].backend
    assert isinstance(backend, MyBackendConfig)
    assert (backend.learning_rate, backend.batch_size, backend.api_key, backend.timeout) == (1e-5, 8, "sk-1", 3600)
    finetuning = config.finetuning
    assert (finetuning.enabled, finetuning.num_epochs, finetuning.reward_function.name) == (True, 20, "my_reward")
    curriculum = finetuning.curriculum_learning
    assert (curriculum.enabled, curriculum.initial_percentile, curriculum.expansion_interval) == (True, 0.3, 5)


async def test_the_registered_components_come_out_of_the_builder():
    registry = guide_registry()
    loaded = load_config(COMPLETE, registry=registry, environ={"TRAINING_API_KEY": "sk-1"})
    async with ComponentBuilder(loaded, registry) as builder:
        assert isinstance(await builder.get_trajectory_builder("my_builder"), MyTrajectoryBuilder)
        assert isinstance(await builder.get_trainer_adapter("my_adapter"), MyTrainerAdapter)
        assert isinstance(await builder.get_trainer("my_trainer"), MyTrainer)
        assert (await builder.get_workflow()).llm == "my_model"
        assert builder.policy() is None, "this adapter serves no policy"


async def test_the_guides_parts_run_together():
    """Builder and adapter of the guide under its trainer: two epochs, one job each, nothing of a run around them."""
    adapter = MyTrainerAdapter(
        adapter_config=MyTrainerAdapterConfig(backend=MyBackendConfig(endpoint="http://x", api_key="k"))
    )
    builder = MyTrajectoryBuilder(trajectory_builder_config=MyTrajectoryBuilderConfig())
    builder.run_eval = AsyncMock(side_effect=[eval_output(s) for s in ((1, 0), (0, 0), (0, 1), (1, 1))])
    trainer = MyTrainer(trainer_config=MyTrainerConfig())
    trainer.run_validation_evaluation = AsyncMock(return_value={"avg_reward": 0.5})
    await trainer.bind_components(builder, adapter)
    await trainer.initialize(FinetuneConfig(reward_function={"name": "my_reward"}))
    assert builder.trajectory_builder_config.reward.name == adapter.adapter_config.reward.name == "my_reward"
    assert trainer.get_curriculum_state() == {
        "current_percentile": 0.3, "last_expansion_epoch": -1, "total_groups": 0, "included_groups": []
    }  # fmt: skip
    statuses = await trainer.run(2)
    assert [status.status for status in statuses] == ["completed", "completed"]
    assert [len(job["rows"]) for job in adapter.client.jobs.values()] == [2, 2], "groups without spread stay out"


def test_what_is_printed_as_raising_raises():
    with pytest.raises(NotImplementedError, match="Override to implement curriculum learning"):
        Trainer.apply_curriculum_learning(
            MyTrainer(MyTrainerConfig()), TrajectoryCollection(trajectories=[], run_id="r"), 0
        )


def test_the_modules_say_reinforge_and_nothing_else_of_ours():
    """Only `reinforge.finetuning` is imported: no inner module is needed to write against the harness."""
    for path in Path(register.__file__).parent.glob("my_*.py"):
        imports = [line for line in path.read_text().splitlines() if line.startswith(("from reinforge", "import rein"))]
        assert imports == ["from reinforge.finetuning import ("], path
