"""A job as a run: each hyperparameter of the request is one of the run's settings."""

import json
import shutil

import pytest

from reinforge.config import dump
from reinforge.config.dump import dump_config
from reinforge.config.loader import build_config, load_config
from reinforge.config.policy import PolicyConfig
from reinforge.engine.learning_rate import IMITATION, choose_learning_rate
from reinforge.protocols.openai.graders.schema import parse_grader
from reinforge.protocols.openai.server.plan import JobInput, plan_job
from reinforge.protocols.openai.server.request import read_job
from reinforge.trainer.builders.group import select_epoch_examples
from reinforge.types.sample import LossSpec


def plan(folder, policy, kind="supervised", num_rows=10, **hyperparameters):
    method = {"type": kind, kind: {"hyperparameters": hyperparameters}}
    job = read_job({"model": "m", "training_file": "file-1", "method": method, "seed": 5})
    return plan_job(JobInput(job, policy, folder, num_rows))


def test_hyperparameters_are_settings_of_the_run(tmp_path, tiny_model_dir):
    policy = PolicyConfig(model=str(tiny_model_dir), lora={"r": 4})
    made = plan(tmp_path, policy, n_epochs=2, batch_size=4, learning_rate_multiplier=0.5)
    settings = made.config["finetuning"]
    usual = choose_learning_rate(policy, 100_000, uses_lora=True, loss=LossSpec(IMITATION)).value
    assert (settings["num_epochs"], settings["seed"], made.num_steps) == (2, 5, 6), "10 rows by 4, twice"
    assert settings["policy"]["batch"] == {"batch_size": 4}
    assert settings["policy"]["optimizer"]["learning_rate"] == pytest.approx(usual / 2)
    made = plan(tmp_path, policy, "dpo", n_epochs=1, batch_size=4, beta=0.3)
    settings = made.config["finetuning"]
    assert settings["algorithm"] == {"_type": "dpo", "beta": 0.3}
    assert settings["policy"]["batch"] == {"batch_size": 8}, "a pair is two samples"
    assert "optimizer" not in settings["policy"], "the rate is the run's own"


@pytest.mark.parametrize(("num_rows", "batch_size"), [(31, 16), (6, 4), (5, 5)])
def test_each_pass_of_a_reinforcement_job_trains_every_row_once(tmp_path, tiny_model_dir, num_rows, batch_size):
    grader = {"type": "string_check", "name": "g", "operation": "eq", "input": "a", "reference": "b"}
    settings = {"grader": grader, "hyperparameters": {"n_epochs": 2, "batch_size": batch_size}}
    method = {"type": "reinforcement", "reinforcement": settings}
    job = read_job({"model": "m", "training_file": "file-1", "method": method, "seed": 5})
    policy = PolicyConfig(model=str(tiny_model_dir), lora={"r": 4})
    made = plan_job(JobInput(job, policy, tmp_path, num_rows, grader=parse_grader(grader)))
    builder = next(iter(made.config["trajectory_builders"].values()))
    ids = [str(number) for number in range(num_rows)]
    epochs = [
        select_epoch_examples(ids, builder["examples_per_epoch"], 5, epoch, drop_last=builder["drop_last"])
        for epoch in range(made.config["finetuning"]["num_epochs"])
    ]
    assert len(epochs) == made.num_steps
    assert sorted(id_ for epoch in epochs for id_ in epoch) == sorted(ids * 2)


SECRET = "OPERATORS_SECRET"
TEXTS = (
    "${OPERATORS_SECRET}",
    "$${OPERATORS_SECRET} and $$${OPERATORS_SECRET:-x}",
    "${",
    "line\n\x1b${OPERATORS_SECRET}",
)


def load_again(folder, grader, monkeypatch):
    """Returns the grader of a job as the operator gets it with `reinforge finetune --resume`, and the file."""
    monkeypatch.setenv(SECRET, "s3cret")
    method = {"type": "reinforcement", "reinforcement": {"grader": grader}}
    job = read_job({"model": "m", "training_file": "file-1", "method": method, "seed": 5})
    made = plan_job(JobInput(job, PolicyConfig(model="m"), folder, 4, grader=parse_grader(grader)))
    text = dump_config(build_config(json.loads(json.dumps(made.config))))
    (folder / "config.yml").write_text(text)
    return load_config(folder / "config.yml").config.eval.evaluators["score"].grader, text


@pytest.mark.parametrize("text", TEXTS)
def test_variables_in_a_clients_text_stay_text_when_its_run_is_resumed_by_hand(tmp_path, monkeypatch, text):
    """What a client sends must not read the environment of the operator, not even in the second process."""
    leaf = {"type": "string_check", "name": text, "operation": "eq", "input": text, "reference": text}
    grader = {"type": "multi", "name": text, "graders": {"a": leaf}, "calculate_output": "a"}
    again, written = load_again(tmp_path, grader, monkeypatch)
    assert again == grader
    assert "s3cret" not in written


def test_without_escapes_a_clients_text_would_read_the_operators_environment(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(dump, "escape", lambda text: text)
    leaf = {"type": "string_check", "name": "g", "operation": "eq", "input": TEXTS[0], "reference": "r"}
    again, _ = load_again(tmp_path, leaf, monkeypatch)
    assert again["input"] == "s3cret"


def test_the_operators_own_variables_are_expanded_again(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET, "s3cret")
    model = "{_type: openai, model_name: '${OPERATORS_SECRET}'}"
    (tmp_path / "run.yml").write_text(f"llms: {{m: {model}}}\nworkflow: {{_type: chat, llm: m}}")
    text = dump_config(load_config(tmp_path / "run.yml"))
    assert "s3cret" not in text
    (tmp_path / "config.yml").write_text(text)
    assert load_config(tmp_path / "config.yml").config.llms["m"].model_name == "s3cret"


@pytest.mark.parametrize("is_adapter", [False, True])
def test_the_rate_of_a_model_of_the_hub_is_multiplied(tmp_path, tiny_model_dir, monkeypatch, is_adapter):
    """The size of a hub id is that of the weights in the local cache, also below an adapter that a job has made."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(tiny_model_dir, model / "snapshots" / "abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    policy = PolicyConfig(model="org/tiny", lora={"r": 4})
    if is_adapter:
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/tiny"}))
        policy = PolicyConfig(model=str(adapter))
    made = plan(tmp_path, policy, learning_rate_multiplier=2)
    rate = made.config["finetuning"]["policy"]["optimizer"]["learning_rate"]
    local = PolicyConfig(model=str(tiny_model_dir), lora={"r": 4})
    assert (
        rate
        == plan(tmp_path, local, learning_rate_multiplier=2).config["finetuning"]["policy"]["optimizer"][
            "learning_rate"
        ]
    )
