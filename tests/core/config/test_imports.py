"""Objects that a configuration names: those of the project, and nothing else that is installed."""

import os
import sys
from pathlib import Path

import pytest

from reinforge.config import imports
from reinforge.config.imports import import_object
from reinforge.errors import ConfigError


@pytest.fixture
def project(tmp_path):
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


def rejected(spec, project):
    with pytest.raises(ConfigError) as caught:
        import_object(spec, project, path="workflow.function")
    assert caught.value.problems[0].path == "workflow.function"
    return str(caught.value)


def test_objects_of_the_project_are_imported(project):
    assert import_object("rfg_agent:agent", project)() == 42
    assert import_object("rfg_pack.tools:answer", project)() == 42
    assert import_object("rfg_agent:Box.f", project)() == 1


def test_reinforge_itself_is_allowed(project):
    assert import_object("reinforge.errors:ConfigError", project) is ConfigError


@pytest.mark.parametrize("spec", ["os:system", "subprocess:run", "builtins:eval", "yaml:load", "sys:exit"])
def test_installed_packages_are_not_allowed(project, spec):
    assert f'"{spec}" is not allowed: {spec.split(":")[0]} is not part of the project' in rejected(spec, project)


def test_python_in_the_project_folder_is_not_part_of_the_project(project, monkeypatch):
    assert "is not allowed" in rejected("os:system", Path("/"))
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(project / ".venv" / "lib" / "site-packages"))
        assert "is not allowed" in rejected("rfg_foreign:f", project)
    assert "rfg_foreign" not in sys.modules


def test_a_path_through_another_module_is_rejected(project):
    assert "reaches into the module os" in rejected("rfg_agent:os.system", project)


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("system", "posix.system"),
        ("run", "subprocess.run"),
        ("Popen", "subprocess.Popen"),
        ("Own.communicate", "subprocess.Popen.communicate"),
        ("bound", "posix.system"),
        ("evaluate", "builtins.eval"),
        ("caller", "operator.methodcaller"),
    ],
)
def test_a_project_does_not_pass_on_what_it_imports(project, name, origin):
    """`from os import system` in a module of the project does not make `module:system` a function of the project."""
    (project / "rfg_reexports.py").write_text(
        "import functools, operator\nfrom os import system\nfrom subprocess import Popen, run\n"
        "class Own(Popen): pass\nbound = functools.partial(system, 'true')\nevaluate = eval\n"
        "caller = operator.methodcaller('x')\n"
    )
    origin = origin.replace("posix", os.name)
    assert f'"rfg_reexports:{name}" is not allowed: it is {origin}' in rejected(f"rfg_reexports:{name}", project)


@pytest.mark.parametrize(
    "name",
    ["agent.__globals__", "Box.__subclasses__", "__builtins__", "__loader__.load_module", "Box.f.__call__", "__name__"],
)
def test_attributes_of_python_are_not_allowed(project, name):
    assert "is an attribute of Python itself" in rejected(f"rfg_agent:{name}", project)


def test_what_the_project_makes_of_other_libraries_is_its_own(project):
    """A wrapped function, a partial, an object of an own class, and plain data."""
    (project / "rfg_made.py").write_text(
        "import functools\n"
        "def double(x): return 2 * x\n"
        "four = functools.partial(double, 2)\n"
        "cached = functools.lru_cache(double)\n"
        "class Agent:\n  def __call__(self, x): return x + 1\n  @classmethod\n  def make(cls): return 5\n"
        "agent = Agent()\nROWS = [1]\n"
    )
    found = [import_object(f"rfg_made:{name}", project) for name in ("four", "cached", "agent", "Agent.make", "ROWS")]
    assert [found[0](), found[1](3), found[2](1), found[3](), found[4]] == [4, 6, 2, 5, [1]]


def test_without_the_check_of_origin_a_reexported_function_is_found(project, monkeypatch):
    """Mutation check."""
    (project / "rfg_open.py").write_text("from os import system\n")
    monkeypatch.setattr(imports, "_check_origin", lambda *arguments: None)
    assert import_object("rfg_open:system", project) is os.system


def test_a_missing_name_suggests_the_nearest(project):
    assert 'no module "rfg_agnt", did you mean "rfg_agent"?' in rejected("rfg_agnt:agent", project)
    assert 'no module "rfg_pack.tool", did you mean "rfg_pack.tools"?' in rejected("rfg_pack.tool:answer", project)
    assert 'rfg_agent has no "agnt", did you mean "agent"?' in rejected("rfg_agent:agnt", project)
    assert "not of the form package.module:name" in rejected("rfg_agent", project)


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("rfg_agent.agent", "rfg_agent:agent"),
        ("rfg_pack.tools.answer", "rfg_pack.tools:answer"),
        ("./rfg_pack/tools.py:answer", "rfg_pack.tools:answer"),
    ],
)
def test_a_dot_or_a_path_where_a_colon_or_a_module_belongs_suggests_the_right_form(project, spec, meant):
    assert f'"{spec}" is not of the form package.module:name, did you mean "{meant}"?' in rejected(spec, project)
    import_object(meant, project)


def test_a_function_that_python_passed_says_that_no_file_can_name_it(project):
    text = rejected("<python __main__:agent>", project)
    assert "__main__:agent was passed to reinforge.finetune in Python; resume the run there" in text
    assert "did you mean" not in text
    assert 'write "rfg_agent:agent", without .py' in rejected("rfg_agent.py:agent", project)


def test_a_module_that_fails_to_import_is_reported(project):
    assert 'importing "rfg_broken" failed: ZeroDivisionError: division by zero (rfg_broken.py:1)' in rejected(
        "rfg_broken:x", project
    )
    assert "No module named 'rfg_nowhere' (rfg_needs.py:1)" in rejected("rfg_needs:x", project)
