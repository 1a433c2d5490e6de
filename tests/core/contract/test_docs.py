"""The docs match the code: configure.md is generated from the classes, and the plugins of docs/extend run."""

import importlib
import re
import sys

import numpy as np
import pytest
import yaml

from reinforge.registry import REGISTRY
from tests.configure_page import build_page
from tests.generated import DOCS, assert_page_is
from tests.samples import random_samples

EXTEND = sorted((DOCS / "extend").glob("*.md"))
MAX_LINES = 45


def blocks(path, language):
    """Returns the fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def merge(settings, change):
    for key, value in change.items():
        if isinstance(value, dict) and "_type" not in value and isinstance(settings.get(key), dict):
            merge(settings[key], value)
        else:
            settings[key] = value


def test_configure_is_generated_from_the_classes():
    assert_page_is("docs/configure.md", build_page(REGISTRY))


def test_each_kind_has_a_page():
    assert [path.stem for path in EXTEND] == [
        "adapter", "algorithm", "builder", "dataset", "evaluator", "loss", "trainer", "workflow"
    ]  # fmt: skip


@pytest.mark.parametrize("path", EXTEND, ids=lambda path: path.stem)
def test_the_plugin_of_a_page_trains(path, project):
    """Imports the module of the page like a plugin, merges the YAML of the page into a configuration, and runs it."""
    (plugin, *_), changes = blocks(path, "python"), blocks(path, "yaml")
    assert sum(map(bool, map(str.strip, plugin.splitlines()))) <= MAX_LINES, "the plugin of a page should be short"
    name = f"docs_extend_{path.stem}"
    project.write(f"{name}.py", plugin)
    sys.path.insert(0, str(project.folder))
    importlib.invalidate_caches()
    importlib.import_module(name)
    project.set("finetuning.num_epochs", 1)
    for change in changes:
        merge(project.settings, yaml.safe_load(change))
    result = project.finetune()
    assert result.exit_code == 0, result.output
    assert len(project.summary["policy_versions"]) >= 2, "something was trained"


def test_the_steps_of_the_loss_page_run(tiny_model_dir):
    """The second block of the page, unchanged: ten steps that make tokens with a positive advantage more likely."""
    _, by_hand = blocks(DOCS / "extend" / "loss.md", "python")
    samples = random_samples(4)
    for sample in samples:
        sample.advantages = np.where(sample.loss_mask, 1, 0).astype(np.float32)
    names = {"folder": str(tiny_model_dir), "samples": samples}
    exec(by_hand, names)
    assert names["engine"].policy.version == 1
    assert names["steps"][-1]["likelihood"] > names["steps"][0]["likelihood"] + 1


def test_every_algorithm_is_listed_with_its_papers():
    """Each row of papers.md is a registered algorithm, and its file names the papers of the row."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (\w+\.py) \| ", (DOCS / "papers.md").read_text(), re.MULTILINE)
    known = {c.name: c.origin for c in REGISTRY.components("algorithm") if c.origin.startswith("reinforge.algorithms.")}
    assert {name for name, _, _ in rows} == set(known)
    for name, papers, file in rows:
        assert known[name].endswith(f".{file.removesuffix('.py')}")
        docstring = importlib.import_module(known[name]).__doc__
        for paper in re.findall(r"\[(\d{4}\.\d{5})\]", papers):
            assert f"arXiv:{paper}" in docstring, f"{file} does not name {paper}"


def test_every_name_on_the_migration_page_exists():
    import reinforge.finetuning as harness

    text = (DOCS / "coming-from-nat.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:ART|Trajectory|Trainer)\w+)`", text):
        assert hasattr(harness, name), name


def test_every_command_on_the_pages_exists():
    from reinforge.cli import COMMANDS

    for path in DOCS.rglob("*.md"):
        for command in re.findall(r"`reinforge ([a-z]+)", path.read_text(encoding="utf-8")):
            assert command in COMMANDS, f"{path.name} names reinforge {command}"
