"""The command line as a process: signals, the example script, the wheel."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_retries_are_not_logged_line_by_line(project):
    project.settings["llms"] = {"agent": {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9/v1"}}
    project.set("llms.agent.max_retries", 1)
    project.settings["finetuning"] = {"enabled": False, "outcomes": {"retries": 0}}
    project.finetune("--dataset", "nowhere.jsonl")  # rejected, but it writes the files
    command = [sys.executable, "-m", "reinforge", "eval", "run.yml", "--limit", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "(2 attempts)" in done.stderr
    assert "stamina" not in done.stderr


def test_the_readme_shows_the_program_of_the_example():
    """Its agent, its reward and the arguments of its call."""

    def read_parts(source):
        tree = ast.parse(source)
        functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        bodies = {name: [ast.dump(n) for n in f.body if not isinstance(n, ast.Expr)] for name, f in functions.items()}
        (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "reinforge.finetune"]
        return bodies, [ast.unparse(keyword) for keyword in call.keywords], [ast.unparse(a).lower() for a in call.args]

    (shown,) = [part for part in (ROOT / "README.md").read_text().split("```python\n") if "finetune(" in part[:2000]][
        -1:
    ]
    assert read_parts(shown.partition("```")[0]) == read_parts((ROOT / "examples" / "own_task.py").read_text())


@pytest.mark.fault
@pytest.mark.parametrize("seed", range(3))
def test_the_own_task_example_improves_the_agent_on_every_seed(tmp_path, seed):
    """The README's own program: 729 questions, 182 of them for the verdict; about half a minute a seed."""
    source = (ROOT / "examples" / "own_task.py").read_text()
    assert len(source.splitlines()) <= 30
    script = tmp_path / "own_task.py"
    script.write_text(source.replace("MODEL, epochs", f'MODEL, settings={{"seed": {seed}}}, epochs'))
    out = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert " improved the agent\n" in out.stdout
    (folder,) = (tmp_path / ".reinforge" / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["promoted"], summary["confirm_tuned"]["num_examples"]) == (True, 182)
    assert summary["improvement"]["ci_low"] > 0.1


@pytest.mark.slow
def test_the_wheel_runs_the_demo_in_an_empty_environment(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    for requirement in (os.environ.get("TORCH", "torch==2.13.0"), f"reinforge[train] @ file://{wheel}"):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", requirement], check=True)
    env = {**os.environ, "REINFORGE_HOME": str(tmp_path / "home")}
    command = [str(python), "-m", "reinforge", "demo", "-o", "finetuning.num_epochs", "2", "--run_name", "wheel"]
    out = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "before (" in out.stdout
    assert "after (" in out.stdout
