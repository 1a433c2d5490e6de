"""What `reinforge init` writes: formatted, tested by its own tests, and in step with the models that it names."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from reinforge.cli import COMMANDS
from reinforge.errors import ConfigError, StorageError
from reinforge.tasks import projects
from reinforge.tasks.help_desk import grammar
from reinforge.tasks.projects import SHARED, TEMPLATES, write_project
from reinforge.tasks.projects.command import KINDS
from reinforge.tasks.shop import questions
from reinforge.tasks.word_problems.agent import build_messages
from tests.doubles import ScriptedChat
from tests.episodes import make_context

LINT = ["check", "--select", "E,F,I,B,UP,SIM,PT"]


SLOW = "coding_agent"  # its tests run an agent and tests of theirs


@pytest.fixture(params=TEMPLATES)
def written(request, tmp_path):
    template = TEMPLATES[request.param]
    write_project(template, tmp_path / "my_project")
    return template, tmp_path / "my_project"


def load(path):
    spec = spec_from_file_location(f"project_{path.stem}", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(folder, *arguments):
    command = [sys.executable, "-m", *arguments]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the plugins of this machine load for a second
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_the_command_offers_every_template():
    assert tuple(TEMPLATES) == KINDS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == SLOW else ()) for name in TEMPLATES]
)
def test_a_project_passes_its_own_tests(tmp_path, name):
    folder = tmp_path / "my_project"
    write_project(TEMPLATES[name], folder)
    done = python(folder, "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.mark.slow
def test_a_project_is_formatted_and_linted(written):
    _, folder = written
    for arguments in (["format", "--check"], LINT):
        done = python(folder, "ruff", arguments[0], "--isolated", "--line-length", "120", *arguments[1:], ".")
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_of_the_readmes_table_is_there_and_named_commands_exist(written):
    template, folder = written
    texts = [path.read_text() for path in folder.rglob("*") if path.suffix in (".md", ".yml", ".py")]
    named = {command for text in [*texts, *template.commands] for command in re.findall(r"\breinforge ([a-z]+)", text)}
    prose = {"runs"}  # "reinforge runs the agent"
    assert named - prose <= set(COMMANDS)
    files = re.findall(r"^\| `([\w.]+)`", (folder / "README.md").read_text(), re.MULTILINE)
    assert template.data_file in files
    assert ("run.yml" in files) == (template.name != "replace")  # whose command writes its configuration
    assert [name for name in files if not (folder / name).is_file()] == []
    assert (folder / "README.md").read_text().startswith("# my_project\n")


def test_no_placeholder_is_left(written):
    _, folder = written
    assert [path for path in folder.rglob("*") if path.is_file() and "@NAME@" in path.read_text()] == []


def test_the_skill_is_what_coding_agents_read(written):
    """Front matter with a name, that of the folder, and a description of at most 1024 characters."""
    _, folder = written
    texts = {(folder / path).read_text() for path in SHARED["SKILL.md"]}
    assert len(texts) == 1
    _, front_matter, body = texts.pop().split("---\n", 2)
    front = yaml.safe_load(front_matter)
    assert set(front) == {"name", "description"}
    assert {path.split("/")[-2] for path in SHARED["SKILL.md"]} == {front["name"]}
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"])
    assert 0 < len(front["description"]) <= 1024
    assert "Use when" in front["description"]
    assert len(body.splitlines()) < 500


def test_the_rows_are_distinct_and_their_ids_too(written):
    template, folder = written
    rows = [json.loads(line) for line in (folder / template.data_file).read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) >= (8 if template.name == "coding_agent" else 300)
    if template.name in ("function", "tools"):
        assert len({row["question"] for row in rows}) == len(rows) == 1000


async def test_the_function_asks_its_tiny_model_what_it_was_trained_on(tmp_path):
    write_project(TEMPLATES["function"], tmp_path)
    llm = ScriptedChat("17")
    await load(tmp_path / "agent.py").agent(SimpleNamespace(input_obj="12 and 5?"), llm, make_context())
    assert llm.requests[0]["messages"] == build_messages("12 and 5?")


def test_the_tools_are_those_that_the_tiny_model_knows(tmp_path):
    write_project(TEMPLATES["tools"], tmp_path)
    tools, settings = load(tmp_path / "tools.py"), yaml.safe_load((tmp_path / "run.yml").read_text())
    assert tools.PRICES == questions.PRICES
    assert settings["workflow"]["system"] == questions.SYSTEM
    functions = [tool["function"] for tool in questions.TOOLS]
    assert settings["workflow"]["tools"] == [f"tools:{function['name']}" for function in functions]
    for function in functions:
        written = getattr(tools, function["name"])
        assert written.__doc__ == function["description"]
        assert list(written.__annotations__)[:-1] == list(function["parameters"]["properties"])


def test_the_rules_of_the_logs_are_those_that_the_thumbs_follow(tmp_path):
    write_project(TEMPLATES["logs"], tmp_path)
    reward = load(tmp_path / "reward.py")
    assert tuple(grammar.ITEMS) == reward.ITEMS
    for row in grammar.write_logs(200, seed=5):
        _, question, reply = (message["content"] for message in row["messages"])
        assert 3 - len(reward.list_broken_rules(question, reply)) == grammar.count_kept_rules(question, reply)


def test_nothing_is_overwritten_and_collisions_are_told_once(written):
    template, folder = written
    (folder / "README.md").write_text("mine")
    (folder / template.data_file).unlink()
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as refused:
        write_project(template, folder)
    assert {path: path.read_text() for path in folder.rglob("*") if path.is_file()} == before
    [problem] = refused.value.problems
    assert problem.path.endswith(f" (and {len(before) - 1} other files of the project)")
    assert problem.message == "exists, and init overwrites nothing"
    for path in before:
        path.unlink(missing_ok=path.name != "README.md")
    (folder / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match=rf"^{folder / 'README.md'}: exists, and init overwrites nothing"):
        write_project(template, folder)


def test_a_file_that_appears_in_the_meantime_is_kept_and_nothing_else_is_left(tmp_path, monkeypatch):
    """Without the look beforehand, as in a race: the file is not replaced, and what was written is removed again."""
    monkeypatch.setattr(projects, "_find_obstacle", lambda path, folder: None)
    (tmp_path / "reward.py").write_text("mine")
    with pytest.raises(StorageError, match=r"reward\.py"):
        write_project(TEMPLATES["function"], tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["reward.py"]
    assert (tmp_path / "reward.py").read_text() == "mine"


def test_a_project_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    template = replace(TEMPLATES["function"], data_file="z" * 300)
    with pytest.raises(StorageError):
        write_project(template, tmp_path / "deep" / "project")
    assert list(tmp_path.iterdir()) == []


def test_a_link_and_a_file_in_the_way_are_refused(tmp_path):
    (tmp_path / "run.yml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"run\.yml: exists"):
        write_project(TEMPLATES["function"], tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is not a folder"):
        write_project(TEMPLATES["function"], tmp_path / "file" / "project")


def test_the_wheel_holds_every_file_of_the_templates():
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    package = root / "src" / "reinforge"
    packed = {
        path for glob in settings["tool"]["setuptools"]["package-data"]["reinforge"] for path in package.glob(glob)
    }
    sources = {path for path in projects.HERE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert len(sources) > 15
    assert sources - packed == set()
