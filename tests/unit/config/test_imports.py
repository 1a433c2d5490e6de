"""Objects that a configuration names: those of the project, and nothing else that is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reinforge.config.imports import import_object
from reinforge.errors import ConfigError


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "rfg_agent.py").write_text(
        "import os\nfrom rfg_pack import tools\ndef agent(): return tools.answer()\n"
        "class Box:\n  @staticmethod\n  def f(): return 1\n"
    )
    (tmp_path / "rfg_pack").mkdir()
    (tmp_path / "rfg_pack" / "__init__.py").write_text("")
    (tmp_path / "rfg_pack" / "tools.py").write_text("def answer(): return 42\n")
    (tmp_path / "rfg_broken.py").write_text("1/0\n")
    (tmp_path / "rfg_needs.py").write_text("import rfg_nowhere\n")
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "rfg_foreign.py").write_text("def f(): raise AssertionError\n")
    before = list(sys.path)
    yield tmp_path
    assert sys.path[: len(before)] == before, "projects come last, so that they hide nothing"
    sys.path[:] = before
    for name in [name for name in sys.modules if name.startswith("rfg_")]:
        del sys.modules[name]


def rejected(spec: str, project: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        import_object(spec, project, path="workflow.function")
    assert caught.value.problems[0].path == "workflow.function"
    return str(caught.value)


def test_objects_of_the_project_are_imported(project: Path) -> None:
    assert import_object("rfg_agent:agent", project)() == 42
    assert import_object("rfg_pack.tools:answer", project)() == 42
    assert import_object("rfg_agent:Box.f", project)() == 1


def test_reinforge_itself_is_allowed(project: Path) -> None:
    assert import_object("reinforge.errors:ConfigError", project) is ConfigError


@pytest.mark.parametrize("spec", ["os:system", "subprocess:run", "builtins:eval", "yaml:load", "sys:exit"])
def test_installed_packages_are_not_allowed(project: Path, spec: str) -> None:
    assert f'"{spec}" is not allowed: {spec.split(":")[0]} is not part of the project' in rejected(spec, project)


def test_python_in_the_project_folder_is_not_part_of_the_project(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is not allowed" in rejected("os:system", Path("/"))
    monkeypatch.syspath_prepend(str(project / ".venv" / "lib" / "site-packages"))
    assert "is not allowed" in rejected("rfg_foreign:f", project)
    assert "rfg_foreign" not in sys.modules


def test_a_path_through_another_module_is_rejected(project: Path) -> None:
    assert "reaches into the module os" in rejected("rfg_agent:os.system", project)


def test_a_missing_name_suggests_the_nearest(project: Path) -> None:
    assert 'no module "rfg_agnt", did you mean "rfg_agent"?' in rejected("rfg_agnt:agent", project)
    assert 'no module "rfg_pack.tool", did you mean "rfg_pack.tools"?' in rejected("rfg_pack.tool:answer", project)
    assert 'rfg_agent has no "agnt", did you mean "agent"?' in rejected("rfg_agent:agnt", project)
    assert "not of the form package.module:name" in rejected("rfg_agent.agent", project)
    assert 'write "rfg_agent:agent", without .py' in rejected("rfg_agent.py:agent", project)


def test_a_module_that_fails_to_import_is_reported(project: Path) -> None:
    assert 'importing "rfg_broken" failed: ZeroDivisionError: division by zero (rfg_broken.py:1)' in rejected(
        "rfg_broken:x", project
    )
    assert "No module named 'rfg_nowhere' (rfg_needs.py:1)" in rejected("rfg_needs:x", project)
