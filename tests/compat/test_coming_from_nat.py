"""docs/coming-from-nat.md: every block runs as it is printed."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from reinforge.finetuning import TrajectoryBuilder
from tests.compat.nat_sources import install_plugin
from tests.generated import DOCS
from tests.scripted_run import ScriptedRun

PAGE = (DOCS / "coming-from-nat.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

FILE = """
llms: {m: {_type: openai, model_name: m, base_url: "http://127.0.0.1:9", api_key: unused}}
workflow: {_type: answer, llm_name: m}
eval:
  general: {dataset: {_type: jsonl, file_path: data.jsonl}}
  evaluators: {length: {_type: answer_length}}
"""


def execute(name):
    names = {"__name__": name.removesuffix(".py")}
    exec(compile(BLOCKS[name], f"docs/coming-from-nat.md {name}", "exec"), names)  # the page is ours
    return names


def test_every_block_is_run():
    assert set(BLOCKS) == {"import_lines.py", "unchanged.py", "agent.py", "evaluator.py", "own_test.py"}
    assert PAGE.count("```") == 2 * (len(BLOCKS) + len(COMMANDS)), "a block has no name"


@pytest.mark.slow
def test_a_block_runs_by_itself():
    """The one with the toolkit's paths in a process of its own, which it changes."""
    for name in ("import_lines.py", "own_test.py"):
        assert execute(name)["TrajectoryBuilder"] is TrajectoryBuilder
    code = "import reinforge.finetuning as ours\nassert TrajectoryBuilder is ours.TrajectoryBuilder\n"
    command = [sys.executable, "-c", BLOCKS["unchanged.py"] + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_agent_and_evaluator_of_the_page_train(tmp_path):
    """Replies are 1 to 7 letters long, so the rewards differ."""
    execute("agent.py")
    execute("evaluator.py")
    run = ScriptedRun(tmp_path, script=lambda request: "a" * (1 + request.sampling.seed % 7))
    run.settings["workflow"] = {"_type": "answer", "llm_name": "agent"}
    run.settings["eval"]["evaluators"] = {"reward": {"_type": "answer_length"}}
    await run.run()
    rewards = [t.reward for job in run.adapter.jobs for group in job.trajectories for t in group]
    assert len(run.adapter.jobs) == 2
    assert set(rewards) <= set(range(1, 8))
    assert len(set(rewards)) > 1


@pytest.mark.slow
def test_the_commands_of_the_page_take_the_option(tmp_path):
    """The agent and the evaluator come from a package that registers them for the toolkit."""
    (tmp_path / "nat_page.py").write_text(f"{BLOCKS['agent.py']}\n{BLOCKS['evaluator.py']}")
    install_plugin(tmp_path, "nat-page", "[nat.components]\npage = nat_page\n")
    (tmp_path / "data.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "run.yml").write_text(FILE)
    [block] = COMMANDS
    lines = block.splitlines()
    assert [line.split()[1] for line in lines] == ["check", "finetune"]
    for line in lines:
        command = [sys.executable, "-m", *shlex.split(line), "--json"]
        environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin", "HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        answer = json.loads(done.stdout.splitlines()[-1])
        assert [problem["path"] for problem in answer["problems"]] == ["finetuning.enabled"], "the types are known"
