"""The import paths of the NeMo Agent Toolkit lead to our own objects, only on request and only where it is absent."""

import importlib
import logging
import subprocess
import sys

import pytest
from click.testing import CliRunner

import reinforge.finetuning as harness
from reinforge.cli import main
from reinforge.compat import nat
from reinforge.compat.nat import MODULES
from reinforge.errors import ConfigError
from reinforge.rollout.isolation.isolated_agent import LOADER
from reinforge.rollout.isolation.worker_pool import WORKER_SETUP, WorkerPool
from tests.compat.nat_sources import install_plugin


@pytest.fixture
def installed():
    assert nat.install()
    yield
    nat.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "nat"]


def test_each_name_is_our_own_object(installed):
    for module, names in MODULES.items():
        for name, path in names.items():
            where, _, own = path.partition(":")
            ours = getattr(importlib.import_module(where), own)
            assert getattr(importlib.import_module(module), name) is ours, f"{module}.{name}"


def test_the_paths_that_components_use(installed):
    """Both spellings of the evaluation classes, and the package itself."""
    from nat.data_models.evaluate_runtime import EvaluationRunOutput
    from nat.eval.config import EvaluationRunOutput as OlderSpelling
    from nat.finetuning import Trainer
    from nat.finetuning.interfaces.finetuning_runner import Trainer as SameTrainer

    assert EvaluationRunOutput is OlderSpelling is harness.EvaluationRunOutput
    assert Trainer is SameTrainer is harness.Trainer


def test_importing_the_module_changes_nothing():
    code = "import reinforge.compat.nat\ntry:\n    import nat\nexcept ModuleNotFoundError as error:\n    print(error)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "No module named 'nat'"


def test_what_has_no_counterpart_is_refused_by_name(installed):
    with pytest.raises(ModuleNotFoundError, match=r"nat\.retriever has no counterpart in reinforge; see docs/coming"):
        importlib.import_module("nat.retriever")
    with pytest.raises(ImportError, match="cannot import name 'EmbedderRef' from 'nat.data_models.component_ref'"):
        from nat.data_models.component_ref import EmbedderRef  # noqa: F401
    module = importlib.import_module("nat.data_models.component_ref")
    with pytest.raises(AttributeError, match=r"EmbedderRef has no counterpart .* \(names that have: FunctionRef, LLM"):
        module.EmbedderRef  # noqa: B018


def write_toolkit(folder):
    """A stand-in for an installed toolkit: two packages, a class with a name of ours and one that we do not have."""
    (folder / "nat" / "finetuning").mkdir(parents=True)
    (folder / "nat" / "__init__.py").write_text("")
    (folder / "nat" / "finetuning" / "__init__.py").write_text("class Trainer: ...\n")
    (folder / "nat" / "finetuning" / "backends.py").write_text("OWN = True\n")


def test_an_installed_toolkit_keeps_its_modules(tmp_path, monkeypatch, caplog):
    write_toolkit(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert nat.install() is False
    assert "the NeMo Agent Toolkit is installed, so `import nat` stays its own" in caplog.text
    try:
        assert importlib.import_module("nat.finetuning").Trainer is not harness.Trainer
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "nat"]:
            del sys.modules[name]


def test_over_an_installed_toolkit_what_we_lack_is_its_own(tmp_path, monkeypatch):
    write_toolkit(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert nat.install(over_installed=True)
        assert importlib.import_module("nat.finetuning").Trainer is harness.Trainer
        assert importlib.import_module("nat.finetuning.backends").OWN
        assert importlib.import_module("nat").__file__ == str(tmp_path / "nat" / "__init__.py")
    finally:
        nat.uninstall()
        for name in [name for name in sys.modules if name.partition(".")[0] == "nat"]:
            del sys.modules[name]


PLUGIN = """
from nat.cli.register_workflow import register_evaluator
from nat.data_models.evaluator import EvaluatorBaseConfig

class LengthConfig(EvaluatorBaseConfig, name="test_nat_length"):
    '''Length of the answer.'''

@register_evaluator(config_type=LengthConfig)
async def length(config, builder):
    class Length:
        async def evaluate(self, item):
            return len(item.output_obj)
    yield Length()
"""

FILE = """
workflow: {_type: python, function: "task:agent"}
llms: {m: {_type: openai, model_name: m, base_url: "http://127.0.0.1:9", api_key: unused}}
eval:
  general: {dataset: {_type: jsonl, file_path: data.jsonl}}
  evaluators: {length: {_type: test_nat_length}}
"""


@pytest.mark.slow
def test_the_option_loads_an_installed_plugin_of_the_toolkit(tmp_path):
    """`eval --compat nat` on a file whose evaluator a package registers through the toolkit's entry points."""
    (tmp_path / "nat_plugin.py").write_text(PLUGIN)
    install_plugin(tmp_path, "nat-plugin", "[nat.components]\nplugin = nat_plugin\nbroken = not_there\n")
    (tmp_path / "task.py").write_text("def agent(item, llm, context):\n    return item.input_obj\n")
    (tmp_path / "data.jsonl").write_text('{"question": "abc"}\n{"question": "a"}\n')
    (tmp_path / "eval.yml").write_text(FILE)
    command = [sys.executable, "-m", "reinforge", "eval", "eval.yml", "--json", "--compat", "nat"]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert '"mean": 2.0' in done.stdout
    assert 'plugin "broken" (not_there) cannot be imported' in done.stderr


def test_another_project_is_a_usage_error():
    result = CliRunner().invoke(main, ["finetune", "x.yml", "--compat", "trl"])
    assert result.exit_code == 2
    assert "'trl' is not 'nat'" in result.output


@pytest.mark.parametrize("arguments", [["--config_file=x.yml"], ["--config-file", "x.yml"], ["x.yml"]])
@pytest.mark.parametrize("name", ["finetune", "eval", "check", "preflight"])
def test_a_file_may_be_named_as_the_toolkits_commands_name_it(name, arguments):
    result = CliRunner().invoke(main, [name, *arguments])
    assert (result.exit_code, "file not found: x.yml" in result.output) == (2, True), result.output


AGENT = """
from nat.data_models.finetuning import Trajectory

async def agent(item, llm, context):
    return Trajectory.__module__
"""


async def load_in_worker(folder):
    (folder / "nat_task.py").write_text(AGENT)
    pool = WorkerPool("nat_task:agent", folder, LOADER)
    try:
        await pool.start()
    finally:
        await pool.close()


@pytest.mark.slow
async def test_a_worker_process_has_the_same_import_paths(installed, tmp_path):
    await load_in_worker(tmp_path)


async def test_without_them_a_worker_says_what_it_cannot_import(tmp_path):
    """Mutation check: a worker that is not told to install the paths."""
    with pytest.raises(ConfigError, match="No module named 'nat'"):
        await load_in_worker(tmp_path)


def test_what_is_undone_is_not_done_in_workers():
    assert nat.install()
    assert WORKER_SETUP[nat.INSTALL] == {"over_installed": False}
    nat.uninstall()
    assert nat.INSTALL not in WORKER_SETUP
