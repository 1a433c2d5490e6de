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


def import_with_kernels(folder, monkeypatch):
    """Returns a package that would download code by the package `kernels`, which is installed."""
    (folder / "downloads_code.py").write_text(PACKAGE)
    (folder / "kernels.py").write_text("")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(architecture, "BITSANDBYTES", "downloads_code")
    monkeypatch.delitem(sys.modules, "downloads_code", raising=False)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    import_bitsandbytes.cache_clear()
    import_bitsandbytes()
    return sys.modules["downloads_code"]


def test_no_code_is_downloaded_by_importing_bitsandbytes(tmp_path, monkeypatch):
    assert import_with_kernels(tmp_path, monkeypatch).downloaded is False
    assert "kernels" not in sys.modules, "other code may import it"


def test_without_the_guard_it_would_be(tmp_path, monkeypatch):
    """The mutation: imported as PEFT does it, the package finds `kernels`."""
    (tmp_path / "downloads_code.py").write_text(PACKAGE)
    (tmp_path / "kernels.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("downloads_code", "kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert importlib.import_module("downloads_code").downloaded is True
    for name in ("downloads_code", "kernels"):
        sys.modules.pop(name)
