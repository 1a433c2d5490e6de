"""What a newcomer meets before the first run: missing packages, an ambiguous model, an output folder of no use."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from reinforge.tasks.projects import TEMPLATES
from tests.project import call

WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "safetensors", "tokenizers"):
    sys.modules[name] = None  # Python's own way to make an import fail
"""
CALL = """
from reinforge.cli import main
for arguments in {calls}:
    print("$", *arguments, file=sys.stderr)
    try:
        main(arguments, prog_name="reinforge")
    except SystemExit as ended:
        print("exit code", ended.code, file=sys.stderr)
"""
INSTALL = "fix: pip install torch==2.13.0, then pip install"


@pytest.fixture
def written(project):
    return project.save()


def run_without_torch(calls):
    """Returns what each command wrote to stderr, in a process in which torch cannot be imported."""
    code = WITHOUT_TORCH + CALL.format(calls=calls)
    environment = {"REINFORGE_HOME": "home", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stderr.split("$ ")[1:]


def test_without_torch_every_command_names_the_packages_and_leaves_nothing_behind(written):
    """A folder of a model, the bundled starter that would be trained first, and a model to chat with."""
    model = written.settings["finetuning"]["policy"]["model"]
    calls = [
        ["check", "run.yml"],
        ["finetune", "run.yml", "--run_name", "r"],
        ["finetune", "run.yml", "--run_name", "r", "-o", "finetuning.policy.model", "bundled:tic_tac_toe"],
        ["eval", "run.yml"],
        ["chat", model],
        ["demo", "--run_name", "r"],
    ]
    for output in run_without_torch(calls):
        assert "needs torch, transformers, safetensors, tokenizers, which are not installed" in output, output
        assert INSTALL in output
        assert output.rstrip().endswith("exit code 2")
        assert "bug in reinforge" not in output
        assert "Traceback" not in output
    assert not [path for name in ("runs", ".reinforge", "home") for path in (written.folder / name).rglob("*")]


@pytest.fixture
def judged(written):
    """The project with a second entry in `llms`, which no agent calls."""
    judge = {"_type": "openai", "model_name": "judge", "base_url": "http://127.0.0.1:9/v1", "api_key": "none"}
    written.settings["llms"]["judge"] = judge
    written.shrink().save()
    return written


@pytest.mark.slow
def test_the_agent_is_given_the_model_that_is_trained_where_a_judge_is_configured_too(judged):
    call("check", "run.yml", code=0)
    call("finetune", "run.yml", "--run_name", "r", code=0)
    assert judged.summary["policy_versions"][-1]["num_updates"] > 0


@pytest.fixture
def two_policies(written):
    """Two trained models, and an agent that names neither."""
    written.settings["llms"] = {name: {"_type": "policy", "adapter": name} for name in ("planner", "worker")}
    written.set("finetuning.policy.lora", {}).save()
    return written


AMBIGUOUS = "workflow.llm: not set, but llms has 2 entries (planner, worker), 2 of them trained"


@pytest.mark.parametrize("command", [["check"], ["finetune", "--run_name", "r"], ["finetune", "--dry_run"], ["eval"]])
def test_check_and_run_refuse_a_choice_between_two_models_alike(two_policies, command):
    result = call(command[0], "run.yml", *command[1:])
    assert (result.exit_code, AMBIGUOUS in result.output) == (2, True), result.output
    assert "run.yml:" in result.output.split(AMBIGUOUS)[0]
    assert not (two_policies.folder / "runs").exists()


def test_check_reports_an_output_folder_that_no_run_could_use(written):
    written.set("finetuning.output_dir", "data.jsonl/runs").save()
    result = call("check", "run.yml", code=2)
    line = 1 + (written.folder / "run.yml").read_text().splitlines().index("  output_dir: data.jsonl/runs")
    assert f"run.yml:{line}:3 finetuning.output_dir: cannot make a run folder in data.jsonl/runs: " in result.output
    assert "fix: choose a folder that you can write to: -o finetuning.output_dir FOLDER" in result.output


MODULES = ("agent", "reward", "tools")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in; the modules of a project are imported anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in MODULES:
        sys.modules.pop(name, None)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", ["function", "tools"])
def test_a_new_project_is_valid(folder, kind, monkeypatch):
    result = call("init", "mine", "--template", kind, code=0)
    assert "  cd mine && reinforge check run.yml --sample 3\n" in result.output
    monkeypatch.chdir("mine")
    checked = call("check", "run.yml", "--sample", "3", code=0)
    for expected in ("600 train, 150 select, 250 confirm", "expected answer 1, empty answer 0", "run.yml is valid"):
        assert expected in checked.output
    assert not Path(".reinforge").exists()


def test_without_a_name_the_project_is_written_here(folder):
    result = call("init", "--json")
    written = json.loads(result.output)
    assert written["folder"] == str(folder)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == written["files"]
    assert written["next"] == list(TEMPLATES["function"].commands)


def test_a_name_with_spaces_is_quoted_in_the_next_command(folder):
    assert "  cd 'my agent' && reinforge check" in call("init", "my agent").output


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind == "logs" else pytest.mark.fault)
        for kind in TEMPLATES
        if kind != "coding_agent"  # that needs a large model
    ],
)
def test_a_new_project_trains_as_it_stands(folder, kind):
    """The commands that init prints, in a shell, offline: the model is promoted and the page is written."""
    printed = json.loads(call("init", "mine", "--template", kind, "--json").output)["next"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in printed:
        command = command if command.startswith("cd ") else f"cd mine && {command}"
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.quote(command)}\n{done.stdout}{done.stderr}"
    [run] = (folder / "mine" / ".reinforge" / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["promoted"], summary["improvement"]
    assert (run / "report.html").is_file()
