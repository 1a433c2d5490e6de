"""A whole project in a folder: agent, data, model and YAML, as a user has them."""

import json
import sys
import textwrap

import yaml
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.runs.page import page
from reinforge.runs.page.elements import build

AGENT = """
from reinforge import PolicyFailure

async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
    return reply.choices[0].message.content
"""
VOWELS = """
def vowels(output, expected):
    return sum(letter in "aeiou" for letter in output) / max(1, len(output))
"""


def settings(model):
    return {
        "llms": {"agent": {"_type": "policy"}},
        "workflow": {"_type": "python", "function": "task:agent"},
        "eval": {
            "general": {"max_concurrency": 16, "dataset": {"_type": "jsonl", "file_path": "data.jsonl"}},
            "evaluators": {"vowels": {"_type": "python", "function": "task:vowels"}},
        },
        "trajectory_builders": {"builder": {"_type": "group", "num_generations": 8, "examples_per_epoch": 16}},
        "trainer_adapters": {"adapter": {"_type": "local"}},
        "trainers": {"trainer": {"_type": "epoch"}},
        "finetuning": {
            "enabled": True,
            "trainer": "trainer",
            "trajectory_builder": "builder",
            "trainer_adapter": "adapter",
            "reward_function": {"name": "vowels"},
            "num_epochs": 5,
            "output_dir": "runs",
            "policy": {"model": str(model), "optimizer": {"learning_rate": 3e-3}, "batch": {"steps_per_job": 4}},
            "curriculum_learning": {"min_reward_diff": 0.01},
            "device": "cpu",
        },
    }


def call(*arguments, code=None, **options):
    """Runs a command of ours in this process, which must end with the exit code if one is given."""
    result = CliRunner().invoke(main, list(arguments), **options)
    assert code in (None, result.exit_code), result.output
    return result


def leave_out_plots_and_pages(patch, *, plots=True, pages=True):
    """Lets runs draw no plot and write an empty page: each is a fifth of a short run."""
    if plots:
        patch.setitem(sys.modules, "matplotlib", None)
    if pages:
        patch.setattr(page, "read_content", lambda *arguments: None)
        patch.setattr(page, "build_page", lambda content: build("html"))


class Project:
    """A folder with everything that a run needs; change what you like, then `finetune`."""

    def __init__(self, folder, model):
        self.folder, self.model, self.settings = folder, model, settings(model)
        sys.modules.pop("task", None)  # each project has its own
        self.write_agent(AGENT)
        self.rows = [{"id": str(i), "question": f"say {i}", "answer": "a"} for i in range(64)]

    def write(self, name, text):
        (self.folder / name).write_text(textwrap.dedent(text))

    def write_agent(self, text):
        """Writes `task.py`: an agent, and the share of vowels as its reward."""
        self.write("task.py", textwrap.dedent(text) + VOWELS)

    def set(self, path, value):
        *above, last = path.split(".")
        block = self.settings
        for key in above:
            block = block.setdefault(key, {})
        block[last] = value
        return self

    def shrink(self, num_epochs=1):
        """Makes the run as short as one can be: four groups of four an epoch."""
        self.settings["trajectory_builders"]["builder"] |= {"num_generations": 4, "examples_per_epoch": 4}
        return self.set("finetuning.num_epochs", num_epochs)

    def learn(self):
        """Makes the model improve in three short epochs."""
        self.settings["trajectory_builders"]["builder"]["examples_per_epoch"] = 8
        return self.set("finetuning.num_epochs", 3).set("finetuning.policy.optimizer.learning_rate", 1e-2)

    def write_files(self):
        """Writes data and configuration; a `run.yml` that is there stays."""
        if self.rows is not None:
            self.write("data.jsonl", "".join(json.dumps(row) + "\n" for row in self.rows))
        if not (self.folder / "run.yml").exists():
            self.write("run.yml", yaml.dump(self.settings, Dumper=yaml.CSafeDumper, sort_keys=False))

    def save(self):
        """Writes data and configuration as they are now."""
        (self.folder / "run.yml").unlink(missing_ok=True)
        self.write_files()
        return self

    def finetune(self, *arguments, code=None):
        self.write_files()
        return call("finetune", "run.yml", "--run_name", "r", *arguments, code=code)

    @property
    def run(self):
        return self.folder / "runs" / "r"

    @property
    def summary(self):
        return json.loads((self.run / "summary.json").read_text())

    @property
    def history(self):
        return json.loads((self.run / "reward_history.json").read_text())

    @property
    def metrics(self):
        return [json.loads(line) for line in (self.run / "training_metrics.jsonl").read_text().splitlines()]
