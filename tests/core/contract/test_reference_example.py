"""A file of the reference's ART example is read, and its parts are ours."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError
from reinforge.finetuning import ARTTrainer, ARTTrainerAdapterConfig, ARTTrajectoryBuilder
from reinforge.trainer.setup.components import ComponentBuilder

EXAMPLE = Path(__file__).parents[2] / "data" / "art_example.yml"


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


def test_the_examples_adapter_reaches_for_its_server(tmp_path, monkeypatch):
    """Nothing listens there, so the run ends with exit code 4 and names the address."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "task", raising=False)  # another test's
    (tmp_path / "data").mkdir()
    rows = [{"id": str(i), "question": f"say {i}", "answer": "a"} for i in range(64)]
    (tmp_path / "data" / "train.json").write_text(json.dumps(rows))
    (tmp_path / "task.py").write_text("async def agent(item, llm, context):\n    return 'a'\n")
    (tmp_path / "run.yml").write_text(EXAMPLE.read_text())
    path = "trainer_adapters.openpipe_trainer_adapter"
    nowhere = {"backend.port": "9", "backend.ip": "127.0.0.1", "max_retries": "0"}
    overrides = [part for key, value in nowhere.items() for part in ("-o", f"{path}.{key}", value)]
    result = CliRunner().invoke(main, ["finetune", "run.yml", *overrides])
    assert result.exit_code == 4, result.output
    assert "http://127.0.0.1:9/register" in result.output


def test_a_wrong_backend_is_told_before_that():
    with pytest.raises(ConfigError, match="trainer_adapters.openpipe_trainer_adapter.backend.port"):
        load_config(EXAMPLE, overrides=[("trainer_adapters.openpipe_trainer_adapter.backend.port", "many")])
