"""Scripts in the style of neural-interactive-proofs run with imports and addresses replaced, and nothing else."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml

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


@pytest.fixture
def run_script(tmp_path, monkeypatch, openai_service):
    """Runs a script in a folder with the dataset, against the stand-in for OpenAI's service."""
    openai_service.seconds = 0.0
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


@pytest.mark.slow
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
