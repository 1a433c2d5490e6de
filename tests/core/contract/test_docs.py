"""The docs match the code: configure.md is generated from the classes, and the plugins of docs/extend run."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError
from reinforge.finetuning import ARTTrainer, ARTTrainerAdapterConfig, ARTTrajectoryBuilder
from reinforge.registry import REGISTRY
from reinforge.trainer.setup.components import ComponentBuilder
from tests.configure_page import build_page
from tests.generated import DOCS, assert_page_is
from tests.samples import random_samples

EXTEND = sorted((DOCS / "extend").glob("*.md"))
MAX_LINES = 45


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def merge(settings, change):
    for key, value in change.items():
        if isinstance(value, dict) and "_type" not in value and isinstance(settings.get(key), dict):
            merge(settings[key], value)
        else:
            settings[key] = value


def test_configure_is_generated_from_the_classes():
    assert_page_is("docs/configure.md", build_page(REGISTRY))


def test_each_kind_has_a_page():
    assert [path.stem for path in EXTEND] == [
        "adapter", "algorithm", "builder", "dataset", "evaluator", "loss", "trainer", "workflow"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", EXTEND, ids=lambda path: path.stem)
def test_the_plugin_of_a_page_trains(path, project):
    """Imports the module of the page like a plugin, merges the YAML of the page into a configuration, and runs it."""
    (plugin, *_), changes = blocks(path, "python"), blocks(path, "yaml")
    assert sum(map(bool, map(str.strip, plugin.splitlines()))) <= MAX_LINES, "the plugin of a page should be short"
    name = f"docs_extend_{path.stem}"
    project.write(f"{name}.py", plugin)
    sys.path.insert(0, str(project.folder))
    importlib.invalidate_caches()
    importlib.import_module(name)
    project.set("finetuning.num_epochs", 1)
    project.rows = project.rows[:32]
    for change in changes:
        merge(project.settings, yaml.safe_load(change))
    result = project.finetune()
    assert result.exit_code == 0, result.output
    assert len(project.summary["policy_versions"]) >= 2, "something was trained"


def test_the_steps_of_the_loss_page_run(tiny_model_dir):
    """The second block of the page, unchanged: ten steps that make tokens with a positive advantage more likely."""
    _, by_hand = blocks(DOCS / "extend" / "loss.md", "python")
    samples = random_samples(4)
    for sample in samples:
        sample.advantages = np.where(sample.loss_mask, 1, 0).astype(np.float32)
    names = {"folder": str(tiny_model_dir), "samples": samples}
    exec(by_hand, names)
    assert names["engine"].policy.version == 1
    assert names["steps"][-1]["likelihood"] > names["steps"][0]["likelihood"] + 1


def test_every_algorithm_is_listed_with_its_papers():
    """Each row of papers.md is a registered algorithm, and its file names the papers of the row."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (\w+\.py) \| ", (DOCS / "papers.md").read_text(), re.MULTILINE)
    known = {c.name: c.origin for c in REGISTRY.components("algorithm") if c.origin.startswith("reinforge.algorithms.")}
    assert {name for name, _, _ in rows} == set(known)
    for name, papers, file in rows:
        assert known[name].endswith(f".{file.removesuffix('.py')}")
        docstring = importlib.import_module(known[name]).__doc__
        for paper in re.findall(r"\[(\d{4}\.\d{5})\]", papers):
            assert f"arXiv:{paper}" in docstring, f"{file} does not name {paper}"


def test_every_name_on_the_migration_page_exists():
    import reinforge.finetuning as harness

    text = (DOCS / "coming-from-nat.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:ART|Trajectory|Trainer)\w+)`", text):
        assert hasattr(harness, name), name


def test_every_command_on_the_pages_exists():
    from reinforge.cli import COMMANDS

    for path in DOCS.rglob("*.md"):
        for command in re.findall(r"`reinforge ([a-z]+)", path.read_text(encoding="utf-8")):
            assert command in COMMANDS, f"{path.name} names reinforge {command}"


PAGE = Path(__file__).parents[3] / "docs" / "quickstart.md"


def test_the_yaml_file_of_the_quickstart_is_valid_with_the_files_beside_it(tmp_path, monkeypatch):
    section = PAGE.read_text().split("## The same from a YAML file")[1].split("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    assert [language for language, _ in blocks[:3]] == ["python", "python", "yaml"]
    for name, (_, text) in zip(("my_agent.py", "questions.py", "run.yml"), blocks, strict=False):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("my_agent", None)
    subprocess.run([sys.executable, "questions.py"], check=True)
    result = CliRunner().invoke(main, ["check", "run.yml", "--sample", "3"])
    assert result.exit_code == 0, result.output
    for expected in ("438 train, 109 select, 182 confirm", "expected answer 1, empty answer 0", "run.yml is valid"):
        assert expected in result.output
    assert not (tmp_path / ".reinforge").exists()


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
