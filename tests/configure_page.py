"""Generates docs/configure.md from the configuration classes."""

from collections.abc import Iterable

from reinforge.config.describe import FieldLine, iterate_fields
from reinforge.config.schema import EvalGeneralConfig, FinetuneConfig
from reinforge.config.sections import SECTIONS, SINGLES
from reinforge.registry import Registry

WHERE = {**{kind: f"{'.'.join(map(str, path))}.NAME" for path, kind in SECTIONS.items() if path != ("functions",)}}
WHERE |= {kind: ".".join(map(str, path)) for path, kind in SINGLES.items()}

HEAD = """\
# The configuration file

```bash
reinforge config show run.yml --origin    # every value in effect, and where it is set
reinforge check run.yml                   # report all problems, without running
reinforge components evaluator            # those of one kind, including your plugins
reinforge components exact_match          # one with its settings and defaults
reinforge config schema > schema.json     # JSON schema, for completion in an editor
```

A file has the sections `llms`, `functions`, `workflow`, `eval`, `trajectory_builders`, `trainer_adapters`, `trainers`
and `finetuning`, and `prompts`, which replace [texts of the agent](prompts.md). A component is a mapping with a
`_type`; the tables below list its other keys.

- `${VAR}` and `${VAR:-default}` are expanded in values, never in keys; `$${` is a literal `${`.
- `-o PATH VALUE` sets any key. The command line takes precedence over the file, and the file over the default.
- An unknown key is an error that names file, line and the nearest key. All problems are reported at once.

This page is generated from the code by `tests/core/contract/test_docs.py`.
"""


def build_page(registry: Registry) -> str:
    lines = [HEAD, "## finetuning", "", *_build_table(iterate_fields(FinetuneConfig)), ""]
    lines += ["## eval.general", "", *_build_table(iterate_fields(EvalGeneralConfig)), ""]
    for kind, where in WHERE.items():
        lines += [f"## {where}", ""]
        for component in registry.components(kind):
            if component.origin.split(".")[0] != "reinforge":
                continue
            summary = (component.config_type.__doc__ or "").strip().splitlines()[0]
            lines += [f"### `_type: {component.name}`", "", summary, ""]
            rows = list(iterate_fields(component.config_type))
            lines += [*_build_table(rows), ""] if rows else []
    return "\n".join(lines).rstrip() + "\n"


def _build_table(rows: Iterable[FieldLine]) -> list[str]:
    return ["| key | type | default | meaning |", "|---|---|---|---|", *map(_build_row, rows)]


def _build_row(line: FieldLine) -> str:
    default = "*required*" if line.default is None else f"`{line.default}`"
    cells = [f"`{line.path}`", line.kind, default, line.description]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
