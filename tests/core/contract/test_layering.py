"""Imports point one way, torch stays in the engine, and importing the package stays light."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import reinforge

ROOT = Path(__file__).parents[3] / "src" / "reinforge"

CORE = [
    {"safe_text"},
    {"errors", "types", "crash", "version"},
    {"limits"},
    {"bounded"},
    {"files"},
    {"registry"},
    {"config"},
    {"port_bases"},
    {"interfaces"},
    {"dialects", "algorithms", "engine"},
    {"rollout"},
    {"evaluation"},
    {"adapters"},
    {"runs"},
    {"trainer"},
    {"multiagent"},
    {"tasks"},
    {"cli"},
]
"""What a run passes through, from the bottom up; what stands in one pair of braces does not import its neighbors."""
AROUND = {
    "compat",
    "environments",
    "exports",
    "graders",
    "improvement",
    "learning",
    "protocols",
    "redteam",
    "routing",
    "scale",
    "serving",
    "traces",
    "trackers",
    "view",
}
"""What is found by name: it imports the core, never the reverse, and none of these imports another."""
NESTED = {
    "multiagent.nip",
    *(f"tasks.{name}" for name in ("debate", "front_desk", "help_desk", "projects", "self_test", "shop", "tickets")),
}
"""Folders of a core package that stand around it."""
HOSTS = {
    "learning": {"routing", "serving", "traces"},
    "protocols": {"serving"},
    "serving": {"routing"},
    "traces": {"routing"},
    "view": {"learning", "serving"},
    "tasks.front_desk": {"redteam"},
    "tasks.projects": {"tasks.help_desk", "tasks.shop"},
}
"""Packages around the core that build on others: `reinforge serve` hosts the servers of the protocols."""
RANK = {name: rank for rank, names in enumerate(CORE) for name in names}
NEIGHBORS_MAY_IMPORT = {("errors", "types"), ("types", "errors")}
ENTRANCES = {ROOT / "__init__.py", ROOT / "__main__.py", ROOT / "finetuning.py"}
"""Names of all parts in one place, imported when they are used."""
MODULES = sorted(set(ROOT.rglob("*.py")) - ENTRANCES)


STRING = re.compile(r'"""(?s:.*?)"""')
IMPORT = re.compile(r"^[ \t]*((?:from [.\w]+ )?import (?:\([^)]*\)|[^\n(]+))$", re.MULTILINE)


@cache
def find_imports(path):
    """Returns the imports of a file, also those inside a function; parsing all of it takes ten times as long."""
    return ast.parse("\n".join(IMPORT.findall(STRING.sub("", path.read_text())))).body


def imports(path):
    for node in find_imports(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module and node.level == 0:
            yield node.module


def module_name(path):
    parts = ("reinforge", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
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


def home(module):
    """Returns the package that a module is part of: the first name of the core's, a longer one around it."""
    first, *rest = module.removeprefix("reinforge.").split(".")
    longer = ".".join((first, *rest[:1]))
    is_protocol = first == "protocols" and rest and (ROOT / "protocols" / rest[0]).is_dir()
    return longer if longer in NESTED or is_protocol else first


def may_import(own, other):
    if own == other or (own, other) in NEIGHBORS_MAY_IMPORT:
        return True
    if other in RANK:
        return RANK[other] < RANK.get(own, len(CORE))
    first = own.split(".")[0]
    hosts = HOSTS.get(own, HOSTS.get(first, ()))
    return own not in RANK and (other in hosts or (other == first and other in AROUND))


def find_wrong_imports(path):
    """Returns the modules that a file imports from beside, above or around its package."""
    own = home(module_name(path))
    others = [module for module in imports(path) if module.startswith("reinforge.")]
    return [module for module in others if not may_import(own, home(module))]


def test_imports_point_one_way():
    assert {str(path): found for path in MODULES if (found := find_wrong_imports(path))} == {}


def find_heavy_imports(path):
    """Returns the packages that a file imports although only the engine may."""
    if package(path) in ("engine", "exports", "redteam"):
        return set()
    heavy = {"torch", "transformers", "safetensors", "tokenizers", "peft"}
    found = {module.split(".")[0] for module in imports(path)} & heavy
    if package(path) == "tasks":  # a bundled model makes its own tokenizer
        found -= {"tokenizers", "transformers"}
    if path == ROOT / "runs" / "page" / "chats.py":  # the texts of tokens, without a model
        found -= {"tokenizers"}
    return found


def test_torch_stays_in_the_engine():
    """What runs in vLLM's environment may import what is there."""
    ours = [path for path in MODULES if path.parent.name != "plugin"]
    assert {str(path): found for path in ours if (found := find_heavy_imports(path))} == {}


def test_an_import_that_points_up_and_one_of_torch_are_found(tmp_path, monkeypatch):
    """Mutation check: nothing is found in the package as it is."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "rollout").mkdir()
    path = tmp_path / "rollout" / "module.py"
    lines = ["from reinforge.trainer import loop", "from reinforge.scale import worker", "import torch"]
    path.write_text("import reinforge.errors\ndef run():\n" + "".join(f"    {line}\n" for line in lines))
    assert find_wrong_imports(path) == ["reinforge.trainer", "reinforge.scale"]
    assert find_heavy_imports(path) == {"torch"}


def test_no_circle_anywhere():
    """Modules of one package import each other in one direction, too."""
    assert circles(graph()) == {}


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}).keys() == {"b", "c"}


def test_every_module_has_a_place():
    assert {package(path) for path in MODULES} <= {*RANK, *AROUND}


MAX_MODULES = 20
LONG_LISTS = {"algorithms": "one file a paper", "cli": "one file a command"}


def test_no_folder_holds_more_than_a_reader_can_survey():
    folders = {path.parent for path in MODULES} - {ROOT / name for name in LONG_LISTS}
    sizes = {str(folder): len(list(folder.glob("*.py"))) - 1 for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > MAX_MODULES} == {}


@pytest.mark.parametrize(
    ("own", "other", "allowed"),
    [
        ("trainer", "runs", True),
        ("runs", "trainer", False),
        ("trainer", "scale", False),
        ("scale", "trainer", True),
        ("scale", "serving", False),
        ("protocols.art", "serving", True),
        ("protocols.art", "protocols", True),
        ("protocols.art", "protocols.openai", False),
        ("multiagent.nip", "multiagent", True),
        ("multiagent", "multiagent.nip", False),
    ],
)
def test_which_package_imports_which(own, other, allowed):
    assert may_import(own, other) is allowed


LIGHT = """
import sys, reinforge, reinforge.interfaces, reinforge.cli, reinforge.finetuning
from reinforge.registry import REGISTRY
assert len(REGISTRY.components()) > 10, REGISTRY.plugin_errors()
print({"torch", "transformers", "matplotlib", "scipy", "datasets"} & set(sys.modules))
"""


def test_imports_and_every_component_are_light_and_without_torch():
    out = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


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


SOURCE = Path(reinforge.__file__).parent
JOURNAL = SOURCE / "runs" / "journal"
OTHERS = {Path("traces/store.py"), Path("runs/removal.py"), Path("learning/store.py"), Path("learning/overview.py")}
OTHERS |= {Path("protocols/openai/server") / name for name in ("file_store.py", "store.py")}
"""Modules with a database of their own: of the records of a trace, the trial of a folder, chats, the server."""

SQL = re.compile(
    r"\b(SELECT .+ FROM|INSERT (OR|INTO)|UPDATE \w+ SET|DELETE FROM|PRAGMA \w+|CREATE TABLE|ALTER TABLE)\b"
)


def find_sql(text):
    if not re.search("SELECT|INSERT|UPDATE|DELETE|PRAGMA|TABLE", text):
        return []  # parsing takes long
    literals = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return sorted(node.lineno for node in literals if isinstance(node.value, str) and SQL.search(node.value))


def test_only_the_journals_own_modules_hold_sql():
    modules = [path for path in SOURCE.rglob("*.py") if path.parent != JOURNAL]
    modules = [path for path in modules if path.relative_to(SOURCE) not in OTHERS]
    assert len(modules) > 100
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in modules for line in find_sql(path.read_text())]
    assert found == []


def test_the_journals_own_modules_would_be_found():
    assert all(find_sql((JOURNAL / f"{name}.py").read_text()) for name in ("journal", "reader", "schema", "repair"))
