"""Scripts in the style of neural-interactive-proofs run with imports and addresses replaced, and nothing else."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from reinforge.multiagent import (
    EmbeddedSharedModelGroup,
    ExperimentSettings,
    HyperParameters,
    build_agents,
    build_protocol,
    collect_rollouts,
)
from tests.babble import Babble

SCRIPTS = Path(__file__).parent / "scripts"
IMPORTS = {
    "from nip import": "from reinforge.multiagent import",
    "from nip.utils.env import": "from reinforge.multiagent import",
    "from nip.utils.experiments import": "from reinforge.multiagent import",
}
ADDRESSES = {
    "lrhammond/buggy-apps": "buggy_apps.jsonl",
    "gpt-4o-mini-2024-07-18": "gpt-4.1-mini",
    "gpt-4o-2024-08-06": "gpt-test",
    "meta-llama/llama-3.2-1b-instruct": "gpt-4.1-mini",
}
WORDS = ("Decision: accept", "Decision: reject", "Decision: accept.", "Decision: reject.", "**Decision:** accept")


@pytest.fixture
def run_script(tmp_path, monkeypatch, openai_service):
    """Runs a script in a folder with the dataset, against the stand-in for OpenAI's service."""
    openai_service.words, openai_service.seconds = WORDS, 0.0
    monkeypatch.setenv("OPENAI_BASE_URL", openai_service.url)
    monkeypatch.setenv("OPENAI_API_KEY", openai_service.key)
    monkeypatch.setenv("OPENROUTER_BASE_URL", openai_service.url)
    monkeypatch.setenv("OPENROUTER_API_KEY", openai_service.key)
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": str(n), "question": f"Add {n}.", "solution": f"x + {n + n % 2}", "answer": 1 - n % 2} for n in range(100)
    ]
    (tmp_path / "buggy_apps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name, *arguments):
        for file in (name, "single_experiment.json5"):
            text = (SCRIPTS / file).read_text(encoding="utf-8")
            for old, new in {**IMPORTS, **ADDRESSES}.items():
                text = text.replace(old, new)
            (tmp_path / file).write_text(text)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(tmp_path / name), run_name="__main__")

    return run


def summaries(folder):
    runs = sorted((folder / ".reinforge" / "runs").iterdir())
    return {run.name: json.loads((run / "summary.json").read_text()) for run in runs if run.is_dir()}


def test_the_script_of_expert_iteration(tmp_path, run_script, openai_service):
    """Two protocols, with the provers trained at the service and the verifier left as it is."""
    run_script("ei.py", "--run-infix", "a")
    found = summaries(tmp_path)
    assert {name: summary["status"] for name, summary in found.items()} == {
        "ei_a_0": "completed",
        "ei_a_1": "completed",
    }
    jobs = list(openai_service.jobs.values())
    assert [job["method"]["type"] for job in jobs] == ["supervised"] * 2
    assert {job["model"] for job in jobs} == {"gpt-test"}
    [nip, debate] = [openai_service.get_job_rows(job["id"]) for job in jobs]
    assert all("Argue that its decision should be: accept" in row["messages"][0]["content"] for row in nip)
    sides = {row["messages"][0]["content"].split("should be: ")[1].split(".")[0] for row in debate}
    assert sides == {"reject", "accept"}, "prover0 argues for reject, prover1 for accept"


def test_the_script_of_malt(tmp_path, run_script, openai_service, caplog):
    """A file with the published values: expert iteration first, a supervisor, a verifier that decides on a scale."""
    openai_service.words = tuple(f"Decision: {number}" for number in range(11))
    run_script("malt.py", "b")
    assert {name: summary["status"] for name, summary in summaries(tmp_path).items()} == {"cv_b_0": "completed"}
    jobs = list(openai_service.jobs.values())
    assert [job["method"]["type"] for job in jobs] == ["supervised", "dpo", "dpo"]
    assert {job["method"]["dpo"]["hyperparameters"]["beta"] for job in jobs[1:]} == {0.3}
    assert [job["model"] for job in jobs[1:]] == [job["fine_tuned_model"] for job in jobs[:2]], "not from scratch"
    prompts = [row["messages"][0]["content"] for row in openai_service.get_job_rows(jobs[0]["id"])]
    prompts += [row["input"]["messages"][0]["content"] for row in openai_service.get_job_rows(jobs[1]["id"])]
    for prompt in prompts:
        assert "Argue that its decision should be: accept" in prompt
        assert prompt.endswith("\nSupervisor: Write your next message. Use at most 150 words.")
    dialogues = yaml.safe_load((tmp_path / ".reinforge/runs/cv_b_0/transcripts/baseline.yml").read_text())
    earned = {(each["dialogue"][-1]["text"], round(each["rewards"]["prover"], 9)) for each in dialogues["transcripts"]}
    assert len(earned) > 2
    assert all(text == f"Decision: {reward * 10:.0f}" for text, reward in earned), "0 to 1 with the number"
    assert "is written in the configuration" not in caplog.text, "no warning about a key that no file contains"


def load_loop():
    spec = importlib.util.spec_from_file_location("nip_loop", SCRIPTS / "loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rare(Babble):
    """A reply that begins with a rare letter is not valid."""

    def check_reply(self, agent, text, dialogue):
        return "a rare letter" if agent == "verifier" and text[:1] in "qxzjkvw" else None


@pytest.mark.parametrize("method", ["ei", pytest.param("malt", marks=pytest.mark.slow)])
async def test_a_loop_over_groups(tmp_path, tiny_model_dir, method, caplog):
    """A trained prover beside a frozen verifier, some of whose dialogues have no valid reply."""
    agent = {"model_name": str(tiny_model_dir), "max_tokens_per_message": 4, "num_invalid_generation_retries": 0}
    agents = {
        "prover": {**agent, "prompt": "P $question", "shared_model_group": "provers"},
        "verifier": {**agent, "prompt": "V $question", "freeze_agent": True},
    }
    params = HyperParameters("test", "pure_text_ei", "none", "babble", agents=agents, rl={"lr": 0.01})
    settings = ExperimentSettings("loop", groups_dir=tmp_path)
    handler = Rare(build_protocol(params).config)
    wholes, small = build_agents(params), {"device": "cpu", "policy": {"batch": {"batch_size": 8}}}
    groups = {
        name: EmbeddedSharedModelGroup(params, settings, handler, [whole], name, finetuning=small)
        for name, whole in (("provers", wholes["prover"]), ("verifier", wholes["verifier"]))
    }
    rows = [{"id": str(n), "question": f"say {n}", "answer": "accept"} for n in range(24)]
    collected = []

    async def sample(iteration):
        rollouts = await collect_rollouts(list(groups.values()), rows, iteration=iteration, num_dialogues=4)
        collected.append(rollouts)
        return rollouts

    models = await load_loop().train(groups, handler, sample, method=method, num_iterations=2)
    assert Path(models["provers"]).is_dir()
    assert models["verifier"] == str(tiny_model_dir), "a frozen group keeps its model"
    assert len({path.parent.name for path in tmp_path.glob("loop/provers/jobs/*/job.json")}) == 2
    assert not (tmp_path / "loop" / "verifier" / "jobs").exists()
    rewards = [rollouts["next", "agents", "reward"].sum(1) for rollouts in collected]
    assert all((each == each).all() for each in rewards), "no reward is NaN"
    assert all(len(each) > 50 for each in rewards)
    assert sum(map(len, rewards)) < 2 * 96, "a dialogue without a valid reply costs that dialogue"
    assert (
        "dialogues are left out, since an agent gave no valid reply; the first: verifier: a rare letter" in caplog.text
    )
    for group in groups.values():
        await group.close()
