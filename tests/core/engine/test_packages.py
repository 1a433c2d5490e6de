"""The packages of the embedded backend are looked up without importing them."""

import gc
import importlib
import sys

import pytest
import torch

from reinforge.config.policy import LoRAConfig
from reinforge.engine import adapter_packages, import_engine, packages
from reinforge.engine.adapter_packages import import_bitsandbytes
from reinforge.engine.model.loading import add_adapter, load_module
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


def test_nothing_is_collected_while_packages_are_imported_even_if_one_is_missing(monkeypatch):
    collecting = []

    class Hook:
        def find_spec(self, name, path=None, target=None):
            if name == "reinforge.engine.engine":
                collecting.append(gc.isenabled())
                raise ModuleNotFoundError("forbidden")

    monkeypatch.delitem(sys.modules, "reinforge.engine.engine", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path])
    with pytest.raises(BackendUnavailable):
        import_engine()
    assert collecting == [False]
    assert gc.isenabled()


PACKAGE = """
try:
    import kernels
    downloaded = True
except ImportError:
    downloaded = False
"""


def import_with_kernels(folder, monkeypatch, load):
    (folder / "downloads_code.py").write_text(PACKAGE)
    (folder / "kernels.py").write_text("")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(adapter_packages, "BITSANDBYTES", "downloads_code")
    for name in ("downloads_code", "kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import_bitsandbytes.cache_clear()
    load()
    return sys.modules.pop("downloads_code")


def test_no_code_is_downloaded_by_importing_bitsandbytes(tmp_path, monkeypatch):
    assert import_with_kernels(tmp_path, monkeypatch, import_bitsandbytes).downloaded is False
    assert "kernels" not in sys.modules, "other code may import it"


def test_without_the_guard_it_would_be(tmp_path, monkeypatch):
    """The mutation: imported as PEFT does it, the package finds `kernels`."""
    found = import_with_kernels(tmp_path, monkeypatch, lambda: importlib.import_module("downloads_code"))
    assert found.downloaded is True
    del sys.modules["kernels"]


def test_bitsandbytes_is_imported_for_quantized_models_alone(tiny_model_dir):
    """It takes four seconds of an adapter's start."""
    import_bitsandbytes.cache_clear()
    module = load_module(tiny_model_dir, torch.float32)
    assert import_bitsandbytes.cache_info().misses == 0
    add_adapter(module, LoRAConfig(), seed=0)
    assert import_bitsandbytes.cache_info().misses == 0
