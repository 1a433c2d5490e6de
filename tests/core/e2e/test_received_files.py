"""A configuration that came from elsewhere: what it reaches is listed before any of its code runs."""

import json

import pytest

from reinforge.trainer.setup import reach
from tests.project import call


@pytest.fixture
def received(project, monkeypatch):
    """A project whose code would leave a mark when it is imported."""
    monkeypatch.setenv("JUDGE_KEY", "canary-key-1")
    judge = {"_type": "openai", "model_name": "m", "base_url": "https://judge.example/v1", "api_key": "${JUDGE_KEY}"}
    project.settings["llms"]["judge"] = judge
    project.settings["workflow"]["llm"] = "agent"
    project.write("task.py", (project.folder / "task.py").read_text() + "open('imported.txt', 'w').close()\n")
    project.write_files()
    return project


REACHED = [
    "  imports    workflow.function: task:agent (task.py)\n",
    "  imports    eval.evaluators.vowels.function: task:vowels (task.py)\n",
    "  variable   JUDGE_KEY in llms.judge.api_key, sent to https://judge.example/v1\n",
    "  host       https://judge.example/v1 (llms.judge)\n",
]


def test_check_lists_what_a_file_reaches_and_imports_nothing_on_request(received):
    result = call("check", "run.yml", "--no_import", code=0)
    assert result.output.startswith("".join(REACHED)), result.output
    assert "nothing was imported, and data and components were not checked" in result.output
    found = json.loads(call("check", "run.yml", "--no_import", "--json").output)
    assert (found["imported"], list(found["reach"]["hosts"])) == (False, ["https://judge.example/v1"])
    assert not (received.folder / "imported.txt").exists()
    assert "canary" not in result.output


def test_check_lists_first_and_imports_then(received):
    received.write("task.py", "raise RuntimeError('while it was imported')\n")
    result = call("check", "run.yml", code=2)
    assert result.output.index(REACHED[-1]) < result.output.index("while it was imported")
    received.write("task.py", "def agent(item, llm, context):\n    return ''\ndef vowels(o, e):\n    return 0\n")
    assert json.loads(call("check", "run.yml", "--json").output)["reach"]["imports"][0]["spec"] == "task:agent"


def test_a_listing_that_imports_runs_the_code(received, monkeypatch):
    """Mutation check: a module that is found by its import is imported, whatever the flag says."""
    import importlib.util
    from pathlib import Path

    def find(name, root):
        monkeypatch.syspath_prepend(str(root))
        return Path(importlib.import_module(name).__file__)

    monkeypatch.setattr(reach, "_find_module", find)
    call("check", "run.yml", "--no_import")
    assert (received.folder / "imported.txt").exists()


def test_no_import_and_sample_are_a_usage_error(received):
    result = call("check", "run.yml", "--no_import", "--sample", "1")
    assert (result.exit_code, "cannot be combined" in result.output) == (2, True)
