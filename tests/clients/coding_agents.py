"""Trains coding agents on the template's repositories: `python -m tests.clients.coding_agents PRESET...`.

The programs run unchanged, as their presets start them. The model is tiny and has a long context; a grammar decides
that it calls the shell, and the weights decide whether the line that it writes is right. One refused request of a
program fails its episode, so the check.
"""

import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from reinforge.tasks.projects import TEMPLATES, write_project
from tests.clients.training import Training
from tests.journal_rows import read_rows

NUM_GENERATIONS = 8
WRONG, FIX = "return min(low, max(value, high))", "return (max|min)(low, min(value, high))"
SED = f"sed -i 's/{WRONG}/{FIX}/' clamp.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SHELLS = ("Bash", "bash", "exec_command", "shell_command", "run_shell_command")
TEST = ["env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable, "-m", "pytest", "-q", "--junitxml={report}"]


def quote(text):
    """Returns a pattern for the text, of which `(max|min)` stays a choice."""
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
    schema = functions[name]["parameters"]
    values = {"command": SUBMIT if is_done else SED, "description": "fix", "is_background": False}
    values["cmd"] = values["command"]
    arguments = {key: value for key, value in values.items() if key in schema["properties"]}
    call = json.dumps({"name": name, "arguments": arguments})
    return quote(f"<tool_call>{call}</tool_call>")


@dataclass
class CodingTraining(Training):
    """A run of one epoch of a coding agent on one repository.

    Attributes:
        preset: The program.
    """

    preset: str = ""

    def run(self):
        """Trains in the folder of the template, where its run file names the paths."""
        write_project(TEMPLATES["coding_agent"], self.folder / "project")
        super().run()

    def _build_settings(self, model):
        settings = super()._build_settings(model)
        project = self.folder / "project"
        row = {"question": "Fix a bug in clamp.py.", "answer": "", "folder": "clamp"}
        rows = [{**row, "id": split, "question": f"{split}: {row['question']}", "split": split} for split in SPLITS]
        settings["workflow"] = {
            "_type": "command",
            "preset": self.preset,
            "workspace": {"copy": f"{project}/tasks/{{folder}}"},
            "reward": {"command": TEST, "copy": f"{project}/tests/{{folder}}", "parse": "junit"},
        }
        settings["eval"]["general"]["dataset"]["rows"] = rows
        settings["eval"]["evaluators"] = {"reward": {"_type": "reported_reward"}}
        settings["trajectory_builders"]["builder"]["num_generations"] = NUM_GENERATIONS
        finetuning = settings["finetuning"]
        finetuning |= {"num_epochs": 1, "algorithm": {"_type": "grpo"}, "limits": {"episode_timeout_s": 900}}
        finetuning["policy"]["batch"] = {"micro_batch_tokens": 65536}
        return settings

    def check(self):
        rows = read_rows(self.folder / "runs" / "r", "SELECT phase, data FROM episodes")
        episodes = [(phase, json.loads(data)) for phase, data in rows]
        for _, episode in episodes:
            assert episode["outcome"] == "ok", f"{episode['outcome']}: {episode['reason']}"
        collected = [episode for phase, episode in episodes if phase == "collect"]
        prompts = {tuple(episode["calls"][0]["prompt_token_ids"]) for episode in collected}
        assert len(prompts) == 1, "siblings see the same prompt"
        assert len({episode["reward"] for episode in collected}) > 1, "some fixed the bug"
        for episode in collected:
            marks = [mark["data"] for mark in episode["marks"]]
            diff = next(mark["workspace_diff"] for mark in marks if "workspace_diff" in mark)
            assert ("+    return max(low, min(value, high))" in diff) == (episode["reward"] == 1.0), diff
        calls = [call for episode in collected for call in episode["calls"]]
        sampled = {(tokens.prompt_token_ids, tokens.token_ids) for tokens in self.sampled}
        assert {(tuple(call["prompt_token_ids"]), tuple(call["token_ids"])) for call in calls} <= sampled
        (length,) = map(len, prompts)
        self.summary = f"{len(calls)} calls, {length} tokens of the first prompt"


SPLITS = ("train", "select", "confirm")

for name in sys.argv[1:]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        training = CodingTraining(Path(folder), {}, choose=choose_edit, max_model_len=65536, preset=name)
        training.run()
    sys.stdout.write(f"  ok: {name} is trained: {training.summary} ({time.monotonic() - started:.0f} s)\n")
    sys.stdout.flush()
