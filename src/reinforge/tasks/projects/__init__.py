"""Projects to start from: `reinforge init` copies one of these folders and writes its data.

function/   word problems; the agent is a function that asks the model once, and every answer can be checked
tools/      questions at a shop's counter; the agent has two tools
coding_agent/  repositories with a bug each; a coding agent fixes them, and hidden tests are the reward
logs/       logged chats of a help desk with the customers' thumbs
replace/    recorded calls of a help desk to a large model, which a small one replaces
shared/     what every project has: .gitignore, and the instructions for coding agents

A file's name here ends in `.tmpl`, so that neither Python nor a linter takes it for a module of reinforge. `@NAME@` in
it stands for the name of the project.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reinforge.errors import ConfigError, Problem
from reinforge.files import storage_boundary
from reinforge.types.seeding import stable_random

HERE, ENDING = Path(__file__).parent, ".tmpl"
SHARED = {
    "gitignore": (".gitignore",),
    "SKILL.md": (".agents/skills/reinforge/SKILL.md", ".claude/skills/reinforge/SKILL.md"),
}
"""Files of `shared/` and their paths in a project; coding agents look for skills in either folder."""
NUM_ROWS = 1000
NUM_CHATS, NUM_CALLS = 300, 600

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProjectTemplate:
    name: str  # its folder here, and the value of `--template`
    description: str
    data_file: str
    write_rows: Callable[[], Iterable[Row]]
    commands: tuple[str, ...]  # what to run first, in the project's folder
    write_files: Callable[[], Mapping[str, str]] = dict  # returns further files of the project, by path

    def build_files(self, project_name: str) -> dict[str, str]:
        files = {
            path: (HERE / "shared" / f"{source}{ENDING}").read_text(encoding="utf-8")
            for source, paths in SHARED.items()
            for path in paths
        }
        for source in sorted((HERE / self.name).glob(f"*{ENDING}")):
            files[source.name.removesuffix(ENDING)] = source.read_text(encoding="utf-8")
        files = {path: text.replace("@NAME@", project_name) for path, text in files.items()}
        files |= self.write_files()
        files[self.data_file] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.write_rows())
        return dict(sorted(files.items()))


def write_word_problems() -> Iterable[Row]:
    """Yields word problems with small numbers, which the bundled model knows; none occurs twice."""
    from reinforge.tasks.word_problems.problems import WORDINGS, write_problem
    from reinforge.tasks.word_problems.starter import list_small_calculations

    rng, seen, calculations = stable_random(0, "init", "function"), set[str](), list_small_calculations()
    while len(seen) < NUM_ROWS:
        calculation = rng.choice(calculations)
        problem = write_problem(rng, calculation, WORDINGS)
        if problem not in seen:
            seen.add(problem)
            yield {"id": f"{len(seen):04}", "question": problem, "answer": str(calculation.result)}


def write_shop_questions() -> Iterable[Row]:
    """Yields questions about prices; none occurs twice."""
    from reinforge.tasks.shop.questions import ShopDataset, ShopDatasetConfig

    dataset = ShopDataset(ShopDatasetConfig(num_train=NUM_ROWS - 2, num_select=1, num_confirm=1))
    for number, row in enumerate(dataset.rows(), start=1):
        yield {"id": f"{number:04}", "question": row["question"], "answer": row["answer"]}


def write_chats() -> Iterable[Row]:
    from reinforge.tasks.help_desk.grammar import write_logs

    return write_logs(NUM_CHATS)


def write_recorded_calls() -> Iterable[Row]:
    from reinforge.tasks.help_desk.grammar import write_calls

    return write_calls(NUM_CALLS)


def read_tasks() -> dict[str, Any]:
    """Returns the small repositories, each with a bug for a coding agent and its hidden tests, by name."""
    tasks: dict[str, Any] = yaml.safe_load((HERE / "coding_tasks.yml").read_text(encoding="utf-8"))
    return tasks


def write_tasks() -> Iterable[Row]:
    for number, (name, task) in enumerate(read_tasks().items()):
        split = "train" if number < 6 else ("select", "confirm")[number - 6]
        yield {"id": name, "question": f"Fix a bug in {task['task']} Do not ask.", "folder": name, "split": split}


def write_repositories() -> dict[str, str]:
    """Returns the files of every repository, and of its tests, by path."""
    files = {}
    for name, task in read_tasks().items():
        function = task["code"].split("(")[0].removeprefix("def ")
        tests = "".join(f"\n\ndef test_{number}():\n    assert {text}\n" for number, text in enumerate(task["tests"]))
        files[f"tasks/{name}/{name}.py"] = task["code"]
        files[f"tests/{name}/test_{name}.py"] = f"from {name} import {function}\n{tests}"
    return files


RUN = ("reinforge check run.yml --sample 3", "reinforge preflight run.yml", "reinforge finetune run.yml")
IMPORT = "reinforge data import logs.jsonl --output rows.jsonl --rated"
REPLACE = "reinforge replace logs.jsonl --model bundled:help_desk --margin 0.1 --machine_price 0.2 --run_name small"
TEMPLATES = {
    template.name: template
    for template in (
        ProjectTemplate(
            "function", "an agent function whose answers can be checked (GRPO)", "data.jsonl", write_word_problems, RUN
        ),
        ProjectTemplate("tools", "an agent with two tools (GRPO)", "data.jsonl", write_shop_questions, RUN),
        ProjectTemplate(
            "coding_agent",
            "a coding agent in eight repositories with bugs, scored by hidden tests (GRPO)",
            "data.jsonl",
            write_tasks,
            ("reinforge check run.yml", *RUN[1:]),
            write_repositories,
        ),
        ProjectTemplate(
            "logs", "logged chats with thumbs up and down (KTO)", "logs.jsonl", write_chats, (IMPORT, *RUN[1:])
        ),
        ProjectTemplate(
            "replace",
            "recorded calls to a large model, which a small one replaces (SFT, router)",
            "logs.jsonl",
            write_recorded_calls,
            (REPLACE,),
        ),
    )
}


def write_project(template: ProjectTemplate, folder: Path) -> list[Path]:
    """Writes a project and returns its files; either all of them are written, or none.

    Raises:
        ConfigError: A file of the project exists.
        StorageError: Writing failed.
    """
    files = {folder / path: text for path, text in template.build_files(folder.resolve().name).items()}
    obstacles = {path: why for path in files if (why := _find_obstacle(path, folder)) is not None}
    problems = []
    for message, fix in dict.fromkeys(obstacles.values()):  # once, however many files it is about
        paths = [path for path, why in obstacles.items() if why == (message, fix)]
        more = f" (and {len(paths) - 1} other files of the project)" if len(paths) > 1 else ""
        problems.append(Problem(f"{paths[0]}{more}", message, fix))
    if problems:
        raise ConfigError(problems)
    written, made = list[Path](), list[Path]()
    try:
        for path, text in files.items():
            with storage_boundary(path, len(text.encode())):
                made += _make_folders(path.parent)
                with open(path, "x", encoding="utf-8") as file:
                    written.append(path)
                    file.write(text)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        for path in reversed(made):
            path.rmdir()
        raise
    return written


def _find_obstacle(path: Path, folder: Path) -> tuple[str, str] | None:
    if path.exists() or path.is_symlink():
        return "exists, and init overwrites nothing", "choose another NAME, or move what is there away"
    for parent in path.parents:
        if parent.is_dir():
            return None
        if parent.exists() or parent.is_symlink():
            return f"{parent} is not a folder", "choose another NAME"
    return None


def _make_folders(folder: Path) -> list[Path]:
    missing = [each for each in (folder, *folder.parents) if not each.exists()][::-1]
    for each in missing:
        each.mkdir()
    return missing
