"""Reads tests/data/seed_symbols.yml and compares each symbol with what the package has."""

import ast
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TABLE = yaml.safe_load((ROOT / "tests" / "data" / "seed_symbols.yml").read_text())


@dataclass(frozen=True)
class Row:
    """One symbol of a seed."""

    group: str
    name: str
    seed: str
    where: str
    test: str
    signature: str | None
    deviation: str

    @property
    def symbol(self) -> str:
        return f"{self.group}.{self.name}" if ":" in self.where and " " not in self.group else self.name

    @property
    def place(self) -> str:
        return f"{self.where}.{self.name}" if ":" in self.where else f"{self.where}:{self.name}"


def rows() -> list[Row]:
    """Returns every symbol that is to be there."""
    return [
        Row(
            group["of"],
            member["name"],
            member.get("seed", group["seed"]),
            group["where"],
            member.get("test", group["test"]),
            member.get("signature"),
            member.get("deviation", ""),
        )
        for group in TABLE["groups"]
        for member in group["members"]
    ]


def exists(row: Row) -> bool:
    """Returns True if the symbol is a name of the module, an attribute of the class, or set in its `__init__`."""
    module, _, path = row.where.partition(":")
    owner: Any = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        owner = getattr(owner, part)
    fields = getattr(owner, "model_fields", {})
    return hasattr(owner, row.name) or row.name in fields or row.name in _set_in_init(owner)


def _set_in_init(owner: Any) -> set[str]:
    found: set[str] = set()
    for cls in inspect.getmro(owner) if inspect.isclass(owner) else ():
        if "__init__" in vars(cls) and inspect.isfunction(cls.__init__):
            found |= set(re.findall(r"self\.(\w+)\s*[:=]", inspect.getsource(cls.__init__)))
    return found | {name for cls in inspect.getmro(owner) for name in getattr(cls, "__annotations__", {})}


def ours(row: Row) -> Any:
    """Returns the object of a symbol."""
    module, _, path = row.place.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def same_signature(row: Row) -> bool:
    """Returns True if parameters, their kinds and defaults, types, async and return type are those of the seed.

    Types that the seed does not print are not compared; `dict` in a seed is any `dict[...]`.
    """
    assert row.signature is not None
    theirs = _parsed(row.signature)
    function = ours(row)
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    mine = _parsed(prefix + str(inspect.signature(function)).replace("'", ""))
    return theirs == tuple(_like(a, b) for a, b in zip(mine, theirs, strict=False)) and len(mine) == len(theirs)


def _parsed(text: str) -> tuple[Any, ...]:
    """Returns (async, return type, (name, type, default) ...) of `async (self, x: int=1) -> str`."""
    is_async = text.startswith("async ")
    node = ast.parse(f"def f{text.removeprefix('async ')}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    parameters = [(a.arg, _type(a.annotation), d) for a, d in zip(plain, defaults, strict=True)]
    if arguments.kwarg:
        parameters.append((f"**{arguments.kwarg.arg}", _type(arguments.kwarg.annotation), None))
    return (is_async, _type(node.returns), *parameters)


def _type(node: ast.expr | None) -> str | None:
    return re.sub(r"\b\w+\.(?=[A-Z])", "", ast.unparse(node)) if node is not None else None


def _like(mine: Any, theirs: Any) -> Any:
    """Returns the seed's spelling where it says less than ours."""
    if isinstance(mine, tuple):
        return (mine[0], _like(mine[1], theirs[1]), mine[2])
    if isinstance(mine, str) and isinstance(theirs, str):
        return theirs if re.sub(r"\bdict\[[^\]]*\]", "dict", mine) == theirs else mine
    return theirs if theirs is None else mine


def missing() -> list[tuple[str, str, str, bool]]:
    """Returns (seed, symbol, where it will be, True if it is there already) of what is not there yet."""
    found = []
    for part in TABLE["not_there_yet"]:
        for owner, names in part["symbols"].items():
            there = _is_there(part["where"], owner)
            found += [(part["seed"], f"{owner}.{name}", part["where"], there) for name in names.split()]
    return found


def _is_there(where: str, owner: str) -> bool:
    try:
        return hasattr(importlib.import_module(where), owner)
    except ModuleNotFoundError:
        return False


def document() -> str:
    """Returns notes/seed-coverage.md."""
    made, later = rows(), missing()
    lines = [
        "# Coverage of the seeds",
        "",
        "Every public symbol of the seed documents: where it is, whether its signature is the seed's, the test that "
        "uses it, and where we differ and why. Made from `tests/data/seed_symbols.yml`; "
        "`tests/core/contract/test_seed_coverage.py` fails when this page is stale, and rewrites it with "
        "`REINFORGE_UPDATE_DOCS=1`.",
        "",
        f"{len(made)} symbols are there, {len(later) or 'none'} {'is' if len(later) < 2 else 'are'} not there yet.",
        "",
    ]
    for group in TABLE["groups"]:
        lines += [f"## {group['of']} (seed {group['seed']})", ""]
        lines += ["| symbol | where | signature | test | deviation and why |", "|---|---|---|---|---|"]
        for row in made:
            if row.group == group["of"] and row.where == group["where"]:
                equal = "–" if row.signature is None else "equal" if same_signature(row) else "differs"
                test = row.test.replace("tests/", "", 1).replace("::", " :: ")
                lines.append(
                    f"| `{row.symbol}` | `{row.place}` | {equal} | {test} | {row.deviation.replace('|', '/')} |"
                )
        lines.append("")
    lines += ["## Not there yet", "", "| seed | symbol | will be in |", "|---|---|---|"] if later else []
    lines += [f"| {seed} | `{symbol}` | `{where}` |" for seed, symbol, where, _ in later]
    return "\n".join(lines).rstrip() + "\n"
