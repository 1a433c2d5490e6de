"""A whole project in a folder, that the tests of a package run in."""

import sys

import pytest

from tests.project import Project


@pytest.fixture
def plots():
    """Lets the runs of a test draw their plots."""


@pytest.fixture(autouse=True)
def _no_plots(request, monkeypatch):
    """Runs as if matplotlib were not installed: plots have tests of their own, and one is a fifth of a short run."""
    if "plots" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def project(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("task", None)  # each project has its own
    yield Project(tmp_path, tiny_model_dir)
    sys.modules.pop("task", None)
