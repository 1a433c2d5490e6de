"""`reinforge preflight` where the agent does not run in training, and where a service trains."""

import json

import pytest

from tests.core.e2e.test_offline_data import PROMPTED
from tests.project import call
from tests.protocols.hosted import use_openai_adapter


def preflight(project, *arguments):
    project.write_files()
    command = ["preflight", "run.yml", "--json", "--examples", "4", "--samples", "2", *arguments]
    result = call(*command, code=0)
    return json.loads(result.stdout)


@pytest.fixture
def offline(project):
    project.write("task.py", PROMPTED)
    project.set("eval.evaluators", {"right": {"_type": "contains", "texts": "yes"}})
    project.set("finetuning.reward_function.name", "right")
    return project.set("trajectory_builders.builder", {"_type": "dataset"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "algorithm", "advice"),
    [
        ({"completion": "yes", "label": True}, "kto", "KTO"),
        ({"chosen": "yes", "rejected": "no"}, "dpo", "DPO"),
        ({"completion": "yes"}, "sft", None),
    ],
    ids=["thumbs", "pairs", "demonstrations"],
)
def test_rows_are_timed_and_named(offline, row, algorithm, advice):
    offline.rows = [{"prompt": f"say {n}", **row} for n in range(48)]
    if algorithm == "kto":
        for row_ in offline.rows[::2]:
            row_ |= {"completion": "no", "label": False}
    offline.set("finetuning.algorithm", {"_type": algorithm})
    found = preflight(offline)
    parts = {part["name"]: part for part in found["time"]["parts"]}
    assert parts["train"]["seconds"] > 0
    assert found["time"]["total_s"] > 0
    assert found["findings"]["group_size"] == 0
    assert advice is None or found["recommendation"]["advice"] == advice
    assert found["notes"] == []


def test_a_service_gets_no_job_and_its_tokens_are_priced(project, openai_service, monkeypatch):
    monkeypatch.setenv("STANDIN_KEY", openai_service.key)
    use_openai_adapter(project, openai_service)
    prices = ("--price", "agent", "1", "10", "--training_price", "5")
    found = preflight(project, *prices)
    assert openai_service.jobs == {}, "a job costs money"
    assert found["time"]["total_s"] is None
    assert any("trains at a service" in note for note in found["notes"])
    costs = {cost["entry"]: cost for cost in found["costs"]}
    assert costs["training"]["cost"] == pytest.approx(costs["training"]["prompt_tokens"] * 5 / 1e6)
    agent = costs["agent"]
    assert agent["cost"] == pytest.approx((agent["prompt_tokens"] + 10 * agent["completion_tokens"]) / 1e6)
    assert agent["completion_tokens"] > 0
    assert found["total_cost"] == pytest.approx(agent["cost"] + costs["training"]["cost"])
    assert found["memory"] is None
    unpriced = preflight(project)
    assert unpriced["total_cost"] is None
