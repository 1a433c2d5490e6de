"""Whole runs through NeMo Customizer, from a YAML file, against the stand-in over HTTP."""

import json

import pytest

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.protocols.nemo_customizer.adapter import NeMoCustomizerTrainerAdapter
from reinforge.protocols.nemo_customizer.config import NeMoCustomizerTrainerAdapterConfig
from tests.openai_server import fails, page
from tests.protocols.nemo import use_nemo_adapter
from tests.protocols.nemo_service import NeMoService
from tests.protocols.stand_in import after, lost_response


@pytest.fixture
def nemo(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with NeMoService() as service:
        yield service


@pytest.fixture
def pairs(project, nemo, openai_service, monkeypatch):
    """A project whose agent calls a frozen model and marks scored candidates."""
    monkeypatch.setenv("STANDIN_KEY", openai_service.key)
    return use_nemo_adapter(project, nemo, openai_service, "${STANDIN_KEY}")


def test_a_run_trains_on_the_pairs(pairs, nemo):
    result = pairs.finetune()
    assert result.exit_code == 0, result.output
    assert nemo.namespaces == ["team"]
    (job,) = nemo.jobs.values()
    assert job["config"] == "meta/llama@v1"
    assert (job["hyperparameters"]["epochs"], job["hyperparameters"]["dpo"]["ref_policy_kl_penalty"]) == (2, 0.2)
    name = job["dataset"]["name"]
    assert nemo.datasets[name]["files_url"] == f"hf://datasets/team/{name}"
    training, validation = nemo.rows(name, "training"), nemo.rows(name, "validation")
    assert set(training[0]) == {"prompt", "chosen_response", "rejected_response"}
    first = {json.dumps(row["prompt"][0]) for row in training}
    assert first.isdisjoint(json.dumps(row["prompt"][0]) for row in validation), "an example is on one side only"
    assert pairs.summary["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lost_response, id="lost"),
        pytest.param(after(fails(503)), id="503"),
        pytest.param(after(page(502)), id="html"),
    ],
)
def test_a_lost_answer_creates_no_second_job(pairs, nemo, fault):
    nemo.faults = {"create": [fault], "status": [fails(503)]}
    result = pairs.finetune()
    assert result.exit_code == 0, result.output
    assert len(nemo.jobs) == 1


def test_a_failed_job_ends_the_run(pairs, nemo):
    nemo.ends = ["failed"]
    result = pairs.finetune()
    assert result.exit_code == 3, result.output
    assert "the job of epoch 0 ended with status failed" in pairs.summary["reason"]


@pytest.mark.slow
def test_several_collections_make_one_job_with_each_pair_once(pairs, nemo):
    pairs.set("trainers.trainer", {"_type": "nemo_customizer_trainer", "num_runs": 2, "max_pairs": 10})
    result = pairs.finetune()
    assert result.exit_code == 0, result.output
    (job,) = nemo.jobs.values()
    rows = [*nemo.rows(job["dataset"]["name"], "training"), *nemo.rows(job["dataset"]["name"], "validation")]
    assert len(rows) == 10
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == 10


def test_what_the_service_does_not_do_is_refused_all_at_once(pairs, nemo):
    pairs.set("trainer_adapters.adapter.hyperparameters", {"training_type": "sft"})
    pairs.set("trainer_adapters.adapter.deploy_on_completion", True).set("finetuning.algorithm", {"_type": "sft"})
    pairs.set("finetuning.policy", {"optimizer": {"learning_rate": 1e-4}})
    result = pairs.finetune()
    assert result.exit_code == 2
    for text in ("hyperparameters.training_type: is sft", "deploy_on_completion: is true", "the service trains DPO"):
        assert text in result.output
    assert "set the trainer adapter's hyperparameters.learning_rate" in result.output
    assert not nemo.calls


@pytest.mark.slow
def test_a_history_that_would_be_cut_off_is_refused(pairs, nemo):
    pairs.set("trainer_adapters.adapter.use_full_message_history", False)
    result = pairs.finetune()
    assert result.exit_code == 3
    assert "a prompt has 3 messages, of which only the last would be sent" in pairs.summary["reason"]
    assert nemo.jobs == {}


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_jobs_that_start_from_the_same_model_are_said_to(num_epochs):
    config = NeMoCustomizerTrainerAdapterConfig(
        entity_host="http://nemo.example/",
        datastore_host="http://data.example",
        namespace="team",
        customization_config="meta/llama@v1",
    )
    adapter = NeMoCustomizerTrainerAdapter(config, DPO(DPOConfig()))
    model = dict(adapter.effective_settings(FinetuneConfig(num_epochs=num_epochs)))["model"]
    assert ("each of the 3 jobs starts from it again" in model) is (num_epochs == 3)
    assert model.startswith("meta/llama@v1, in the namespace team")
