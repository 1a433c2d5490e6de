"""A tiny model's reward goes up through the whole path, and every file of the run folder is there and true."""

import json
import sys

import pytest
import zstandard

from tests.journal_rows import read_rows
from tests.project import Project


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model_dir):
    """A project after its run, and what the run printed."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        project = Project(folder, tiny_model_dir)
        result = project.learn().finetune("--require_improvement", code=0)
    sys.modules.pop("task", None)
    return project, result.output


def test_the_reward_goes_up_and_the_files_show_it(trained):
    project, output = trained
    summary = project.summary
    assert summary["status"] == "completed"
    assert summary["promoted"] is True
    assert summary["improvement"]["ci_low"] > 0
    assert summary["confirm_tuned"]["mean"] - summary["confirm_base"]["mean"] > 0.05
    assert [v["version"] for v in summary["policy_versions"]] == [0, 1, 2, 3]
    assert len({v["fingerprint"] for v in summary["policy_versions"]}) == 4
    assert sum(summary["episodes"].values()) == read_rows(project.run, "SELECT count(*) FROM episodes")[0][0]
    assert "improved the agent" in output


def test_every_file_of_the_run_folder(trained):
    project, _ = trained
    names = {path.name for path in project.run.iterdir()} - {".lock", "run.sqlite-wal", "run.sqlite-shm"}
    assert names >= {
        "config.yml", "run.sqlite", "episodes", "checkpoints", "run.log", "training_metrics.jsonl",
        "reward_history.json", "validation_history.json", "curriculum_state.json", "reward_plot.png", "summary.json",
        "report.md", "report.html",
    }  # fmt: skip
    exported = project.run / "episodes" / "epoch-0001.jsonl.zst"
    lines = zstandard.ZstdDecompressor().decompress(exported.read_bytes(), max_output_size=1 << 24).splitlines()
    episode = json.loads(lines[0])
    assert len(lines) == 8 * 8
    call = episode["calls"][0]
    assert len(call["token_ids"]) == len(call["logprobs"]) > 0
    assert (call["policy_version"], episode["outcome"]) == (1, "ok")
    history = json.loads((project.run / "validation_history.json").read_text())
    assert [row["epoch"] for row in history] == [-1, 2], "the base and the final model"
    assert (project.run / "reward_plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_promoted_model_is_the_best_checkpoint_and_loads_in_transformers(trained):
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    project, _ = trained
    model = AutoModelForCausalLM.from_pretrained(project.run / "model")
    assert AutoTokenizer.from_pretrained(project.run / "model").chat_template
    best = load_file(project.run / project.summary["checkpoint"] / "model.safetensors")
    name, tensor = next(iter(model.state_dict().items()))
    assert (best[name] == tensor.numpy()).all()
    assert not (project.run / "model" / "training").exists()


def test_an_agent_that_cannot_improve_is_not_promoted_and_says_so(project):
    """The reward is a fair coin of the example's world: there is nothing to learn."""
    project.write("task.py", _COIN)
    project.set("finetuning.reward_function.name", "coin")
    project.set("eval.evaluators", {"coin": {"_type": "python", "function": "task:coin"}})
    result = project.shrink(2).finetune("--require_improvement", code=3)
    assert project.summary["promoted"] is False
    assert not (project.run / "model").exists()
    assert "promoted    no" in result.output
    note = 'no reward plot: matplotlib is not installed; install it with pip install "reinforge[plot]"'
    assert note in result.output, "the other tests run without it, too"
    assert not (project.run / "reward_plot.png").exists()
    assert "reward_plot.png" not in (project.run / "report.md").read_text() + result.output


_COIN = """
import zlib

async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
    return reply.choices[0].message.content

def coin(output, expected):
    return float(zlib.crc32(output.encode()) % 2)
"""


@pytest.mark.slow
def test_the_watchdog_names_the_stage_where_a_run_hangs(project):
    project.write_agent(_SLOW)
    project.set("finetuning.limits", {"stage_timeout_s": 0.3}).shrink()
    project.finetune(code=0)
    log = (project.run / "run.log").read_text()
    assert "no progress for" in log
    assert "in stage BASELINE" in log
    assert "episodes are running" in log


_SLOW = """
import asyncio
from pathlib import Path

hangs = [True]

async def agent(item, llm, context):
    while hangs and "in stage BASELINE" not in Path("runs/r/run.log").read_text():
        await asyncio.sleep(0.02)
    hangs.clear()
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
    return reply.choices[0].message.content
"""
