"""The model card: what a model, a user or a service wrote is shown as text, and nothing of this machine leaks."""

from pathlib import Path

import yaml

from reinforge.evaluation.statistics import Improvement
from reinforge.exports.artifact import Artifact
from reinforge.exports.card import format_card
from reinforge.exports.judge import Judgement, Parity
from reinforge.exports.trained_model import BaseModel, TrainedModel
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.summary import RunSummary
from reinforge.types.evaluation import MetricSummary

HOSTILE = "<script>alert(1)</script> | ![x](http://evil) `sh`\n---\nlicense: mit"


def make_model(folder, **summary):
    RunJournal(folder).close()
    config = {
        "workflow": {"_type": "python", "function": f"task:{HOSTILE}"},
        "eval": {
            "general": {"dataset": {"_type": "jsonl", "file_path": "/home/me/secret/data.jsonl"}},
            "evaluators": {HOSTILE: {"_type": "python", "function": "task:right"}},
        },
        "finetuning": {"policy": {"lora": {"r": 8}, "history": "splice"}, "seed": 3, "sampling": {"temperature": 0.5}},
    }
    known = {"promoted": True, "reason": HOSTILE, "confirm_base": figure(0.25), "confirm_tuned": figure(0.5), **summary}
    run_summary = RunSummary(folder.name, "completed", folder, **known)
    base = BaseModel("org/base", "org/base", "abc123", "Apache-2.0")
    return TrainedModel(folder, folder / "model", "the promoted model", None, run_summary, config, base)


def figure(mean):
    return MetricSummary("right", mean, mean - 0.125, mean + 0.125, 40, 0)


def read(text):
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_a_card(tmp_path):
    model = make_model(tmp_path / "r")
    difference = Improvement(-0.01, -0.05, 0.03, 0.6, 40, "t")
    judgement = Judgement(
        "transformers 5", Parity(16, 16, 16, 90, 90, 1e-6, 1e-7), figure(0.5), figure(0.49), difference
    )
    front, body = read(format_card(model, Artifact(tmp_path / "out", "float32", model.base), "merged", judgement))
    assert front["base_model"] == "org/base"
    assert front["license"] == "apache-2.0"
    assert front["library_name"] == "transformers"
    for text in (
        "trained from org/base, revision abc123 (license Apache-2.0)",
        "| base model | 0.250 [0.125, 0.375] | 40 |",
        "| trained model | 0.500 [0.375, 0.625] | 40 |",
        "| this export | 0.490 [0.365, 0.615] | 40 |",
        "| difference | -0.010 [-0.050, +0.030] | 40 |",
        "16 of 16 greedy replies have the same tokens",
        "temperature 0.5",
        "| history | splice:",
        "| LoRA rank | 8 |",
        "| data | data.jsonl:",
    ):
        assert text in body, text


def test_foreign_text_stays_text(tmp_path):
    model = make_model(tmp_path / "r", warnings=[HOSTILE])
    judgement = Judgement(HOSTILE, note=HOSTILE)
    base = BaseModel(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    front, body = read(format_card(model, Artifact(tmp_path / "o", "float32", base), "merged", judgement))
    assert front["license"] == "other"
    assert "base_model" not in front
    for text in ("<script>", "![x](http", "`sh`"):
        assert text not in body, text
    assert "/home/me" not in body


def test_what_was_not_promoted_or_not_judged_says_so(tmp_path):
    model = make_model(tmp_path / "r", promoted=None, confirm_base=None, confirm_tuned=None, baseline=figure(0.3))
    text = format_card(model, Artifact(Path("m-q8_0.gguf"), "q8_0", model.base), "gguf", None)
    assert "Promoted: **no verdict**" in text
    assert "select: it chose the checkpoint" in text
    assert "| trained model | unknown |  |" in text
    assert "Not judged" in text
    assert "llama-server -m m-q8_0.gguf --jinja" in text


def test_a_card_holds_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwx")
    model = make_model(tmp_path / "r", reason="the service said hf_abcdefghijklmnopqrstuvwx")
    assert "abcdefghijklmnop" not in format_card(model, Artifact(Path("o"), "float32", model.base), "merged", None)
