"""Imports point one way, torch stays in the engine, and importing the package stays light."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "reinforge"

LAYERS = [
    {"safe_text"},
    {"errors", "types", "crash", "version"},
    {"files"},
    {"registry"},
    {"config"},
    {"interfaces"},
    {"dialects", "algorithms", "engine"},
    {"rollout"},
    {"evaluation"},
    {"adapters"},
    {"runs"},
    {"trainer"},
    {"multiagent", "redteam", "serving", "view", "exports", "scale"},
    {"protocols"},
    {"finetuning"},
    {"tasks"},
    {"compat"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
NEIGHBOURS_MAY_IMPORT = {("errors", "types"), ("types", "errors")}
ENTRANCES = {ROOT / "__init__.py", ROOT / "__main__.py"}
MODULES = sorted(set(ROOT.rglob("*.py")) - ENTRANCES)


@cache
def find_imports(path):
    """Returns the import statements of a file, those inside functions too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path):
    """Yields the modules that a file imports."""
    for node in find_imports(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module and node.level == 0:
            yield node.module


def module_name(path):
    parts = ("reinforge", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph():
    """Returns the modules that each module imports, by name; an import inside a function or for types counts too."""
    paths = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
    edges = {}
    for name, path in paths.items():
        edges[name] = set()
        for node in find_imports(path):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in paths:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                edges[name] |= (inner & paths.keys()) or {node.module}
            elif isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names} & paths.keys()
        if path.name == "__init__.py" and name != "reinforge":
            edges[name] -= {name}
    return edges


def circles(edges):
    """Returns the modules that cannot be put in an order in which each imports earlier ones alone."""
    left = {name: set(others) - {name} for name, others in edges.items()}
    while ready := {name for name, others in left.items() if not others}:
        left = {name: others - ready for name, others in left.items() if name not in ready}
    while ready := set(left) - set().union(*left.values()):  # nothing left imports these: they only lead into a circle
        left = {name: others for name, others in left.items() if name not in ready}
    return left


def package(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def is_below(other, own):
    return other == own or RANK[other] < RANK[own] or (own, other) in NEIGHBOURS_MAY_IMPORT


def find_upward_imports(path):
    """Returns the modules that a file imports from beside or above its package."""
    names = [module.split(".") for module in imports(path)]
    own = package(path)
    return [".".join(n) for n in names if n[0] == "reinforge" and len(n) > 1 and not is_below(n[1], own)]


def test_imports_point_one_way():
    assert {str(path): found for path in MODULES if (found := find_upward_imports(path))} == {}


def find_heavy_imports(path):
    """Returns the packages that a file imports although only the engine may."""
    if package(path) in ("engine", "redteam"):
        return set()
    heavy = {"torch", "transformers", "safetensors", "tokenizers", "peft"}
    found = {module.split(".")[0] for module in imports(path)} & heavy
    if package(path) == "tasks":  # a bundled model makes its own tokenizer
        found -= {"tokenizers", "transformers"}
    if path == ROOT / "runs" / "page" / "token_texts.py":  # the texts of tokens, without a model
        found -= {"tokenizers"}
    return found


def test_torch_stays_in_the_engine():
    assert {str(path): found for path in MODULES if (found := find_heavy_imports(path))} == {}


def test_an_import_that_points_up_and_one_of_torch_are_found(tmp_path, monkeypatch):
    """Mutation check: nothing is found in the package as it is."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "rollout").mkdir()
    path = tmp_path / "rollout" / "module.py"
    path.write_text("import reinforge.errors\ndef run():\n    from reinforge.trainer import loop\n    import torch\n")
    assert find_upward_imports(path) == ["reinforge.trainer"]
    assert find_heavy_imports(path) == {"torch"}


def test_no_circle_anywhere():
    """Modules of one package import each other in one direction, too."""
    assert circles(graph()) == {}


SEED_APIS = {
    "reinforge.multiagent": ("nip",),
    "reinforge.redteam": ("algorithms", "core", "ext", "methods", "scorers", "training"),
}
"""Folders that hold another project's API: they import the package's own modules, never the reverse."""


@pytest.mark.parametrize("package_name", SEED_APIS)
def test_own_modules_do_not_import_a_seeds_api(package_name):
    apis = tuple(f"{package_name}.{folder}" for folder in SEED_APIS[package_name])

    def is_api(module):
        return any(module == api or module.startswith(f"{api}.") for api in apis)

    own = {name: imported for name, imported in graph().items() if name.startswith(f"{package_name}.")}
    below = {name: imported for name, imported in own.items() if not is_api(name)}
    upward = {(name, module) for name, imported in below.items() for module in filter(is_api, imported)}
    assert not upward


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}).keys() == {"b", "c"}


def test_every_module_has_a_place():
    assert {package(path) for path in MODULES} <= set(RANK)


def test_import_is_light_and_without_torch():
    code = (
        "import sys, reinforge, reinforge.interfaces, reinforge.cli\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'scipy', 'datasets'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_loading_every_component_needs_no_torch():
    code = (
        "import sys; from reinforge.registry import REGISTRY; components = REGISTRY.components()\n"
        "print(len(components) > 10, 'torch' in sys.modules, REGISTRY.plugin_errors())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "True False {}"


PICKLES = {"pickle", "_pickle", "dill", "joblib", "shelve", "cloudpickle", "marshal"}


def find_unpickling(path):
    """Returns the modules and calls of a file that can run code from the data they read."""
    modules = {module.split(".")[0] for module in imports(path)} & PICKLES
    return sorted(modules | {call for call in ("torch.load", "allow_pickle=True") if call in path.read_text()})


def test_nothing_unpickles():
    assert {path: found for path in MODULES if (found := find_unpickling(path))} == {}


@pytest.mark.parametrize("line", ["import pickle", "from dill import load", "weights = torch.load(path)"])
def test_a_line_that_unpickles_is_found(tmp_path, line):
    """Mutation check."""
    path = tmp_path / "module.py"
    path.write_text(f"def read(path):\n    {line}\n")
    assert len(find_unpickling(path)) == 1
