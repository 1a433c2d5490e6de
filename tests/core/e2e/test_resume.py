"""Resuming a run from the command line: which one, with which settings, and what it prints."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from reinforge.trainer import provenance, resume
from tests.core.e2e.test_user_components import EngineAdapterConfig, ReorderedConfig  # noqa: F401  registers them
from tests.fault.kit import KILLED, Child
from tests.journal_rows import read_rows
from tests.project import call


def killed_at(project, site, *arguments):
    """Runs the project in its own process until it kills itself at a crash point."""
    project.save()
    child = Child(project.folder, ["run.yml", "--run_name", "r", *arguments], site)
    assert child.wait() == KILLED, child.said


def jobs(project):
    return read_rows(project.run, "SELECT epoch, status FROM jobs ORDER BY epoch")


def held(project):
    files = [path for path in project.run.rglob("*") if path.is_file() and path.suffix not in (".log", ".json")]
    return {str(path): path.read_bytes() for path in files if "run.sqlite" not in path.name}


@pytest.mark.slow
def test_a_killed_run_resumes_by_name_and_says_from_where(project):
    project.set("finetuning.num_epochs", 3)
    killed_at(project, "batch.sealed:2")
    result = call("finetune", "--resume", "r", "-o", "finetuning.output_dir", "runs", code=0)
    assert "resuming after epoch 0 from checkpoints/step-000001" in result.output
    assert jobs(project) == [(0, "completed"), (1, "completed"), (2, "completed")]
    metrics = [json.loads(line)["epoch"] for line in (project.run / "training_metrics.jsonl").read_text().splitlines()]
    assert metrics == [0, 1, 2]
    assert [row["version"] for row in project.summary["policy_versions"]] == [0, 1, 2, 3]
    assert "--resume last" not in result.output
    again = call("finetune", "run.yml", "--resume", "last")
    assert (again.exit_code, "improvement" in again.output) == (0, True), "a completed run prints its summary again"


@pytest.fixture
def composed(project, tiny_model_dir):
    shutil.copytree(tiny_model_dir, project.folder / "tiny")
    project.write("template.jinja", (tiny_model_dir / "chat_template.jinja").read_text())
    project.write("schema.json", '{"type": "string"}')
    project.write("helper.py", "MAX_TOKENS = 4\n")
    project.write("late.py", "def change(text):\n    return text\n")
    task = (project.folder / "task.py").read_text().replace("max_tokens=4", "max_tokens=MAX_TOKENS")
    task = task.replace("    return reply", "    from late import change\n    return change('') + reply")
    project.write("task.py", "from helper import MAX_TOKENS\n" + task)
    project.set("finetuning.policy.model", "./tiny").set("finetuning.policy.chat_template", "template.jinja")
    project.set("eval.evaluators.valid", {"_type": "json_schema", "schema": "schema.json"})
    project.shrink(2)
    for name in ("helper", "late"):
        sys.modules.pop(name, None)
    killed_at(project, "batch.sealed:2")
    return project


def test_changed_code_files_model_and_versions_are_refused_by_name(composed, monkeypatch):
    before = held(composed)
    changes = {
        "task.py": b"\n# another agent\n",
        "helper.py": b"MAX_TOKENS = 5\n",
        "late.py": b"# imported when the agent runs\n",
        "schema.json": b"  ",
        "template.jinja": b"!",
        "tiny/tokenizer.json": b"\n",
        "tiny/config.json": b"\n",
        "tiny/model.safetensors": None,
    }
    contents = {composed.folder / name: (composed.folder / name).read_bytes() for name in changes}
    for (path, content), added in zip(contents.items(), changes.values(), strict=True):
        path.write_bytes(content + added if added else content[:-1] + bytes([content[-1] ^ 1]))
    result = call("finetune", "--resume", "runs/r", code=2)
    assert [name for name in changes if f"\n    {name} changed" not in result.output] == [], result.output
    assert "r has changed since it started:" in result.output
    assert "undo the changes to resume it unchanged, or pass --allow_config_change" in result.output
    for path, content in contents.items():
        path.write_bytes(content)
    find_version = provenance.find_version
    newer = dict.fromkeys(("torch", "transformers", "tokenizers", "numpy"), "99.0")
    with monkeypatch.context() as upgraded:
        upgraded.setattr(provenance, "find_version", lambda name: newer.get(name) or find_version(name))
        result = call("finetune", "--resume", "runs/r", code=2)
    for name in newer:
        assert f"\n    {name} {find_version(name)} -> 99.0" in result.output
    assert held(composed) == before, "a refusal changes nothing"
    (composed.folder / "helper.py").unlink()
    composed.write("task.py", (composed.folder / "task.py").read_text().replace("from helper import", "#"))
    result = call("finetune", "--resume", "runs/r")
    assert (result.exit_code, "helper.py is gone" in result.output) == (2, True), result.output


@pytest.fixture
def received(project, tmp_path, monkeypatch):
    """A stopped run that stands in another folder than the one that it was made in; its code leaves a mark."""
    project.write("task.py", (project.folder / "task.py").read_text() + "open('imported.txt', 'w').close()\n")
    project.shrink()
    killed_at(project, "batch.sealed:1")
    (project.folder / "imported.txt").unlink()
    sys.modules.pop("task", None)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(project.run, elsewhere / "runs" / "r")
    monkeypatch.chdir(elsewhere)
    return elsewhere


def test_a_run_that_was_not_made_here_imports_nothing_until_its_project_is_named(received, project):
    result = call("finetune", "--resume", "runs/r", code=2)
    assert "runs/r was not started here by you" in result.output
    assert f"Resuming it imports Python files from {project.folder}:" in result.output
    assert "imports: workflow.function: task:agent (task.py)" in result.output
    assert "--project_root FOLDER" in result.output
    assert not list(received.rglob("imported.txt"))
    result = call("finetune", "--resume", "runs/r", "--project_root", "~nobody/nowhere")
    assert (result.exit_code, "--project_root: there is no folder" in result.output) == (2, True), result.output
    shutil.copy(project.folder / "data.jsonl", received)
    result = call("finetune", "--resume", "runs/r", "--project_root", str(project.folder), code=0)
    assert (received / "imported.txt").exists()


@pytest.mark.slow
def test_without_the_seal_a_received_run_imports_what_it_names(received, monkeypatch):
    """Mutation check: the code runs before anything is asked, and the run ends on what it did not find."""
    monkeypatch.setattr(resume, "is_own_run", lambda folder, project_root, seal: True)
    result = call("finetune", "--resume", "runs/r")
    assert "was not started here" not in result.output
    assert (received / "imported.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.yml", "--resume", "r", "--project_root", "."], "--project_root requires --resume without FILE"),
        (["--resume", "r"], 'there is no run "r"'),
        (["--resume", "last"], 'there is no run "last"'),
        (["run.yml", "--resume", "last", "--smoke"], "cannot be combined with --smoke, --dry_run or --run_name"),
        (["run.yml", "--allow_config_change"], "--allow_config_change requires --resume"),
        (["--more", "2", "run.yml", "--resume", "r"], "--more requires --resume without FILE"),
        (["--more", "2", "run.yml"], "--more requires --resume without FILE"),
    ],
)
def test_what_cannot_be_resumed_is_refused(project, arguments, said):
    project.write("run.yml", yaml.safe_dump(project.settings))
    result = call("finetune", *arguments)
    assert (result.exit_code, said in result.output) == (2, True), result.output


@pytest.mark.slow
def test_the_work_of_a_users_trainer_is_repeated_as_a_whole(project):
    """Its jobs are one opaque stage: after a kill in the second, both are trained again, from the base."""
    project.set("trainers.trainer", {"_type": "test_reordered"}).set("finetuning.num_epochs", 2)
    project.write("plugin.py", "import tests.core.e2e.test_user_components\n")
    task = (project.folder / "task.py").read_text()
    project.write("task.py", "import tests.core.e2e.test_user_components\n" + task)
    root = Path(__file__).parents[3]
    project.write("go.py", "import tests.core.e2e.test_user_components\nfrom reinforge.cli import main\nmain()\n")
    project.finetune("--dataset", "nowhere.jsonl")  # fails, but writes the files
    env = {**os.environ, "REINFORGE_CRASH_AT": "step.after_optim:6", "PYTHONPATH": f"{root}:{root}/src"}
    command = [sys.executable, "go.py", "finetune", "run.yml", "--run_name", "r"]
    assert subprocess.run(command, env=env, capture_output=True).returncode == -9
    result = call("finetune", "--resume", "runs/r", code=0)
    assert "resuming at epoch 0" in result.output
    assert project.summary["policy_versions"][1]["num_updates"] == 8, "two jobs of four steps"
    keys = read_rows(project.run, "SELECT count(*), count(DISTINCT key) FROM episodes WHERE phase = 'collect'")
    assert keys == [(256, 256)]


@pytest.mark.slow
def test_a_run_whose_backend_lost_the_weights_is_not_resumed(project, monkeypatch):
    """An adapter in this process without checkpoints: the base would be served as if it were trained."""

    async def no(self, folder, version):
        return False

    from tests.core.e2e.test_user_components import EngineAdapter

    monkeypatch.setattr(EngineAdapter, "save", no)
    project.set("trainer_adapters.adapter", {"_type": "test_engine_adapter"}).shrink(3)
    result = project.finetune("--max_tokens", "130", code=5)
    result = call("finetune", "--resume", "runs/r", code=2)
    assert "no longer serves version 1 of r, and no checkpoint has it" in result.output
