"""Whole runs through the fine-tuning service, from a YAML file, against the stand-in over HTTP."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.finetuning import (
    DPOItem,
    EpisodeItem,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
    register_trajectory_builder,
)
from tests.journal_rows import read_rows
from tests.protocols.hosted import use_openai_adapter

ROOT = Path(__file__).parents[2]


@pytest.fixture
def service(openai_service, monkeypatch):
    monkeypatch.setenv("STANDIN_KEY", openai_service.key)
    return openai_service


@pytest.fixture
def hosted(project, service):
    use_openai_adapter(project, service)
    return project


def jobs_of(project):
    rows = read_rows(project.run, "SELECT epoch, status, ref, data FROM jobs ORDER BY epoch")
    return [(epoch, status, json.loads(ref)["metadata"], json.loads(data)) for epoch, status, ref, data in rows]


def test_a_run_trains_at_the_service_and_promotes_the_better_model(hosted, service, capfd):
    result = hosted.finetune()
    assert result.exit_code == 0, result.output
    assert f"{service.url} (receives all prompts of the agent and the training files)" in result.output
    assert "hosted by the service, under the name in openai_model.json" in result.output
    summary = hosted.summary
    assert (summary["status"], summary["promoted"]) == ("completed", True), summary["reason"]
    assert summary["improvement"]["ci_low"] > 0
    first, second = service.jobs.values()
    assert (first["model"], second["model"]) == ("gpt-test", first["fine_tuned_model"])
    assert {job["metadata"]["reinforge_run"] for job in (first, second)} == {"r"}
    versions = summary["policy_versions"]
    assert [(row["version"], row["num_updates"]) for row in versions] == [(0, 0), (1, None), (2, None)]
    assert len({row["fingerprint"] for row in versions}) == 3
    promoted = json.loads((hosted.run / "model" / "openai_model.json").read_text())
    assert promoted["model"] in (first["fine_tuned_model"], second["fine_tuned_model"])
    assert promoted["base_model"] == "gpt-test"
    journal = jobs_of(hosted)
    assert [(epoch, status) for epoch, status, _, _ in journal] == [(0, "completed"), (1, "completed")]
    assert [ref["job_id"] for _, _, ref, _ in journal] == [first["id"], second["id"]]
    assert journal[0][3]["metadata"]["fine_tuned_model"] == first["fine_tuned_model"]
    rows = [json.loads(line) for line in (hosted.run / "training_metrics.jsonl").read_text().splitlines()]
    assert [row["policy_version"] for row in rows] == [1, 2]
    assert [row["canary_difference"] for row in rows] == [None, None], "unknown, not 0"
    assert rows[0]["num_rows"] == len(service.get_job_rows(first["id"]))
    assert summary["tokens"]["trained"] == first["trained_tokens"] + second["trained_tokens"]
    make_collection = read_rows(hosted.run, "SELECT data FROM episodes WHERE phase = 'collect' AND epoch = 1")
    replies = [json.loads(data)["calls"][0] for (data,) in make_collection]
    assert {(call["policy_version"], call["token_ids"]) for call in replies} == {(1, None)}
    for path in hosted.run.rglob("*"):
        assert not path.is_file() or service.key.encode() not in path.read_bytes(), path
    assert service.key not in result.output + "".join(capfd.readouterr())
    service.chats.clear()
    result = CliRunner().invoke(main, ["eval", "run.yml", "--model", "r", "--limit", "3"])
    assert result.exit_code == 0, result.output
    assert {body["model"] for body in service.chats} == {promoted["model"]}, "the promoted model can be evaluated"
    refused = CliRunner().invoke(main, ["chat", "runs/r"])
    assert refused.exit_code == 2
    assert "refers to a model of a remote service" in refused.output


@pytest.mark.slow
def test_a_model_below_the_margin_is_not_promoted(hosted, service):
    hosted.set("finetuning.gate.margin", 0.9).set("finetuning.num_epochs", 1)
    result = hosted.finetune()
    assert result.exit_code == 0, result.output
    assert hosted.summary["promoted"] is False
    assert not (hosted.run / "model").exists()
    assert len(service.jobs) == 1
    assert "no update was made" not in result.output, "the number of optimizer steps is unknown, not 0"


COLUMNS = {"sft": {"completion": "aeiou"}, "dpo": {"chosen": "aeiou", "rejected": "xyz"}}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dpo", pytest.param("sft", marks=pytest.mark.slow)])
def test_rows_of_a_dataset_are_sent_unchanged(hosted, service, algorithm):
    rows = [{"id": row["id"], "prompt": row["question"], **COLUMNS[algorithm]} for row in hosted.rows]
    hosted.rows = None
    hosted.write("data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    hosted.set("trajectory_builders.builder", {"_type": "dataset", "examples_per_epoch": 12})
    hosted.set("finetuning.algorithm", {"_type": algorithm}).set("finetuning.num_epochs", 1)
    result = hosted.finetune()
    assert result.exit_code == 0, result.output
    (job,) = service.jobs.values()
    sent = service.get_job_rows(job["id"])
    assert len(sent) == 12
    if algorithm == "sft":
        assert sent[0]["messages"][1] == {"role": "assistant", "content": "aeiou", "weight": 1}
    else:
        assert sent[0]["preferred_output"] == [{"role": "assistant", "content": "aeiou"}]


class OwnBuilderConfig(TrajectoryBuilderConfig, name="test_own_messages"):
    """The configuration of a user's builder that writes its own episodes."""

    pairs: bool = False


class OwnBuilder(TrajectoryBuilder):
    """Builds trajectories from plain messages marked as trained, or from pairs; there are no tokens or model calls."""

    async def start_run(self, run_id, meta=None):
        pass

    async def finalize(self, run_id, meta=None):
        make = self._pair if self.trajectory_builder_config.pairs else self._episode
        return TrajectoryCollection(trajectories=[[make(number)] for number in range(12)], run_id=run_id)

    def _pair(self, number):
        pair = DPOItem(prompt=f"say {number}", chosen_response="aeiou", rejected_response="xyz")
        return Trajectory(episode=[pair], reward=0.0)

    def _episode(self, number):
        episode = [
            EpisodeItem(role="user", content=f"say {number}"),
            EpisodeItem(role="assistant", content="hm"),
            EpisodeItem(role="environment", content="continue"),
            EpisodeItem(role="assistant", content="aeiou", trained=True),
        ]
        return Trajectory(episode=episode, reward=1.0)


@register_trajectory_builder(config_type=OwnBuilderConfig)
async def own_builder(config, builder):
    yield OwnBuilder(config)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [False, True])
def test_a_custom_builder_needs_no_tokens(hosted, service, pairs):
    hosted.set("trajectory_builders.builder", {"_type": "test_own_messages", "pairs": pairs})
    hosted.set("finetuning.algorithm", {"_type": "dpo" if pairs else "sft"}).set("finetuning.num_epochs", 1)
    result = hosted.finetune()
    assert result.exit_code == 0, result.output
    (job,) = service.jobs.values()
    first = service.get_job_rows(job["id"])[0]
    if pairs:
        assert first["preferred_output"] == [{"role": "assistant", "content": "aeiou"}]
    else:
        assert [(m["role"], m.get("weight")) for m in first["messages"]] == [
            ("user", None), ("assistant", 0), ("user", None), ("assistant", 1)
        ]  # fmt: skip
    assert hosted.summary["policy_versions"][-1]["version"] == 1


@pytest.mark.slow
def test_a_run_needs_no_torch(hosted, service):
    """With torch, transformers, peft and safetensors blocked."""
    hosted.write_files()
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'peft', 'safetensors'): sys.modules[name] = None\n"
        "from reinforge.cli import main\n"
        "main(['finetune', 'run.yml', '--run_name', 'r'])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(hosted.folder)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hosted.summary["promoted"] is True


@pytest.mark.slow
def test_the_block_of_the_page_trains(hosted, service, monkeypatch):
    """The YAML block of docs/remote.md, with endpoint and key from the environment."""
    monkeypatch.setenv("OPENAI_BASE_URL", service.url)
    monkeypatch.setenv("OPENAI_API_KEY", service.key)
    page = (ROOT / "docs" / "remote.md").read_text(encoding="utf-8")
    shown = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    hosted.settings["trainer_adapters"] = shown["trainer_adapters"]
    hosted.settings["trainer_adapters"]["service"]["poll_interval_s"] = 0.01
    hosted.settings["finetuning"] |= {**shown["finetuning"], "num_epochs": 1}
    result = hosted.finetune()
    assert result.exit_code == 0, result.output
    (job,) = service.jobs.values()
    assert (job["model"], job["user_provided_suffix"]) == ("gpt-4.1-mini", "support-agent")
