"""Writes the same components with the NeMo Agent Toolkit's import lines or with ours."""

import re
from pathlib import Path

from reinforge.compat.nat import MODULES

IMPORT = re.compile(r"^from (nat[\w.]*) import (?:\((?P<many>[^)]*)\)|(?P<one>[^\n]*))", re.MULTILINE)
OURS = re.compile(r"^from reinforge\.finetuning import (?:\((?P<many>[^)]*)\)|(?P<one>[^\n]*))", re.MULTILINE)


def split_names(match):
    return re.findall(r"\w+", match["many"] or match["one"])


def with_our_imports(text):
    """Returns a component's source with its import lines changed, and nothing else."""

    def change(match):
        lines = []
        for name in split_names(match):
            module, _, own = MODULES[match[1]][name].partition(":")
            lines.append(f"from {module} import {own}" + (f" as {name}" if own != name else ""))
        return "\n".join(lines)

    return IMPORT.sub(change, text)


def with_their_imports(text):
    """Returns a component's source that imports from the toolkit what it imported from us, if the toolkit has it."""
    theirs = {
        where: f"from {module} import {name}"
        for module, names in sorted(MODULES.items(), reverse=True)
        for name, where in names.items()
    }

    def find(name):
        line = theirs.get(f"reinforge.finetuning:{name}", f"from reinforge.finetuning import {name}")
        return line if line.endswith(f" {name}") else f"{line} as {name}"

    return OURS.sub(lambda match: "\n".join(map(find, split_names(match))), text)


def copy_package(source: Path, folder: Path, change=lambda text: text):
    """Copies the modules of a package to `folder`, each changed."""
    folder.mkdir(parents=True)
    for path in sorted(source.glob("*.py")):
        (folder / path.name).write_text(change(path.read_text()))


def install_plugin(folder: Path, name: str, entry_points: str):
    """Writes what an installed package says of itself: the distribution and its entry points."""
    info = folder / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(entry_points)
