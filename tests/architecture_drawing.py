"""Draws docs/images/architecture.svg: the core as a stack of rows, and a column for each package around it.

A dot says that the package of the column imports one of the row. Rows, columns and dots are the lists of the layering
test and the imports of the code.
"""

from xml.sax.saxutils import escape

from tests.core.contract.test_layering import AROUND, CORE, HOSTS, graph, home

WIDTH, MARGIN, HEAD = 540, 16, 92
ROW, BOX = 40, 32
CORE_LEFT, CORE_RIGHT = 44, 296
COLUMN = 23
CHARACTER = 7.6
"""Width of a letter at 14 px, on average."""

STYLE = """\
  <style>
    .page { fill: #fff } .box { fill: #e8ecff; stroke: #8f9be0 } .line { stroke: #d4d7e3 } .dot { fill: #4051b5 }
    text { font: 14px system-ui, sans-serif; fill: #1c1e26 } .small { font-size: 13px; fill: #5a5f73 }
    .arrow { stroke: #5a5f73; fill: none }
    @media (prefers-color-scheme: dark) {
      .page { fill: #1e2129 } .box { fill: #2c3352; stroke: #5d6ab8 } .line { stroke: #3c4152 } .dot { fill: #a9b4ff }
      text { fill: #e6e8f0 } .small { fill: #aab0c4 } .arrow { stroke: #aab0c4 }
    }
  </style>"""


def find_package_imports() -> dict[str, set[str]]:
    """Returns the packages that each package imports, by the first part of their names."""
    found: dict[str, set[str]] = {}
    for module, others in graph().items():
        if module != "reinforge":
            found.setdefault(home(module).split(".")[0], set()).update(
                home(other).split(".")[0] for other in others if other != "reinforge"
            )
    return found


def build_drawing() -> str:
    imports = find_package_imports()
    rows = [sorted(names & imports.keys()) for names in reversed(CORE)]
    columns = sorted(AROUND & imports.keys())
    bottom = HEAD + ROW * len(rows)
    notes = [
        "A row imports rows below it, never one above.",
        "A column imports the rows with a dot, and no other column,",
        *(f"but {name} imports {other}." for name in columns for other in sorted(HOSTS.get(name, ()))),
    ]
    height = bottom + 8 + 19 * len(notes) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img">',
        "  <title>The packages of reinforge and what they import</title>",
        STYLE,
        f'  <rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
        *_draw_arrow(bottom),
    ]
    for index, names in enumerate(rows):
        lines += _draw_row(names, HEAD + ROW * index)
    for index, name in enumerate(columns):
        dots = [number for number, names in enumerate(rows) if imports[name] & set(names)]
        lines += _draw_column(name, CORE_RIGHT + 22 + COLUMN * index, dots, bottom)
    lines += [
        f'  <text class="small" x="{CORE_LEFT}" y="{bottom + 22 + 19 * index}">{escape(note)}</text>'
        for index, note in enumerate(notes)
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _draw_arrow(bottom: int) -> list[str]:
    x, middle = 24, (HEAD + bottom) // 2
    return [
        f'  <path class="arrow" d="M{x} {HEAD} V{bottom - 12} m-5 -7 l5 7 l5 -7"/>',
        f'  <text class="small" text-anchor="middle" transform="translate({x - 8} {middle}) rotate(-90)">imports'
        "</text>",
    ]


def _draw_row(names: list[str], y: int) -> list[str]:
    lines = []
    share = (CORE_RIGHT - CORE_LEFT - 6 * (len(names) - 1) - CHARACTER * len("".join(names))) / len(names)
    x = float(CORE_LEFT)
    for name in names:
        width = share + CHARACTER * len(name)
        lines.append(f'  <rect class="box" x="{x:.0f}" y="{y}" width="{width:.0f}" height="{BOX}" rx="5"/>')
        lines.append(f'  <text text-anchor="middle" x="{x + width / 2:.0f}" y="{y + 21}">{escape(name)}</text>')
        x += width + 6
    return lines


def _draw_column(name: str, x: int, dots: list[int], bottom: int) -> list[str]:
    return [
        f'  <line class="line" x1="{x}" y1="{HEAD - 6}" x2="{x}" y2="{bottom - 8}"/>',
        f'  <text transform="translate({x + 3} {HEAD - 12}) rotate(-55)">{escape(name)}</text>',
        *(f'  <circle class="dot" cx="{x}" cy="{HEAD + ROW * index + BOX // 2}" r="5"/>' for index in dots),
    ]
