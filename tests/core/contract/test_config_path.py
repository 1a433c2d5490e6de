"""A configuration passes through few functions between the command and the trainer's loop.

A function of ours is on its way if it
  reads it       is given all of it (text, plain data, document or model; as an argument or by `self`), or returns it,
                 until it is loaded
  changes it     sets something in the model afterwards
  hands it down  holds it and is on the call stack when the trainer is initialized

What only looks at the loaded configuration, such as the settings that a run prints, is beside the path. A lambda or a
comprehension is part of the function around it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from click.testing import CliRunner

import reinforge
from reinforge.cli import finetune
from reinforge.config.document import Document
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import Config, FinetuneConfig
from reinforge.trainer.loop import EpochTrainer
from reinforge.types.key_aliases import ConfigModel

MAX_FUNCTIONS = 20
MAX_FILES = 8
PACKAGE = str(Path(reinforge.__file__).parent)
LOADERS = ("load_config", "build_config")

FILE = """\
llms: {agent: {_type: policy}}
workflow: {_type: python, function: "task:agent", llm: agent}
eval:
  general: {dataset: {_type: jsonl, file_path: rows.jsonl}}
  evaluators: {score: {_type: exact_match}}
trajectory_builders: {builder: {_type: group, num_generations: 4}}
trainer_adapters: {adapter: {_type: local}}
trainers: {trainer: {_type: epoch}}
finetuning:
  enabled: true
  trainer: trainer
  trajectory_builder: builder
  trainer_adapter: adapter
  reward_function: {name: score}
  policy: {model: "${MODEL}"}
"""


class LoopReached(Exception):
    """The trainer got the configuration."""


class ConfigPath:
    def __init__(self) -> None:
        self.functions: dict[str, list[str]] = {}
        self.is_loaded = False

    def add(self, code: CodeType) -> None:
        name = code.co_qualname.partition(".<locals>.<")[0]
        known = self.functions.setdefault(code.co_filename.removeprefix(PACKAGE), [])
        if name not in known and not name.startswith("<"):
            known.append(name)

    def profile(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or self.is_loaded:
            return
        if event == "call":
            num_arguments = code.co_argcount + code.co_kwonlyargcount
            arguments = [frame.f_locals.get(name) for name in code.co_varnames[:num_arguments]]
            if any(map(is_held, arguments)):
                self.add(code)
        elif event == "return":
            if is_configuration(value):
                self.add(code)
            self.is_loaded = code.co_name in LOADERS


def is_configuration(value: Any) -> bool:
    if isinstance(value, Document | LoadedConfig | Config | FinetuneConfig):
        return True
    if isinstance(value, dict):
        return isinstance(value.get("finetuning"), dict | FinetuneConfig) and "llms" in value
    return isinstance(value, str | bytes) and "trajectory_builders:" in str(value)


def is_held(value: Any) -> bool:
    is_ours = type(value).__module__.partition(".")[0] == "reinforge"
    return is_configuration(value) or (is_ours and any(map(is_configuration, getattr(value, "__dict__", {}).values())))


@contextmanager
def follow(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConfigPath]:
    path = ConfigPath()

    def stop(trainer: EpochTrainer, config: FinetuneConfig) -> None:
        sys.setprofile(None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE) and any(map(is_held, frame.f_locals.values())):
                path.add(frame.f_code)
            frame = frame.f_back
        raise LoopReached

    def set_attribute(model: ConfigModel, name: str, value: Any) -> None:
        if path.is_loaded and isinstance(model, Config | FinetuneConfig):
            path.add(sys._getframe(1).f_code)
        super(ConfigModel, model).__setattr__(name, value)

    monkeypatch.setattr(EpochTrainer, "initialize", stop)
    monkeypatch.setattr(ConfigModel, "__setattr__", set_attribute, raising=False)
    sys.setprofile(path.profile)
    try:
        yield path
    finally:
        sys.setprofile(None)


def check(path: ConfigPath) -> None:
    listed = json.dumps(path.functions, indent=1)
    assert sum(map(len, path.functions.values())) <= MAX_FUNCTIONS, listed
    assert len(path.functions) <= MAX_FILES, listed


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "task", raising=False)  # another test's project may have one of this name
    monkeypatch.setenv("MODEL", str(tiny_model_dir))
    Path("run.yml").write_text(FILE)
    Path("task.py").write_text("async def agent(item, llm, context):\n    return ''\n")
    rows = [{"id": str(number), "question": f"{number} + 1?", "answer": str(number + 1)} for number in range(40)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def test_the_way_from_the_command_to_the_loop_is_short(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with follow(monkeypatch) as path:
        result = CliRunner().invoke(finetune.command, ["run.yml"])
    assert "LoopReached" in result.output
    check(path)


def test_the_way_from_python_to_the_loop_is_short(
    project: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
) -> None:
    async def agent(item: Any, llm: Any, context: Any) -> str:
        return ""

    with follow(monkeypatch) as path, pytest.raises(LoopReached):
        reinforge.finetune(agent, "rows.jsonl", "exact_match", tiny_model_dir, epochs=1)
    check(path)
