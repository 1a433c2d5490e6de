"""The packages of the embedded backend are looked up without importing them."""

import sys

import pytest

from reinforge.engine import import_engine, packages
from reinforge.engine.packages import check_packages
from reinforge.errors import BackendUnavailable


def test_an_installed_backend_has_no_problem():
    assert check_packages(lora=True) == []


def test_missing_packages_are_named_together_with_what_installs_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "peft", None)
    (problem,) = check_packages()
    assert problem.message == "running a model on this machine needs torch, which is not installed"
    assert problem.fix == packages.INSTALL
    (problem,) = check_packages(lora=True)
    assert problem.message == "running a model on this machine needs torch, peft, which are not installed"


def test_an_import_hook_that_forbids_a_package_counts_as_missing(monkeypatch):
    class Hook:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                raise ModuleNotFoundError("forbidden")

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path])
    (problem,) = check_packages()
    assert "needs torch, which" in problem.message


def test_a_package_that_cannot_be_imported_is_an_environment_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "reinforge.engine.engine", None)
    with pytest.raises(
        BackendUnavailable, match="cannot import the packages that run a model: ModuleNotFound"
    ) as found:
        import_engine()
    assert found.value.exit_code == 4
    assert f"fix: install them again: {packages.INSTALL}" in str(found.value)
