"""Every path exists that CONTRIBUTING.md, docs/security.md, docs/performance.md and docs/architecture.md name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "reinforge"
FOLDERS = ("src/", "docs/", "notes/", "tests/", "examples/", "benchmarks/")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def paths_in(text):
    """Returns the paths of the repository that a page names in backquotes."""
    return {path for path in re.findall(r"`([\w./-]+)`", text) if path.startswith(FOLDERS)}


def tree_of(text):
    """Returns the paths of the page's tree.

    `├── engine/` and, one level deeper, `│   ├── model/`  =>  src/reinforge/engine, src/reinforge/engine/model
    """
    paths, parents = [], []
    for line in text[text.index("src/reinforge/\n") :].splitlines():
        if line.startswith("```"):
            break
        name = re.search(r"[\w./-]+", line)[0]
        if line.startswith(("├", "└", "│")):
            depth = line.index("── ") // 4
            parents = [*parents[:depth], name]
            paths.append("/".join(["src/reinforge", *(part.rstrip("/") for part in parents)]))
        else:
            paths.append(name)
    return paths


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/security.md"])
def test_every_path_of_a_page_exists(page):
    named = paths_in(read(page))
    assert named, "the page names paths"
    missing = {path for path in named if not (ROOT / path).exists()}
    assert not missing


def test_the_tree_of_the_architecture_page_is_the_tree():
    tree = tree_of(read("docs/architecture.md"))
    assert [path for path in tree if not (ROOT / path).exists()] == []
    folders = {f"src/reinforge/{path.name}" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert folders <= set(tree), "every package has a line"


def test_every_file_that_the_performance_page_names_exists():
    text = read("docs/performance.md")
    modules = re.findall(r"`(engine/[\w/]+\.py)`", text)
    scripts = re.findall(r"((?:benchmarks|examples)/[\w/]+\.\w+)", text)
    assert modules
    assert scripts
    missing = [path for path in modules if not (PACKAGE / path).exists()]
    assert missing + [path for path in scripts if not (ROOT / path).exists()] == []


def test_names_that_contributing_points_to_are_there():
    """`NAMES` in `src/reinforge/file.py`: the table's identifiers stand in the file that it names."""
    for file, names in {
        "registry.py": ["BUILTINS"],
        "engine/sampling/fast_llama.py": ["MODEL_TYPES", "def supports_fast_decode"],
        "cli/__init__.py": ["COMMANDS"],
        "config/finetuning_blocks.py": ["class OutcomesConfig", "class GuardsConfig", "class SamplingConfig"],
        "config/schema.py": ["class WorkflowConfig"],
        "types/request.py": ["class SamplingParams", "min_p"],
        "adapters/launchers.py": ["LAUNCHERS"],
        "adapters/local_config.py": ["SAMPLERS"],
        "trainer/setup/placement.py": ["RAY_AGENTS"],
        "trainer/guards.py": ["MEASURES"],
        "evaluation/datasets.py": ["SUFFIXES", "class FileDataset"],
        "traces/importer.py": ["def make_formats"],
        "protocols/openai/graders/schema.py": ["Leaf"],
        "serving/command.py": ["PROTOCOLS"],
        "rollout/models/endpoint_config.py": ["class EndpointConfig"],
        "engine/losses/base.py": ["FAMILIES"],
        "dialects/families/detection.py": ["FAMILIES"],
        "runs/journal/schema.py": ["SCHEMA_VERSION"],
        "view/episode_table.py": ["COLUMNS"],
        "view/run_list.py": ["WORDS", "NUMBERS"],
        "runs/summary.py": ["def facts"],
        "interfaces.py": ["class TrainerAdapter"],
    }.items():
        text = (PACKAGE / file).read_text(encoding="utf-8")
        for name in names:
            assert name in text, f"{name} is no longer in {file}"
            assert name.split()[-1] in read("CONTRIBUTING.md")
