import importlib
import sys

from reinforge.engine.model import architecture
from reinforge.engine.model.architecture import import_bitsandbytes

PACKAGE = """
try:
    import kernels
    downloaded = True
except ImportError:
    downloaded = False
"""


def import_with_kernels(folder, monkeypatch, load):
    """Returns a package that would download code by the package `kernels`, which is installed."""
    (folder / "downloads_code.py").write_text(PACKAGE)
    (folder / "kernels.py").write_text("")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(architecture, "BITSANDBYTES", "downloads_code")
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
