"""The trainers of neural-interactive-proofs from Python: two agents with an adapter each on one tiny model."""

import json

import pytest
from safetensors.torch import load_file

import tests.babble  # noqa: F401  registers its protocol
from reinforge.config.loader import build_config
from reinforge.errors import BudgetReached, ConfigError
from reinforge.multiagent import ExperimentSettings, HyperParameters, experiment_config, run_experiment
from reinforge.runs.episodes import read_outputs
from reinforge.runs.saved_model import find_model
from reinforge.trainer.api import run_blocking
from reinforge.trainer.options import RunOptions
from tests.models import make_tiny_model

ROWS = [{"id": str(i), "question": f"say {i}", "answer": "accept"} for i in range(32)]
EASY = {
    "workflow": {"verifier_first": False, "max_message_rounds": 2},
    "finetuning": {
        "device": "cpu",
        "policy": {"batch": {"steps_per_job": 2}, "schedule": {"warmup_steps": 0}},
        "curriculum_learning": {"min_reward_diff": 0.01},
    },
}


def experiment(model, trainer, agents=None, **fields):
    params = {"model_name": str(model), "max_tokens_per_message": 4, "lora_rank": 4}
    given = {
        name: {**params, "prompt": f"{name}: $question", **(agents or {}).get(name, {})}
        for name in ("prover", "verifier")
    }
    rl = {"num_iterations": 2, "rollouts_per_iteration": 8, "lr": 0.01, "num_epochs": 1}
    return HyperParameters("vowels", trainer, "unused.jsonl", "babble", agents=given, rl=rl, **fields)


def run(tmp_path, params, run_id="r", **changes):
    overrides = {**EASY, "finetuning": {**EASY["finetuning"], **changes}}
    return run_experiment(params, ExperimentSettings(run_id, output_dir=tmp_path / "runs"), ROWS, overrides=overrides)


def metrics(tmp_path, run_id="r"):
    lines = (tmp_path / "runs" / run_id / "training_metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("trainer", "fields"),
    [
        pytest.param("pure_text_ei", {}, marks=pytest.mark.slow),  # fast: a model for each group
        pytest.param("pure_text_malt", {}, marks=pytest.mark.slow),  # fast: tests/core/e2e/test_agents.py
        ("pure_text_grpo", {"pure_text_grpo": {"num_generations": 4}}),
    ],
)
def test_a_trainer_runs_to_its_verdict(tmp_path, tiny_model_dir, trainer, fields):
    summary = run(tmp_path, experiment(tiny_model_dir, trainer, **fields))
    assert summary.status == "completed"
    assert [row["num_updates"] > 0 for row in metrics(tmp_path)] == [True] * 2, "the last iteration is trained too"
    checkpoint = sorted((summary.folder / "checkpoints").iterdir())[-1]
    assert {path.parent.name for path in checkpoint.glob("*/adapter_config.json")} == {"prover", "verifier"}
    assert summary.final is not None, "the last model is tested"
    assert (summary.folder / "transcripts").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_each_group_has_a_model_of_its_own(tmp_path, tiny_model_dir, rank):
    """All weights of two models, or an adapter of each: trained, resumed, saved side by side, and evaluated."""
    models = {"prover": tiny_model_dir, "verifier": make_tiny_model(tmp_path / "other", seed=1)}
    agents = {name: {"model_name": str(model), "lora_rank": rank} for name, model in models.items()}
    params = experiment(tiny_model_dir, "pure_text_ei", agents)
    with pytest.raises(BudgetReached):
        run(tmp_path, params, limits={"max_tokens": 60})
    log = (tmp_path / "runs" / "r" / "run.log").read_text()
    summary = run(tmp_path, params)
    assert summary.status == "completed"
    resumed_log = (tmp_path / "runs" / "r" / "run.log").read_text()
    assert resumed_log.startswith(log)
    assert len(resumed_log) > len(log)
    assert len(metrics(tmp_path)) == 2
    assert all(part["num_updates"] > 0 for row in metrics(tmp_path) for part in row["groups"].values())
    checkpoints = sorted((summary.folder / "checkpoints").iterdir())
    for name in models:
        first, last = (load_weights(folder / name) for folder in (checkpoints[0], checkpoints[-1]))
        assert any((first[key] != last[key]).any() for key in first), f"{name} is trained"
    found = find_model("r", tmp_path / "runs")
    assert (found.adapters, found.run) == (("prover", "verifier"), summary.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "nowhere"}, "no backend named nowhere"),
        ({"models": {"prover": "m"}}, "there are models for prover, but llms has the adapters prover, verifier"),
    ],
)
def test_groups_that_do_not_fit_are_refused(tmp_path, change, message):
    agents = {"prover": {"model_name": "m"}, "verifier": {"model_name": "n"}}
    data = experiment_config(experiment("m", "pure_text_ei", agents), ExperimentSettings("r"), ROWS)
    data["trainer_adapters"]["groups"] |= change
    with pytest.raises(ConfigError, match=message):
        run_blocking(build_config(data), RunOptions("r"))


def load_weights(folder):
    return load_file(next(folder.glob("*.safetensors")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "models"),
    [
        pytest.param("pure_text_ei", {}, marks=pytest.mark.slow),
        pytest.param("pure_text_malt", {}, marks=pytest.mark.slow),  # fast: test_coming_from_nip.py
        ("pure_text_ei", {"prover": "gpt-test", "verifier": "gpt-test-mini"}),
        pytest.param("pure_text_malt", {"prover": "gpt-test", "verifier": "gpt-test"}, marks=pytest.mark.slow),
    ],
)
def test_an_experiment_through_the_service(tmp_path, openai_service, trainer, models):
    """With one model for both agents, or with a group, and so a job, for each."""
    names = ("prover", "verifier")
    params = {"model_name": "gpt-test", "shared_model_group": "both", "max_tokens_per_message": 4}
    own = {name: {"model_name": model, "shared_model_group": None} for name, model in models.items()}
    hyper_params = HyperParameters(
        "vowels",
        trainer,
        "unused.jsonl",
        "babble",
        agents={name: {**params, "prompt": f"{name}: $question", **own.get(name, {})} for name in names},
        rl={"num_iterations": 2, "rollouts_per_iteration": 40},
    )
    quick = {"poll_interval_s": 0.01, "timeout_s": 5.0, "ready_s": 5.0}
    openai_service.seconds = 0.5
    service = {"_type": "openai", "base_url": openai_service.url, "api_key": openai_service.key, **quick}
    overrides = {"workflow": EASY["workflow"], "trainer_adapters": {"adapter": service}}
    settings = ExperimentSettings("r", output_dir=tmp_path / "runs")
    rows = [{**ROWS[0], "id": str(number), "question": f"say {number}"} for number in range(64)]
    summary = run_experiment(hyper_params, settings, rows, overrides=overrides)
    assert summary.status == "completed"
    assert {job["status"] for job in openai_service.jobs.values()} == {"succeeded"}
    started = [job["model"] for job in openai_service.jobs.values()]
    assert started[: max(1, len(models))] == list(models.values() or ["gpt-test"])
    assert len(started) == 2 * max(1, len(models))
    assert openai_service.calls["retrieve"] > 3 * len(started), "polls every 0.01 s, as configured"
    for job in openai_service.jobs.values() if models else ():  # the second job of a group begins with its first model
        base = job["model"].split(":")[1] if job["model"].startswith("ft:") else job["model"]
        assert models[job["metadata"]["reinforge_model_group"]] == base


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["pure_text_ei", pytest.param("pure_text_malt", marks=pytest.mark.slow)])
def test_the_zero_knowledge_variant_trains(tmp_path, tiny_model_dir, trainer):
    """Four agents on one adapter, all of whom are trained; a dialogue has six messages at most."""
    group = {
        "model_name": str(tiny_model_dir),
        "max_tokens_per_message": 4,
        "lora_rank": 4,
        "shared_model_group": "all",
    }
    names = ("prover", "verifier", "adversarial_verifier", "simulator")
    params = HyperParameters(
        "vowels",
        trainer,
        "unused.jsonl",
        "babble",
        agents={name: {**group, "prompt": f"{name}: $question"} for name in names},
        rl={"num_iterations": 1, "rollouts_per_iteration": 8, "lr": 0.01},
        pure_text_ei={"reward_threshold": 0.0} if trainer == "pure_text_ei" else None,
        protocol_common={"zero_knowledge": True},
    )
    summary = run(tmp_path, params)
    assert summary.status == "completed"
    assert [row["num_updates"] > 0 for row in metrics(tmp_path)] == [True]
    for output in read_outputs(summary.folder, "confirm_tuned").values():
        (branch,) = output["branches"]
        assert branch["rewards"]["simulator"] == -branch["rewards"]["adversarial_verifier"]
        assert {m["agent"] for m in output["messages"]} == set(names)


def test_fields_that_a_service_chooses_are_refused(tmp_path):
    params = {name: {"model_name": "gpt-test", "lora_rank": 4} for name in ("prover", "verifier")}
    hyper_params = HyperParameters("s", "pure_text_ei", "unused", "babble", agents=params, rl={"lr": 0.1})
    overrides = {"trainer_adapters": {"adapter": {"_type": "openai"}}}
    with pytest.raises(ConfigError, match=r"rl\.lr: is 0\.1, but the service chooses(.|\n)*lora_rank: is 4"):
        experiment_config(hyper_params, ExperimentSettings("r"), ROWS, overrides=overrides)
