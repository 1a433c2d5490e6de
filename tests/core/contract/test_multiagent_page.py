"""The examples of docs/multiagent.md: its team and its protocol are written to files and trained."""

import importlib
import json
import re
import subprocess
import sys

import pytest
import yaml

from reinforge.registry import REGISTRY
from reinforge.runs.episodes import read_outputs
from tests.generated import DOCS

PAGE = (DOCS / "multiagent.md").read_text(encoding="utf-8")
MAX_LINES = 35
SMALL = {
    "trajectory_builders.views.examples_per_epoch": 4,
    "finetuning.curriculum_learning.min_reward_diff": 0.01,
    "finetuning.policy.optimizer.learning_rate": 1e-3,
    "finetuning.device": "cpu",
}
"""Settings that shorten the run to seconds."""


def block(name):
    """Returns the code block whose first line is a comment with the file's name."""
    (found,) = re.findall(rf"^```\w+\n(# {re.escape(name)}\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture
def team(project):
    """The page's team written to files, with the tiny model."""
    model = project.settings["finetuning"]["policy"]["model"]
    project.write("scores.py", block("scores.py"))
    subprocess.run([sys.executable, "scores.py"], cwd=project.folder, check=True)
    for name in ("scores", "telephone"):
        sys.modules.pop(name, None)
    assert len((project.folder / "words.jsonl").read_text().splitlines()) == 36
    project.rows, project.settings = None, yaml.safe_load(block("team.yml"))
    project.set("finetuning.policy.model", model)
    for path, value in SMALL.items():
        project.set(path, value)
    return project


@pytest.mark.slow
def test_the_team_of_the_page_trains(team, capsys):
    team.write("team.yml", yaml.safe_dump(team.settings))
    (code,) = (code for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if "run_config(load" in code)
    exec(compile(code, "docs/multiagent.md", "exec"), {})  # the page is ours
    assert "runs/team" in capsys.readouterr().out
    summary = json.loads((team.folder / "runs" / "team" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert len(summary["policy_versions"]) >= 2, "something was trained"
    for output in read_outputs(team.folder / "runs" / "team", "confirm_tuned").values():
        assert [m["agent"] for m in output["messages"]] == ["planner", "worker", "critic", "worker"]
        (branch,) = output["branches"]
        score = branch["rewards"]["worker"]
        assert branch["rewards"] == {"planner": score, "worker": score, "critic": score / 2}
        assert branch["answer"] == output["messages"][-1]["text"]


@pytest.mark.slow
def test_the_protocol_of_the_page_trains(team):
    code = block("telephone.py")
    written = code[code.index("class TelephoneConfig") :]
    assert sum(map(bool, map(str.strip, written.splitlines()))) <= MAX_LINES, "a new protocol is short"
    team.write("telephone.py", code)
    sys.path.insert(0, str(team.folder))
    importlib.invalidate_caches()
    importlib.import_module("telephone")
    for section, change in yaml.safe_load(block("telephone.yml")).items():
        if section == "workflow":
            team.settings["workflow"] = change
        else:
            for key, value in change.items():
                team.set(f"{section}.{key}", value)
    result = team.finetune()
    assert result.exit_code == 0, result.output
    assert len(team.summary["policy_versions"]) >= 2, "something was trained"


def test_every_protocol_of_the_page_is_registered():
    named = re.findall(r"^\| `(\w+)` \| [^|]* \| [^|]*\|$", PAGE, re.MULTILINE)
    ours = {c.name for c in REGISTRY.components("workflow") if c.origin.startswith("reinforge.multiagent.protocols")}
    assert set(named) & ours == ours


def test_every_protocol_names_its_paper():
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| \[(\d{4}\.\d{5})\]", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for protocol, paper in rows:
        said = importlib.import_module(f"reinforge.multiagent.protocols.{protocol}").__doc__
        assert f"arXiv:{paper}" in said
        assert "Differs from the paper" in said


@pytest.mark.slow
def test_the_teams_agents_may_be_trained_apart(team):
    """The planner and the critic share an adapter, the worker has its own; one group per agent and example."""
    entries = {"talkers": {"_type": "policy", "adapter": "talkers"}, "doers": {"_type": "policy", "adapter": "doers"}}
    team.set("llms", entries).set("finetuning.policy.lora", {"r": 4}).set("finetuning.num_epochs", 1)
    for agent, entry in (("planner", "talkers"), ("critic", "talkers"), ("worker", "doers")):
        team.set(f"workflow.agents.{agent}.llm", entry)
    result = team.finetune()
    assert result.exit_code == 0, result.output
    assert "talkers: talkers; doers: doers" in result.output
    (row,) = (json.loads(line) for line in (team.run / "training_metrics.jsonl").read_text().splitlines())
    assert row["num_groups"] == 3 * 4
    assert min(row["groups"][name]["num_updates"] for name in entries) > 0
    assert all((team.run / "checkpoints/step-000001" / name / "adapter_config.json").is_file() for name in entries)
