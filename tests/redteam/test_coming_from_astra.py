"""Programs in the style of astra-rl's documentation and examples run with imports and addresses changed.

The printed example of its trainer is in test_redteam_example.py.
"""

import gc
import importlib
import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from reinforge.redteam import datasets
from tests.models import make_tiny_model

PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))

PAGE = (PROGRAMS.parents[2] / "docs" / "coming-from-astra-rl.md").read_text(encoding="utf-8")
ADDRESSES = PAGE[PAGE.index("## Where names are") : PAGE.index("## Your own system")]

PROMPTS = {"train": ["My day was", "They said that"], "dev": ["On Monday"], "test": ["The desk", "A visitor", "Rain"]}

DETOXIFY = """
class Detoxify:
    def __init__(self, variant): self.variant = variant
    def predict(self, texts): return {"toxicity": [text.count("e") / (1 + len(text)) for text in texts]}
"""
"""A stand-in for the package detoxify: the score of a text is its share of the letter e."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models in place of the two that the programs name."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "gpt2": make_tiny_model(folder / "gpt2", "gpt2"),
        "meta-llama/Llama-3.2-1B": make_tiny_model(folder / "llama", "llama"),
    }


@pytest.fixture
def run_program(tmp_path, monkeypatch, models):
    places = {f'"{name}"': f'"{folder}"' for name, folder in models.items()}
    changes = {"astra_rl": "reinforge.redteam", '"cuda"': '"cpu"', **places}
    for path in PROGRAMS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for old, new in changes.items():
            text = text.replace(old, new)
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    (tmp_path / "detoxify.py").write_text(DETOXIFY)
    (tmp_path / "data").mkdir()
    for split, prompts in PROMPTS.items():
        (tmp_path / "data" / f"convokit_reddit_prompts_{split}.json").write_text(json.dumps(prompts))
    monkeypatch.setenv(datasets.VARIABLE, str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    torch.manual_seed(0)

    def run(name):
        return runpy.run_path(str(tmp_path / f"{name}.py"), run_name="__main__")["result"]

    yield run
    for name in (*NAMES, "detoxify"):
        sys.modules.pop(name, None)
    gc.collect()


def test_programs_are_written_for_astra_rl():
    assert len(NAMES) == 9, "eight programs and the system that most of them share"
    for name in NAMES:
        text = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
        assert "reinforge" not in text, "a program is written for astra-rl"
        assert "astra_rl" in text


@pytest.mark.slow
def test_own_system_train_then_eval(run_program, tmp_path):
    trainer = run_program("own_system_train")
    assert trainer.best_score is not None
    saved = [path.name for path in (tmp_path / "checkpoints" / "gpt2").iterdir()]
    assert sorted(saved) == ["best", "last"]
    from transformers import AutoModelForCausalLM

    last = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints/gpt2/last").state_dict()
    assert all(torch.equal(value, last[name]) for name, value in trainer.system.tester.state_dict().items())
    base = trainer.system.target.state_dict()
    assert not all(torch.equal(value, last[name]) for name, value in base.items()), "the tester was trained"

    metrics = run_program("own_system_eval")
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["summary"]["n_rollouts"] == metrics["summary"]["n_rollouts"] == 2
    assert [len(row["per_turn"]) for row in written["details"]] == [3, 3]
    assert written["details"][0]["overall"]["opening"] == "The desk"
    assert written["summary"]["perplexity"]["all"] > 50, "a random model of 320 tokens, not diluted by the context"


@pytest.mark.slow
def test_hugging_face_train_then_eval(run_program, tmp_path):
    run_program("hugging_face_train").close()
    assert {path.name for path in (tmp_path / "checkpoints/huggingface").iterdir()} == {"best", "last"}
    system, metrics = run_program("hugging_face_eval")
    system.close()
    assert metrics["summary"]["n_rollouts"] == 2
    assert (
        "pct_rollouts_with_target_toxicity/attack_success_rate"
        in json.loads((tmp_path / "metrics.json").read_text())["summary"]
    )


@pytest.mark.slow
def test_ppo(run_program, caplog):
    system, logs = run_program("ppo")
    assert "value() is exactly 0 for the first token of all 14 probes" in caplog.text
    assert logs[0]["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert all(math.isfinite(row["training/policy_loss"] + row["training/value_loss"]) for row in logs)
    assert any(p.grad is None for p in system.vf.parameters()), "zeroed after the last step"
    assert len(logs) == 2 * math.ceil(2 * (2 + 4 + 8) / 4)


@pytest.mark.slow
def test_own_evaluator(run_program, tmp_path):
    metrics = run_program("own_evaluator")
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert [row["overall"]["num_turns"] for row in metrics["details"]] == [2, 2]
    assert metrics["summary"]["worst"] == max(
        turn["target_toxicity"] for row in metrics["details"] for turn in row["per_turn"]
    )


@pytest.mark.slow
def test_own_solver(run_program):
    trainer, changed = run_program("own_solver")
    assert changed
    assert trainer._global_step_counter == 2 * math.ceil((2 + 4) / 4)


@pytest.mark.slow
def test_own_sampler(run_program):
    graph, sizes = run_program("own_sampler")
    assert sizes == [2, 2, 2], "three chains of two turns, in batches of two"
    [first] = graph.children
    assert type(first).__name__ == "ScoredNode"
    assert first.children[0].context == first.context + first.probe + first.response


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, models, capsys):
    """Every Python block of the page in order, with tiny models."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    folder = str(models["meta-llama/Llama-3.2-1B"])
    names = {}
    for block in blocks:
        for address in ("path/to/tester", "path/to/target"):
            block = block.replace(address, folder)
        block = block.replace('"cpu")', '"cpu", max_tokens=4, target_max_tokens=4)')
        exec(compile(block, "docs/coming-from-astra-rl.md", "exec"), names)  # the page is ours
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "300"
    assert (tmp_path / "testers" / "last" / "config.json").exists()
    assert (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize("module", sorted(set(re.findall(r"`(?:astra_rl)?(\.[a-z_.]+)`", ADDRESSES))))
def test_every_address_of_the_page_resolves(module):
    assert importlib.import_module(f"reinforge.redteam{module}") is not None
