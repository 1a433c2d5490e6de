"""The small repositories of `coding_tasks.yml`, each with a bug for a coding agent, and their hidden tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


def read_tasks() -> dict[str, Any]:
    tasks: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))
    return tasks


def write_tasks() -> Iterable[Mapping[str, Any]]:
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
