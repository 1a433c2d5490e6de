"""Whole runs with models behind an endpoint (a second model, a judge, an agent); the key is stored nowhere."""

import json
import logging

import pytest
import stamina

from reinforge.config.loader import load_config
from reinforge.errors import BackendUnavailable
from reinforge.trainer.evaluate import EvaluationOptions, evaluate
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_async
from tests.core.e2e.test_reporting import Transcript
from tests.journal_rows import read_rows
from tests.openai_server import OpenAIServer, fails, says

KEY = "sk-canary-e2e-51c7"

ADVISED = """
async def agent(item, llm, context):
    advice = await context.llm("advisor").chat.completions.create(
        messages=[{"role": "user", "content": item.input_obj}], temperature=0.3)
    history = [{"role": "user", "content": advice.choices[0].message.content}]
    reply = await llm.chat.completions.create(messages=history, max_tokens=4)
    return reply.choices[0].message.content
"""

VERDICT = json.dumps({"reason": "fine", "score": 0.5})


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch):
    monkeypatch.setenv("CANARY_KEY", KEY)
    with stamina.set_testing(True, attempts=10, cap=True):
        yield


def load(project):
    return load_config(project.save().folder / "run.yml")


def endpoint(server):
    return {"_type": "openai", "model_name": "gpt", "base_url": server.url, "api_key": "${CANARY_KEY}"}


async def test_an_advisor_and_a_judge_are_not_trained_and_the_key_stays_secret(project, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    project.write_agent(ADVISED)
    project.rows = project.rows[:24]
    project.shrink().set("workflow.llm", "agent")
    async with (
        OpenAIServer(says("say aaa")) as advisor,
        OpenAIServer(fails(503, f"the key {KEY} is fine"), says(VERDICT)) as judge,
    ):
        project.settings["llms"] |= {"advisor": endpoint(advisor), "judge": endpoint(judge)}
        project.settings["eval"]["evaluators"] |= {
            "liked": {"_type": "llm_judge", "llm": "judge", "rubric": "is it kind?"},
            "reward": {"_type": "weighted", "weights": {"vowels": 1.0, "liked": 0.2}},
        }
        project.set("finetuning.reward_function.name", "reward")
        progress = Transcript()
        summary = await run_async(load(project), RunOptions(run_name="r", progress=progress))
        sent_to = f"advisor: {advisor.url}, judge: {judge.url}"
        assert progress.settings["sends data to"] == sent_to, "the run reports where it sends data"
        assert progress.settings["dataset"] == "rows of the shape question/answer"
    assert summary.status == "completed"
    assert summary.episodes == {"ok": sum(summary.episodes.values())}
    assert len(judge.bodies) == summary.episodes["ok"] + 1, "each episode is judged once, and the 503 once more"
    assert {body["temperature"] for body in advisor.bodies} == {0.3}
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in advisor.headers + judge.headers)

    (row,) = read_rows(project.run, "SELECT data FROM episodes WHERE phase = 'collect' LIMIT 1")
    episode = json.loads(row[0])
    assert [call["token_ids"] is None for call in episode["calls"]] == [True, False], "only the policy's are known"
    scores = episode["scores"]
    assert episode["reward"] == pytest.approx(scores["vowels"]["score"] + 0.2 * 0.5)
    assert scores["reward"]["reasoning"]["liked"] == {"score": 0.5, "weight": 0.2, "reasoning": "fine"}

    config = (project.run / "config.yml").read_text()
    assert config.count("${CANARY_KEY}") == 2
    for path in project.run.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    seen = capfd.readouterr()
    assert KEY not in caplog.text + seen.out + seen.err


async def test_an_agent_behind_an_endpoint_is_evaluated_without_an_adapter(project):
    project.settings.pop("trainer_adapters")
    project.settings["finetuning"] = {"enabled": False, "outcomes": {"retries": 0}}
    project.set("eval.evaluators", {"has_a": {"_type": "contains", "texts": "a"}})
    async with OpenAIServer(says("aaa"), says("bbb")) as server:
        project.settings["llms"] = {"agent": endpoint(server)}
        found = await evaluate(load(project), EvaluationOptions(limit=4))
    assert (found.model, found.split) == ("as configured", "all")
    assert found.as_dict()["metrics"]["has_a"]["mean"] == 0.25
    assert found.as_dict()["tokens"] == {"prompt": 28, "completion": 12}
    async with OpenAIServer(fails(500)) as server:
        project.settings["llms"] = {"agent": endpoint(server)}
        with pytest.raises(BackendUnavailable, match=r"2 of 2 episodes have no score because of backend_error.*500"):
            await evaluate(load(project), EvaluationOptions(limit=2))
