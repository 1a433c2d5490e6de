"""A whole project in a folder, that the tests of a package run in."""

import sys

import pytest

from tests.project import Project


@pytest.fixture
def project(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("task", None)  # each project has its own
    yield Project(tmp_path, tiny_model_dir)
    sys.modules.pop("task", None)
