"""What a person sees of the package in an interactive session: `dir()` and `help()`."""

import importlib
import inspect
import pkgutil
import pydoc

import reinforge


def test_dir_lists_the_public_names():
    assert set(reinforge.__all__) <= set(dir(reinforge))
    assert not {"Any", "TYPE_CHECKING", "importlib", "annotations"} & set(dir(reinforge))
    for name in reinforge.__all__:
        assert getattr(reinforge, name) is not None


def test_help_of_finetune_is_readable():
    text = pydoc.plain(pydoc.render_doc(reinforge.finetune))
    assert "registry: 'Registry | None' = None" in text
    assert " at 0x" not in text


def test_no_signature_shows_the_address_of_an_object():
    shown = []
    for package in ("reinforge.config", "reinforge.rollout", "reinforge.evaluation", "reinforge.trainer"):
        module = importlib.import_module(package)
        for info in pkgutil.walk_packages(module.__path__, f"{package}."):
            for name, value in vars(importlib.import_module(info.name)).items():
                ours = inspect.isfunction(value) and value.__module__.startswith("reinforge.")
                if ours and " object at 0x" in str(inspect.signature(value)):
                    shown.append(f"{info.name}.{name}")
    assert shown == []
