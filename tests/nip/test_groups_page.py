"""The examples of experiments and shared-model groups in docs/multiagent.md run with a tiny model."""

import re

import pytest

import tests.babble  # noqa: F401  in its protocol any reply of an untrained model is a decision
from tests.generated import DOCS

PAGE = (DOCS / "multiagent.md").read_text(encoding="utf-8")


def run_block(name, model):
    (code,) = re.findall(rf"^```python\n(# {re.escape(name)}\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert '"nip"' in code
    code = code.replace("path/to/model", str(model)).replace('"nip"', '"babble"')
    code = re.sub(r"^    nip_protocol=.*\n", "", code, flags=re.MULTILINE)
    exec(compile(code, "docs/multiagent.md", "exec"), {})  # the page is ours


@pytest.mark.slow
def test_the_experiment_of_the_page_runs(tmp_path, monkeypatch, tiny_model_dir, capsys):
    monkeypatch.chdir(tmp_path)
    run_block("experiment.py", tiny_model_dir)
    assert capsys.readouterr().out.splitlines() == ["completed .reinforge/runs/even"]


@pytest.mark.slow
def test_the_loop_of_the_page_runs(tmp_path, monkeypatch, tiny_model_dir, capsys):
    monkeypatch.chdir(tmp_path)
    run_block("groups.py", tiny_model_dir)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"0 16 {tmp_path}")
    assert second.startswith(f"1 16 {tmp_path}")
    assert first.split()[-1] != second.split()[-1]
