"""Trains coding agents on the template's repositories: `python -m tests.clients.coding_agents PRESET...`.

The programs run unchanged. A grammar decides that the tiny model calls the shell, and its weights whether the line that
it writes is right. One refused request of a program fails its episode, so the check. Those that have an MCP client
play an environment, too: a game of dice.
"""

import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from reinforge.rollout.workflows.presets import PRESETS
from reinforge.tasks.projects import TEMPLATES, write_project
from tests.clients.training import Training
from tests.journal_rows import read_rows

SPLITS = ("train", "select", "confirm")
WRONG, FIX = "return min(low, max(value, high))", "return (max|min)(low, min(value, high))"
SED, SUBMIT = f"sed -i 's/{WRONG}/{FIX}/' clamp.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SHELLS = ("Bash", "bash", "exec_command", "shell_command", "run_shell_command")
OVER = "The episode is over."
TEST = ["env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable, "-m", "pytest", "-q", "--junitxml={report}"]


def quote(text):
    return re.escape(text).replace(re.escape("(max|min)"), "(max|min)")


def choose_edit(request):
    """Returns what the model writes: a call of the shell in the first turn, then what ends the work."""
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools or ()}
    name = next((name for name in SHELLS if name in functions), None)
    is_done = any(message["role"] == "tool" for message in request.messages)
    if name is None and "SEARCH/REPLACE" not in str(request.messages) and "file listing" in str(request.messages):
        return quote(f"clamp.py\n```\ndef clamp(value, low, high):\n    {FIX}\n```\n")  # aider has no tools
    if name is None or (is_done and "COMPLETE_TASK_AND_SUBMIT" not in str(request.messages)):
        return "done"
    values = {**dict.fromkeys(("command", "cmd"), SUBMIT if is_done else SED), "is_background": False}
    arguments = {key: values[key] for key in values if key in functions[name]["parameters"]["properties"]}
    return quote(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")


def choose_number(request):
    """Returns what the model writes: a call of the environment's tool, until the episode is over."""
    names = [tool["function"]["name"] for tool in request.tools or ()]
    name = next((name for name in names if "environment" in name and name.endswith("act")), None)
    if name is None or OVER in str(request.messages[-1:]):
        return "done"
    return rf'<tool_call>\{{"name": "{name}", "arguments": \{{"text": "(six|one)"\}}\}}</tool_call>'


@dataclass
class CodingTraining(Training):
    """A run of one epoch of a coding agent on one repository."""

    preset: str = ""

    def _build_settings(self, model):
        settings = super()._build_settings(model)
        write_project(TEMPLATES["coding_agent"], project := self.folder / "project")
        row = {"answer": "", "folder": "clamp"}
        rows = [{**row, "id": each, "question": f"{each}: fix clamp.py", "split": each} for each in SPLITS]
        reward = {"command": TEST, "copy": f"{project}/tests/{{folder}}", "parse": "junit"}
        workspace = {"copy": f"{project}/tasks/{{folder}}"}
        settings["workflow"] = {"_type": "command", "preset": self.preset, "workspace": workspace, "reward": reward}
        settings["eval"]["general"]["dataset"]["rows"] = rows
        settings["eval"]["evaluators"] = {"reward": {"_type": "reported_reward"}}
        settings["trajectory_builders"]["builder"]["num_generations"] = 8
        finetuning = settings["finetuning"]
        finetuning |= {"num_epochs": 1, "algorithm": {"_type": "grpo"}, "limits": {"episode_timeout_s": 900}}
        finetuning["policy"]["batch"] = {"micro_batch_tokens": 65536}
        return settings

    def check(self):
        rows = read_rows(self.folder / "runs" / "r", "SELECT data FROM episodes")
        episodes = [json.loads(data) for (data,) in rows]
        for episode in episodes:
            assert episode["outcome"] == "ok", f"{episode['outcome']}: {episode['reason']}"
        collected = [episode for episode in episodes if episode["phase"] == "collect"]
        prompts = {tuple(episode["calls"][0]["prompt_token_ids"]) for episode in collected}
        assert len(prompts) == 1, "siblings see the same prompt"
        assert len({episode["reward"] for episode in collected}) > 1, "some fixed the bug"
        self.num_tokens = len(prompts.pop())


@dataclass
class PlayingTraining(CodingTraining):
    """A run of one epoch of a coding agent in an environment, which it reaches as an MCP server."""

    def _build_settings(self, model):
        settings = super()._build_settings(model)
        settings["environment"] = {"_type": "python", "source": "tests.environments.games:Dice"}
        settings["workflow"] = {"_type": "command", "preset": self.preset}
        for row in settings["eval"]["general"]["dataset"]["rows"]:
            row |= {"kind": "plain", "question": f"{row['id']}: play dice"}
        return settings

    def check(self):
        super().check()
        for (data,) in read_rows(self.folder / "runs" / "r", "SELECT data FROM episodes"):
            episode = json.loads(data)
            assert episode["reward"] == str([call["reply"] for call in episode["calls"]]).count("six"), "of three rolls"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        kinds = [(CodingTraining, choose_edit, "is trained")]
        kinds += [(PlayingTraining, choose_number, "plays")] if "environment" in PRESETS[name] else []
        for kind, choose, done in kinds:
            started = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                training = kind(Path(folder), {}, choose=choose, max_model_len=65536, preset=name)
                training.run()
            text = f"{name} {done}: {training.num_tokens} tokens before its first reply"
            sys.stdout.write(f"  ok: {text} ({time.monotonic() - started:.0f} s)\n")
