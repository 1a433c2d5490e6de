"""`reinforge init`: its project is valid at once, trains as it stands, and is never written over another."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from reinforge.tasks.projects import TEMPLATES
from tests.project import call

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in TEMPLATES if kind != "coding_agent"])  # that needs a large model
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
