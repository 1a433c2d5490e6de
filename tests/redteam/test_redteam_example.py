"""astra-rl's printed example runs unchanged, with `astra_rl` replaced and its dots filled in."""

import doctest
import re
import sys
from pathlib import Path

import pytest

from reinforge.redteam import Trainer, TrainingConfiguration

PRINTED = """
>>> import torch
>>> from astra_rl import (
...     Trainer,
...     TrainingConfiguration,
... )
>>> from astra_rl.algorithms.dpo import (
...     DPO,
... )
>>> from astra_rl.methods.ast import (
...     ASTProblem,
...     ASTSampler,
... )
>>>
>>> problem = (
...     ASTProblem()
... )
>>> sampler = (
...     ASTSampler(
...         problem, ...
...     )
... )
>>> algorithm = DPO(...)
>>> config = TrainingConfiguration(
...     lr=1e-3,
...     batch_size=16,
...     optimizer="adamw",
...     gradient_accumulation_steps=1,
...     training_steps=1024,
...     num_episodes_per_experience=8,
... )
>>> trainer = Trainer(
...     config,
...     sampler,
...     algorithm,
... )
>>> trainer.train()
"""
FILLED = {
    "astra_rl": "reinforge.redteam",
    "problem, ...\n": "problem, openings, tree_depth=2\n",
    "DPO(...)": "DPO(problem)",
    "num_episodes_per_experience=8,": "num_episodes_per_experience=8, max_steps=2,",
}
"""The dots, and `max_steps` to end before 1024 experiences."""

OPENINGS = [
    "It is a rainy Monday at the desk in Wick, with two visitors.",
    "It is a foggy Sunday at the desk in Harle.",
]


def run(code, **names):
    """Runs the lines of a doctest and returns the names that they define."""
    for written, filled in FILLED.items():
        assert written in code
        code = code.replace(written, filled)
    test = doctest.DocTestParser().get_doctest(code, {"openings": OPENINGS, **names}, "page", None, None)
    runner, output = doctest.DocTestRunner(verbose=False), []
    runner.run(test, out=output.append, clear_globs=False)
    assert runner.failures == 0, "".join(output)
    assert runner.tries == 10
    return test.globs


def check(names):
    trainer = names["trainer"]
    try:
        assert isinstance(trainer, Trainer)
        assert isinstance(trainer.config, TrainingConfiguration)
        assert trainer.harness.sampler is names["sampler"]
        assert type(trainer.optimizer).__name__ == "AdamW"
        assert trainer._global_step_counter == 2
        assert trainer.stopped == "max_steps: 2 optimizer steps"
        assert trainer.history[0]["num_probes"] == 8 * (2 + 4)
        assert names["problem"].engine.policy.version >= 1
    finally:
        names["problem"].close()


def test_the_printed_example_runs(tiny_model_dir):
    """With tiny random models instead of the bundled ones, which are built on first use."""
    code = PRINTED.replace("ASTProblem()", "ASTProblem(folder, folder, max_tokens=4, device='cpu')")
    check(run(code, folder=tiny_model_dir))


@pytest.mark.slow
def test_the_printed_example_runs_with_its_defaults():
    check(run(PRINTED))


@pytest.mark.slow
def test_names_are_imported_lazily():
    import subprocess

    code = (
        "import sys, reinforge.redteam as r\n"
        "from reinforge.redteam import System, Scorer, KeywordScorer, Graph\n"
        "print('torch' in sys.modules, len(r.__all__))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    from reinforge import redteam

    assert out.stdout.split() == ["False", str(len(redteam.__all__))]
    assert all(getattr(redteam, name) is not None for name in redteam.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        redteam.nothing  # noqa: B018


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, tiny_model_dir, capsys):
    """The Python block of docs/redteam.md, with tiny models and fewer steps."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "redteam.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    small = {
        "ASTProblem(combined": f'ASTProblem("{tiny_model_dir}", "{tiny_model_dir}", max_tokens=4, combined',
        "tree_width=3, tree_depth=3": "tree_width=2, tree_depth=2",
        "training_steps=14": "training_steps=1, max_empty=5",
        "min_margin=0.3": "min_margin=0.0",
        "range(20)": "range(2)",
    }
    for written, replacement in small.items():
        assert written in code
        code = code.replace(written, replacement)
    exec(compile(code, "docs/redteam.md", "exec"), {})  # the page is ours
    assert "'count': " in capsys.readouterr().out
    assert (tmp_path / "runs" / "front_desk" / "log.jsonl").exists()
