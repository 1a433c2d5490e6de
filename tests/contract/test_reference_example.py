"""A file of the reference's ART example is read, and what this version cannot do is refused by name."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError
from reinforge.finetuning import ARTTrainer, ARTTrainerAdapterConfig, ARTTrajectoryBuilder
from reinforge.trainer.setup.components import ComponentBuilder

EXAMPLE = Path(__file__).parents[1] / "data" / "art_example.yml"


def test_the_example_is_read():
    config = load_config(EXAMPLE).config
    adapter = config.trainer_adapters["openpipe_trainer_adapter"]
    assert isinstance(adapter, ARTTrainerAdapterConfig)
    assert (adapter.backend.port, adapter.backend.base_model) == (7623, "Qwen/Qwen2.5-3B-Instruct")
    assert adapter.training == {"learning_rate": 1e-6}
    assert config.eval.general.dataset.question_key == "question"
    assert config.finetuning.curriculum_learning.random_subsample == 0.8


async def test_the_examples_builder_and_trainer_are_ours():
    loaded = load_config(EXAMPLE)
    async with ComponentBuilder(loaded) as builder:
        assert type(await builder.get_trainer("openpipe_trainer")) is ARTTrainer
        made = await builder.get_trajectory_builder("openpipe_traj_builder")
        assert type(made) is ARTTrajectoryBuilder
        assert made.trajectory_builder_config.num_generations == 2


def test_the_examples_adapter_is_refused_by_name_when_a_run_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["finetune", str(EXAMPLE)])
    assert result.exit_code == 2
    assert "art_example.yml:35:5 trainer_adapters.openpipe_trainer_adapter._type: remote ART servers" in result.output
    assert "use trainer_adapters._type: local" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_backend_is_told_before_that():
    with pytest.raises(ConfigError, match="trainer_adapters.openpipe_trainer_adapter.backend.port"):
        load_config(EXAMPLE, overrides=[("trainer_adapters.openpipe_trainer_adapter.backend.port", "many")])
