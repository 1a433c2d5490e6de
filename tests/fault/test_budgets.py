"""A run whose episodes keep failing ends within its budget and names the cause.

The exit code is 4 if most failures are at a model's endpoint, else 3.
"""

import asyncio
import json
import time

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.errors import BackendError, BackendUnavailable, EvaluationError, ReinforgeError
from reinforge.evaluation.run import choose_error_type
from reinforge.rollout import runner
from reinforge.trainer import refusals
from tests.scripted_run import ScriptedRun, ask

TIMEOUT_S = 0.05
RETRIES = 2
CONCURRENCY = 8


class Counting:
    def __init__(self, behave):
        self.behave, self.num_calls = behave, 0

    async def __call__(self, item, llm, context):
        self.num_calls += 1
        return await self.behave(self.num_calls, item, llm, context)


def raising(error):
    async def behave(number, item, llm, context):
        raise error

    return behave


async def hang(number, item, llm, context):
    await asyncio.sleep(60)


async def sleep_through_its_cancellation(number, item, llm, context):
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError("a library turned the cancellation into an error") from None


def run_of(tmp_path, behave, **finetuning):
    run = ScriptedRun(tmp_path, workflow=Counting(behave))
    run.settings["eval"]["general"]["max_concurrency"] = CONCURRENCY
    run.settings["finetuning"] |= {
        "outcomes": {"retries": RETRIES},
        "limits": {"episode_timeout_s": TIMEOUT_S, "evaluator_timeout_s": TIMEOUT_S},
        **finetuning,
    }
    run.agent = run.settings["workflow"]["function"]
    return run


def reason_of(tmp_path):
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["status"] == "failed"
    return summary["reason"]


ALWAYS = [
    (raising(BackendError("503 from the endpoint")), 4, "backend_error: BackendError: 503 from the endpoint"),
    (raising(ConnectionError("refused")), 4, "backend_error: ConnectionError: refused"),
    (raising(RuntimeError("a tool broke")), 3, "tool_error: RuntimeError: a tool broke"),
    (raising(asyncio.CancelledError()), 3, "cancelled: the agent raised CancelledError"),
    (raising(SystemExit(0)), 3, "tool_error: SystemExit: 0"),
    (hang, 3, "timeout: not finished after 0.05 s"),
    (sleep_through_its_cancellation, 3, "a library turned the cancellation into an error"),
]


@pytest.mark.parametrize(("behave", "code", "cause"), ALWAYS, ids=[cause for _, _, cause in ALWAYS])
async def test_a_run_whose_every_episode_fails_ends_before_training(tmp_path, behave, code, cause):
    run = run_of(tmp_path, behave)
    started = time.monotonic()
    with pytest.raises(ReinforgeError, match=cause) as raised:
        await run.run()
    assert raised.value.exit_code == code
    assert cause in reason_of(tmp_path)
    num_examples = 3  # the `select` examples: the run ends at the baseline
    assert run.agent.num_calls == num_examples * (RETRIES + 1)
    assert time.monotonic() - started < num_examples * (RETRIES + 1) * TIMEOUT_S + 10
    assert run.adapter.jobs == []


async def test_a_cause_that_is_not_looked_at_changes_the_exit_code(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(refusals, "choose_error_type", lambda outcomes: EvaluationError)
    with pytest.raises(EvaluationError, match="503 from the endpoint") as raised:
        await run_of(tmp_path, raising(BackendError("503 from the endpoint"))).run()
    assert raised.value.exit_code == 3


async def test_a_retry_too_many_is_counted(tmp_path, monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(runner.EpisodeBatch, "_may_retry", lambda batch, attempt: attempt.number <= RETRIES)
    run = run_of(tmp_path, raising(RuntimeError("a tool broke")))
    with pytest.raises(EvaluationError, match="a tool broke"):
        await run.run()
    assert run.agent.num_calls == 3 * (RETRIES + 2)


@pytest.mark.parametrize(
    ("error", "kind"), [(BackendError("503"), BackendUnavailable), (RuntimeError("broke"), EvaluationError)]
)
async def test_an_environment_that_breaks_after_the_baseline_stops_the_epoch(tmp_path, error, kind):
    async def breaks(number, item, llm, context):
        if number > 5:
            raise error
        return await ask(item, llm, context)

    run = run_of(tmp_path, breaks)
    with pytest.raises(kind, match="epoch 0: .* outcomes.max_missing"):
        await run.run()
    assert str(error) in reason_of(tmp_path)
    asked = 3 + 4 * len(run.settings["eval"]["general"]["dataset"]["rows"])
    assert run.agent.num_calls <= asked * (RETRIES + 1)


@pytest.mark.slow
async def test_an_environment_that_fails_every_other_time_is_retried_and_costs_nothing(tmp_path):
    async def alternates(number, item, llm, context):
        if number % 2:
            raise BackendError("503")
        return await ask(item, llm, context)

    run = run_of(tmp_path, alternates)
    run.settings["eval"]["general"]["max_concurrency"] = 1  # so that a retry is the next call
    summary = await run.run()
    assert summary.status == "completed"
    assert set(summary.episodes) <= {"ok", "backend_error"}
    assert summary.episodes["ok"] > 9 * summary.episodes.get("backend_error", 0)
    assert run.agent.num_calls <= sum(summary.episodes.values()) * (RETRIES + 1)


@pytest.mark.parametrize(
    ("outcomes", "kind"),
    [
        ({"backend_error": 3, "tool_error": 2, "ok": 9}, BackendUnavailable),
        ({"backend_error": 2, "tool_error": 2}, EvaluationError),
        ({"policy_error": 5}, EvaluationError),
        ({}, EvaluationError),
    ],
)
def test_the_most_frequent_failure_decides_the_exit_code(outcomes, kind):
    assert choose_error_type(outcomes) is kind


@pytest.mark.slow
def test_finetune_with_an_endpoint_that_is_down_exits_with_4(project):
    """The agent calls a second model, which is not served."""
    project.settings["llms"]["other"] = {
        "_type": "openai",
        "model_name": "m",
        "base_url": "http://127.0.0.1:9/v1",
        "max_retries": 0,
    }
    project.set("workflow.llm", "other").set("finetuning.outcomes.retries", 0)
    done = project.finetune()
    assert done.exit_code == 4, done.output
    assert "the baseline could not be scored" in done.output
    assert "backend_error" in done.output
    assert CliRunner().invoke(main, ["eval", "run.yml", "--limit", "2"]).exit_code == 4
