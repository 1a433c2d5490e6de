"""Makes docs/configure.md from the configuration classes."""

from __future__ import annotations

from collections.abc import Iterable

from reinforge.config.describe import FieldLine, field_lines
from reinforge.config.loader import SECTIONS, SINGLES
from reinforge.config.schema import EvalGeneralConfig, FinetuneConfig
from reinforge.registry import Registry

WHERE = {**{kind: f"{'.'.join(map(str, path))}.NAME" for path, kind in SECTIONS.items() if path != ("functions",)}}
WHERE |= {kind: ".".join(map(str, path)) for path, kind in SINGLES.items()}

HEAD = """\
# The configuration file

Made from the classes by `tests/contract/test_docs.py`; the test fails when this page is stale.
`reinforge config schema` gives the same as a JSON schema, `reinforge components` what your own installation has, with
your plugins.

A file has the sections `llms`, `functions`, `workflow`, `eval`, `trajectory_builders`, `trainer_adapters`, `trainers`
and `finetuning`. A component is a mapping with a `_type`; the tables below say what else it may hold.

- `${VAR}` and `${VAR:-default}` are put in after the file was read, into values only; `$${` is a plain `${`.
- `-o PATH VALUE` sets any key; what the command line says wins over the file, the file over the default.
- Unknown keys are errors with file, line and the nearest spelling. Everything that is wrong is told at once.
- `reinforge config show FILE --origin` says of each value where it comes from.
"""


def page(registry: Registry) -> str:
    """Returns the page."""
    lines = [HEAD, "## finetuning", "", *_table(field_lines(FinetuneConfig)), ""]
    lines += ["## eval.general", "", *_table(field_lines(EvalGeneralConfig)), ""]
    for kind, where in WHERE.items():
        lines += [f"## {where}", ""]
        for component in registry.components(kind):
            if component.origin.split(".")[0] != "reinforge":
                continue
            said = (component.config_type.__doc__ or "").strip().splitlines()[0]
            lines += [f"### `_type: {component.name}`", "", said, ""]
            rows = list(field_lines(component.config_type))
            lines += [*_table(rows), ""] if rows else []
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Iterable[FieldLine]) -> list[str]:
    return ["| key | type | default | meaning |", "|---|---|---|---|", *map(_row, rows)]


def _row(line: FieldLine) -> str:
    default = "*required*" if line.default is None else f"`{line.default}`"
    cells = [f"`{line.path}`", line.kind, default, line.description]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
