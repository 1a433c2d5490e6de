"""One name for one thing: no class name twice, and functions are verbs instead of participles."""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3] / "src" / "reinforge"

TWICE = {"Algorithm", "DPO", "Evaluator", "GRPO", "IPO", "PPO", "Trainer"}
"""Names that two of the projects whose API reinforge offers both have."""

DEFINITION = re.compile(r"^(?: {,4}(class)| *(?:async )?def) (\w+)", re.MULTILINE)
"""Parsing all of it would take seconds; a class deeper inside is an example in a docstring."""
PARTICIPLE = re.compile(r"_?(told|shown|said|joined|found|kept|given|made)$")


def test_one_name_for_one_thing():
    files, participles = defaultdict(list), []
    for path in sorted(ROOT.rglob("*.py")):
        for is_class, name in DEFINITION.findall(path.read_text(encoding="utf-8")):
            if is_class:
                files[name].append(str(path.relative_to(ROOT)))
            elif PARTICIPLE.fullmatch(name):
                participles.append(f"{path.relative_to(ROOT)}: {name}")
    twice = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert set(twice) == TWICE, twice
    assert participles == []
