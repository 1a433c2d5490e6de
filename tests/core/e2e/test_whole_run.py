"""A tiny model's reward goes up through the whole path, and every file of the run folder is there and true."""

import asyncio
import json
import sqlite3
import sys

import pytest
import yaml
import zstandard

import reinforge
from reinforge.config.loader import load_config
from reinforge.runs.progress import SilentProgress


def test_the_reward_goes_up_and_the_files_show_it(project):
    result = project.finetune("--require_improvement")
    assert result.exit_code == 0, result.output
    summary = project.summary
    assert summary["status"] == "completed"
    assert summary["promoted"] is True
    assert summary["improvement"]["ci_low"] > 0
    assert summary["confirm_tuned"]["mean"] - summary["confirm_base"]["mean"] > 0.05
    assert [v["version"] for v in summary["policy_versions"]] == [0, 1, 2, 3, 4, 5]
    assert len({v["fingerprint"] for v in summary["policy_versions"]}) == 6
    assert sum(summary["episodes"].values()) == _count(project, "SELECT count(*) FROM episodes")
    assert "improved the agent" in result.output


def test_every_file_of_the_run_folder(project, plots):
    project.set("finetuning.num_epochs", 2)
    assert project.finetune().exit_code == 0
    names = {path.name for path in project.run.iterdir()} - {".lock", "run.sqlite-wal", "run.sqlite-shm"}
    assert names >= {
        "config.yml", "run.sqlite", "episodes", "checkpoints", "run.log", "training_metrics.jsonl",
        "reward_history.json", "validation_history.json", "curriculum_state.json", "reward_plot.png", "summary.json",
        "report.md",
    }  # fmt: skip
    exported = project.run / "episodes" / "epoch-0001.jsonl.zst"
    lines = zstandard.ZstdDecompressor().decompress(exported.read_bytes(), max_output_size=1 << 24).splitlines()
    episode = json.loads(lines[0])
    assert len(lines) == 16 * 8
    call = episode["calls"][0]
    assert len(call["token_ids"]) == len(call["logprobs"]) > 0
    assert (call["policy_version"], episode["outcome"]) == (1, "ok")
    history = json.loads((project.run / "validation_history.json").read_text())
    assert [row["epoch"] for row in history] == [-1, 1], "the base and the final model"
    assert (project.run / "reward_plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_written_configuration_loads_again_with_every_default(project):
    project.set("finetuning.num_epochs", 1)
    assert project.finetune().exit_code == 0
    text = (project.run / "config.yml").read_text()
    written = yaml.safe_load(text)
    assert written["finetuning"]["algorithm"]["_type"] == "grpo"
    assert written["finetuning"]["algorithm"]["kl_coef"] == 0
    (project.folder / "again.yml").write_text(text)
    assert load_config(project.folder / "again.yml").config.finetuning.num_epochs == 1


def test_the_promoted_model_is_the_best_checkpoint_and_loads_in_transformers(project):
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert project.finetune().exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(project.run / "model")
    assert AutoTokenizer.from_pretrained(project.run / "model").chat_template
    best = load_file(project.run / project.summary["checkpoint"] / "model.safetensors")
    name, tensor = next(iter(model.state_dict().items()))
    assert (best[name] == tensor.numpy()).all()
    assert not (project.run / "model" / "training").exists()


@pytest.mark.slow
def test_two_runs_with_one_seed_collect_the_same_first_epoch(project):
    """Draws depend on seed, episode and call, not on what else happens to run."""
    project.set("finetuning.num_epochs", 1)
    assert project.finetune().exit_code == 0
    query = (
        "SELECT key, json_extract(data, '$.output') FROM episodes WHERE phase = 'validate' AND epoch = -1 ORDER BY key"
    )
    first = _rows(project, query)
    project.run.rename(project.folder / "first")
    assert project.finetune().exit_code == 0
    assert _rows(project, query) == first


def test_an_agent_that_cannot_improve_is_not_promoted_and_says_so(project):
    """The reward is a fair coin of the example's world: there is nothing to learn."""
    project.write("task.py", _COIN)
    project.set("finetuning.reward_function.name", "coin")
    project.set("eval.evaluators", {"coin": {"_type": "python", "function": "task:coin"}})
    project.set("finetuning.num_epochs", 2)
    result = project.finetune("--require_improvement")
    assert result.exit_code == 3, result.output
    assert project.summary["promoted"] is False
    assert not (project.run / "model").exists()
    assert "promoted    no" in result.output


_COIN = """
async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
    return reply.choices[0].message.content

def coin(output, expected):
    return float(hash_of(output) % 2)

def hash_of(text):
    import hashlib
    return hashlib.sha256(text.encode()).digest()[0]
"""


async def test_finetune_runs_inside_a_running_event_loop(tmp_path, tiny_model_dir):
    """As in a notebook: the caller's loop is running while the run has one of its own."""
    assert asyncio.get_running_loop().is_running()

    def agent(item, llm, context):
        reply = llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=3)
        return reply.choices[0].message.content

    summary = reinforge.finetune(
        agent,
        [{"id": str(i), "question": f"q{i}", "answer": "a"} for i in range(24)],
        lambda output, expected: len(set(output)) / 10,
        tiny_model_dir,
        epochs=1,
        num_generations=4,
        output_dir=tmp_path,
        settings={"curriculum_learning": {"min_reward_diff": 0.0}},
        progress=SilentProgress(),
    )
    assert summary.status == "completed"
    assert (summary.folder / "summary.json").exists()


def test_sft_trains_through_the_same_command(project):
    project.set("finetuning.algorithm", {"_type": "sft", "min_reward": 0.3})
    result = project.finetune()
    assert result.exit_code == 0, result.output
    assert project.summary["final"]["mean"] > project.summary["baseline"]["mean"]


def _count(project, query):
    return _rows(project, query)[0][0]


def _rows(project, query):
    database = sqlite3.connect(project.run / "run.sqlite")
    try:
        return database.execute(query).fetchall()
    finally:
        database.close()


def test_the_watchdog_names_the_stage_where_a_run_hangs(project):
    project.write("task.py", _SLOW)
    project.set("finetuning.limits", {"stage_timeout_s": 0.3}).set("finetuning.num_epochs", 1)
    assert project.finetune().exit_code == 0
    log = (project.run / "run.log").read_text()
    assert "no progress for" in log
    assert "in stage BASELINE" in log
    assert "episodes are running" in log


_SLOW = """
import asyncio

hangs = [2.0]

async def agent(item, llm, context):
    if hangs:
        await asyncio.sleep(hangs.pop())
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
    return reply.choices[0].message.content

def vowels(output, expected):
    return sum(letter in "aeiou" for letter in output) / max(1, len(output))
"""


@pytest.mark.slow
def test_a_whole_run_with_adapters(project):
    """It improves, ships adapters that PEFT reads, and `eval` runs the model with them."""
    from click.testing import CliRunner

    from reinforge.cli import main

    project.set("finetuning.policy.lora", {"r": 16}).set("finetuning.policy.optimizer.learning_rate", 3e-2)
    project.set("finetuning.num_epochs", 10)
    result = project.finetune()
    assert result.exit_code == 0, result.output
    assert project.summary["promoted"], project.summary["reason"]
    settings = json.loads((project.run / "model" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == project.settings["finetuning"]["policy"]["model"]
    found = CliRunner().invoke(main, ["eval", "run.yml", "--json", "--model", "runs/r", "--split", "confirm"])
    assert found.exit_code == 0, found.output
    mean = json.loads(found.stdout)["metrics"]["vowels"]["mean"]
    assert mean > project.summary["confirm_base"]["ci_high"], "the adapters are used"


def test_a_run_without_matplotlib_says_that_there_is_no_plot(project, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = project.set("finetuning.num_epochs", 1).finetune()
    assert result.exit_code == 0, result.output
    assert 'no reward plot: matplotlib is not installed; install it with pip install "reinforge[plot]"' in result.output
    assert not (project.run / "reward_plot.png").exists()
    assert "reward_plot.png" not in (project.run / "report.md").read_text()
    assert "reward_plot.png" not in result.output
