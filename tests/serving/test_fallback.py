"""A small model that answers what it is sure of, and a large one behind it."""

import asyncio
import json
import re
import shutil
from collections import Counter

import httpx
import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.errors import ConfigError, StorageError
from reinforge.rollout.http.exchange import find_dialect
from reinforge.routing.reply_evaluator import ReplyEvaluator
from reinforge.routing.router import Router
from reinforge.routing.signals import simplify_reply
from reinforge.runs.journal.served import ServedLog, read_served
from reinforge.serving import fallback
from reinforge.serving.answers import read_reply
from reinforge.serving.app import ServeApp
from reinforge.serving.fallback import DayBudget, FallbackApi
from reinforge.serving.models import ServedModels
from reinforge.serving.recording import RecordConfig, Recorder
from reinforge.serving.routes import ServerLimits
from reinforge.serving.running_check import MAX_CHECKS, RunningCheck
from reinforge.serving.upstream import KEY_HEADER, UpstreamApi
from reinforge.types.request import ModelReply, TokenLogprobs
from tests.doubles import Scored, ScriptedPolicy, ids_of
from tests.serving.large_model import LargeModel, read_records
from tests.serving.serving import async_openai, http, says, start_command, wait_for

CALIBRATED = {"margin": 0.02, "confidence": 0.95, "share": 0.7, "share_low": 0.6, "share_high": 0.8}
CALIBRATED |= {"num_requests": 100, "num_clusters": 100, "data_sha256": "0"}


class Student(ScriptedPolicy):
    """Is sure of its reply if the question says so, and says what the large model says if it is to agree."""

    async def sample(self, request):
        self.requests.append(request)
        asked = request.messages[-1]["content"]
        logprob = -0.01 if "certain" in asked else -0.1 if "sure" in asked or asked == "never" else -2.0
        said = f"ECHO  {asked}" if "agree" in asked else "small"
        ids = ids_of(said)
        tokens = TokenLogprobs((1, 2), ids, (logprob,) * len(ids), 0)
        return ModelReply({"role": "assistant", "content": said}, "stop", tokens, 2, len(ids))


def router(signal="mean_logprob", kept=(-0.5,), **how):
    return Router(signal=signal, threshold=kept[-1] if kept else None, kept=kept, **CALIBRATED, **how)


@pytest.fixture
async def large():
    async with LargeModel() as running:
        yield running


@pytest.fixture
def start():
    def build(url, *, budget=None, recorder=None, check=None, log=None, student=None, evaluator=None, **settings):
        models, limits = ServedModels(), ServerLimits()
        models.add("small", student or Student())
        check = check or RunningCheck(router(**settings))
        chat = FallbackApi(models, limits, UpstreamApi(url, recorder), check, budget, log, evaluator)
        return ServeApp(models, chat=chat, key_header=KEY_HEADER)

    return build


async def ask(app, text, route=None, **more):
    """Returns the text of the answer, who gave it, and why."""
    headers = {} if route is None else {"x-reinforge-route": route}
    body = {"model": "large", "messages": says(text), **more}
    async with http(app, headers=headers) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-reinforge-buffered"] == "yes"
    text = answer.json()["choices"][0]["message"]["content"]
    return text, answer.headers["x-reinforge-route"], answer.headers["x-reinforge-reason"]


async def test_the_student_answers_what_it_is_sure_of(large, start):
    async with start(large.url) as app:
        assert await ask(app, "sure") == ("small", "local", "sure")
        assert await ask(app, "hm") == ("echo hm", "upstream", "unsure")
        assert await ask(app, "sure", "upstream") == ("echo sure", "upstream", "asked")
        assert await ask(app, "hm", "local") == ("small", "local", "asked")
        async with http(app) as client:
            text = (await client.get("/metrics")).text
    assert 'reinforge_routes_total{reason="sure",route="local"} 1.0' in text
    assert all("x-reinforge-route" not in headers for _, _, headers, _ in large.requests)


async def test_a_router_without_a_threshold_keeps_nothing(large, start):
    async with start(large.url, kept=()) as app:
        assert await ask(app, "sure") == ("echo sure", "upstream", "unsure")


async def test_streams_are_those_of_who_answers(large, start):
    async with start(large.url) as app, async_openai(app) as client:
        for text, expected in (("sure", "small"), ("hm", "echo hm")):
            stream = await client.chat.completions.create(model="x", messages=says(text), stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(pieces) == expected


async def test_what_the_student_cannot_read_is_passed_on(large, start):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
    body = {"model": "x", "messages": [{"role": "user", "content": [image]}, *says("look")]}
    async with start(large.url) as app, http(app) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "echo look"
        assert answer.headers["x-reinforge-reason"] == "not_readable"
        assert (await client.post("/v1/embeddings", json={})).content == b"\x00bytes{}"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "small"


async def test_an_upstream_that_is_down_is_not_asked_for_a_while(large, start, monkeypatch):
    async with start(large.url) as app:
        for _ in range(fallback.MAX_FAILURES):
            assert await ask(app, "broken") == ("small", "local", "upstream_down")
        assert await ask(app, "hm") == ("small", "local", "upstream_down")
        assert len(large.requests) == fallback.MAX_FAILURES
        later = fallback.time.monotonic() + fallback.OPEN_S
        monkeypatch.setattr(fallback.time, "monotonic", lambda: later)
        assert await ask(app, "hm") == ("echo hm", "upstream", "unsure")
        assert await ask(app, "hm") == ("echo hm", "upstream", "unsure")


async def test_an_upstream_that_does_not_answer_and_one_that_is_busy(large, start):
    async with start("http://127.0.0.1:9/v1") as app:
        assert await ask(app, "hm") == ("small", "local", "upstream_down")
        assert await ask(app, "hm", "upstream") == ("small", "local", "upstream_down")
    async with start(large.url) as app:
        assert await ask(app, "busy") == ("small", "local", "upstream_down")


async def test_the_days_budget_is_kept_over_restarts(large, start, monkeypatch, tmp_path):
    file = tmp_path / "router.budget.json"
    async with start(large.url, budget=DayBudget(2, file)) as app:
        assert await ask(app, "broken") == ("small", "local", "upstream_down")  # costs nothing
        assert (await ask(app, "hm"))[2] == "unsure"
        await wait_for(file.exists)  # at once: a server that is killed has kept it
    for reasons in (["unsure", "budget_spent"], ["budget_spent"]):
        async with start(large.url, budget=DayBudget(2, file)) as app:
            assert [(await ask(app, "hm"))[2] for _ in reasons] == reasons
    async with start(large.url, budget=DayBudget(None, file)) as app:
        assert (await ask(app, "hm"))[2] == "unsure"
    tomorrow = fallback.time.time() + fallback.DAY_S
    async with start(large.url, budget=DayBudget(2, file)) as app:
        assert (await ask(app, "hm"))[2] == "budget_spent"
        monkeypatch.setattr(fallback.time, "time", lambda: tomorrow)
        assert await ask(app, "hm") == ("echo hm", "upstream", "unsure")
    file.write_text("{}")
    assert not DayBudget(2, file).is_spent
    file.write_text("damaged")
    with pytest.raises(ConfigError, match=r"router.budget.json is not a state that this server has kept"):
        DayBudget(2, file)


async def test_what_was_served_is_in_the_folder_of_the_run(large, start, tmp_path):
    prices = {"large": {"prompt": 1000, "completion": 2000}}
    recorder, check = Recorder(tmp_path / "logs", RecordConfig(prices=prices)), RunningCheck(router(), 1.0)
    log = ServedLog(tmp_path, period_s=0.05)
    async with start(large.url, check=check, recorder=recorder, log=log) as app:
        await ask_checked(app, check, "sure agree", 2)
        await wait_for(lambda: len(read_served(tmp_path)) > 1)
        await ask_checked(app, check, "hm")
        await ask(app, "sure", "local")
    lines = read_served(tmp_path)
    assert lines[0].routes == {}  # when the server started
    assert {(line.threshold, line.margin) for line in lines} == {(-0.5, 0.02)}
    sums = [sum((Counter(getattr(line, name)) for line in lines), Counter()) for name in ("routes", "checks")]
    assert sums == [{"local sure": 2, "upstream unsure": 1, "local asked": 1}, {"agreed": 2, "not_kept": 1}]
    assert sum((Counter(line.measured) for line in lines), Counter()) == recorder.measured
    (tmp_path / "served.jsonl").write_text('{"at_s": -1}\n')
    with pytest.raises(StorageError, match="cannot read"):
        read_served(tmp_path)


async def test_what_the_upstream_answers_is_recorded(large, start, tmp_path):
    recorder = Recorder(tmp_path / "logs", RecordConfig())
    async with start(large.url, recorder=recorder) as app:
        await ask(app, "sure")
        await ask(app, "hm")
        await wait_for(lambda: sum(recorder.counts.values()))
    (record,) = read_records(tmp_path / "logs")
    assert json.dumps(record["response"]).count("echo hm") == 1


def test_a_signal_that_a_reply_does_not_have_is_refused(start):
    with pytest.raises(ConfigError, match="entropy, which takes log-probs of tokens that were not sampled"):
        start("http://127.0.0.1:9/v1", signal="entropy")


class Sampled(ScriptedPolicy):
    """At temperature 0 it says "yes"; of its samples every second one of a hard question differs."""

    def __init__(self):
        super().__init__(self.say)
        self.num_sampled = 0

    def say(self, request):
        if request.sampling.temperature == 0:
            return "yes"
        self.num_sampled += 1
        return "no" if request.messages[-1]["content"] == "hard" and self.num_sampled % 2 else "Yes "


async def test_samples_beside_the_reply_decide(large, start):
    student, rule = Sampled(), router("agreement", (1.0, 0.75), num_samples=4, temperature=0.5)
    async with start(large.url, student=student, check=RunningCheck(rule)) as app:
        assert await ask(app, "easy", top_p=0.1) == ("yes", "local", "sure")
        assert len(student.requests) == 5
        sampled = [each.sampling for each in student.requests if each.sampling.temperature]
        assert {(each.temperature, each.top_p) for each in sampled} == {(0.5, 1.0)}  # as in the calibration
        assert len({each.seed for each in sampled}) == 4
        assert await ask(app, "hard") == ("echo hard", "upstream", "unsure")  # 2 of 4 agree
        assert await ask(app, "hard", "local") == ("yes", "local", "asked")
        assert len(student.requests) == 11  # no samples where nothing is decided
        assert await ask(app, "hard", n=2) == ("echo hard", "upstream", "unsure")


async def test_the_score_of_an_evaluator_decides(large, start, caplog):
    def score(item):
        if item.input_obj[-1]["content"] == "odd":
            raise ValueError("I cannot read this")
        return 1.0 if item.input_obj[-1]["content"] == item.output_obj.removeprefix("ECHO  ") else 0.4

    rule = router("evaluator", (0.5,), evaluator={"_type": "python", "function": "a:b"})
    async with start(large.url, check=RunningCheck(rule), evaluator=ReplyEvaluator(Scored(score))) as app:
        assert await ask(app, "agree") == ("ECHO  agree", "local", "sure")
        assert await ask(app, "sure") == ("echo sure", "upstream", "unsure")
        assert [(await ask(app, "odd"))[1:] for _ in range(2)] == [("upstream", "not_scored")] * 2
        async with http(app) as client:
            text = (await client.get("/metrics")).text
    assert 'reinforge_routes_total{reason="not_scored",route="upstream"} 2.0' in text
    (warned,) = [each.message for each in caplog.records if "evaluator has no score" in each.message]
    assert "I cannot read this" in warned


def test_a_router_whose_evaluator_cannot_be_imported_is_refused(tmp_path):
    file = tmp_path / "small.router.json"
    router("evaluator", evaluator={"_type": "python", "function": "absent_module:f"}).save(file)
    done = CliRunner().invoke(
        main, ["serve", "bundled:tickets", "--fallback", "http://127.0.0.1:9/v1", "--router", file]
    )
    assert done.exit_code == 2
    assert f'{file} evaluator.function: there is no module "absent_module"' in done.output


async def ask_checked(app, check, text, times=1, **more):
    """Asks until as many requests are checked; returns the answers."""
    answers = []
    for _ in range(times):
        before = sum(check.counts.values())
        answers.append(await ask(app, text, **more))
        await wait_for(lambda before=before: sum(check.counts.values()) > before)
    return answers


async def read_metrics(app):
    async with http(app) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.split(" ") for line in lines if line.startswith("reinforge_c"))}


async def test_a_student_that_starts_to_disagree_is_tightened_and_then_stopped(large, start, tmp_path, caplog):
    file, rule = tmp_path / "router.check.json", router(kept=(-0.05, -0.06, -0.5))
    check = RunningCheck(rule, 1.0, file)
    async with start(large.url, check=check) as app:
        await ask_checked(app, check, "sure agree", 10)
        await ask_checked(app, check, "hm", 10)
        assert check.counts == {"agreed": 10, "not_kept": 10}
        assert await ask_checked(app, check, "sure", 5) == [("small", "local", "sure")] * 5
        assert check.router.threshold == -0.5
        await ask_checked(app, check, "sure")
        found = await read_metrics(app)
        assert (found["reinforge_check_state"], found["reinforge_check_threshold"]) == (1.0, -0.06)
        assert await ask(app, "sure", "local") == ("small", "local", "asked")  # takes no part
        assert await ask_checked(app, check, "sure", 20) == [("echo sure", "upstream", "unsure")] * 20
    check = RunningCheck(rule, 1.0, file)
    assert (check.state.num_kept, check.router.threshold) == (2, -0.06)
    async with start(large.url, check=check) as app:
        await ask_checked(app, check, "certain", 8)
        assert not check.is_stopped
        await ask_checked(app, check, "certain", 2)
        assert await ask(app, "certain agree") == ("echo certain agree", "upstream", "stopped")
        found = await read_metrics(app)
        assert found['reinforge_checks_total{outcome="disagreed"}'] == 10.0
        assert (found["reinforge_check_state"], found["reinforge_check_requests"]) == (2.0, 56.0)
        assert found["reinforge_check_threshold"] == float("inf")
        assert await ask(app, "broken") == ("small", "local", "upstream_down")
    raised, *_, stopped = [record.message for record in caplog.records if "requests checked" in record.message]
    assert raised.endswith("(26 requests checked): the threshold rises to -0.06")
    assert stopped.endswith("(56 requests checked): nothing is answered locally now")
    assert RunningCheck(rule, 1.0, file).is_stopped
    assert RunningCheck(rule, 0.0, file).router.threshold == RunningCheck(router(), 1.0, file).router.threshold == -0.5
    state = json.loads(file.read_text())
    state["checks"][0]["sums"].pop()
    file.write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="delete it to begin again"):
        RunningCheck(rule, 1.0, file)


@pytest.mark.slow
async def test_a_student_that_agrees_is_neither_tightened_nor_stopped(large, start):
    check = RunningCheck(router(), 1.0)
    async with start(large.url, check=check) as app, async_openai(app) as client:
        for text in ("sure agree", "sure agree", "hm") * 15:
            await ask_checked(app, check, text)
        stream = await client.chat.completions.create(model="x", messages=says("sure agree"), stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        await wait_for(lambda: check.counts == {"agreed": 31, "not_kept": 15})
    assert not check.is_stopped


async def test_a_share_of_the_requests_is_checked(large, start):
    check = RunningCheck(router(), 0.1)
    drawn = sum(check.draws() for _ in range(10_000))
    assert 800 < drawn < 1200  # 6.7 standard deviations
    assert not any(RunningCheck(router()).draws() for _ in range(100))


async def test_a_failing_upstream_skips_the_check_and_costs_no_request(large, start):
    check = RunningCheck(router(), 1.0)
    async with start("http://127.0.0.1:9/v1", check=check) as app:
        answers = await ask_checked(app, check, "sure", fallback.MAX_FAILURES + 1)
        assert set(answers) == {("small", "local", "sure")}
    assert check.counts == {"skipped": fallback.MAX_FAILURES + 1}
    check = RunningCheck(router(kept=(-3.0,)), 1.0)
    async with start(large.url, check=check) as app:
        for text in ("broken", "busy", "wrong", "long"):
            assert await ask_checked(app, check, text) == [("small", "local", "sure")]
    assert check.counts == {"skipped": 4}


async def test_checks_count_to_the_days_budget_and_are_recorded(large, start, tmp_path):
    recorder, check = Recorder(tmp_path / "logs", RecordConfig()), RunningCheck(router(), 1.0)
    async with start(large.url, check=check, recorder=recorder, budget=DayBudget(1)) as app:
        assert await ask_checked(app, check, "sure", 2) == [("small", "local", "sure")] * 2
        assert check.counts == {"disagreed": 1, "skipped": 1}
        await wait_for(lambda: sum(recorder.counts.values()))
    (record,) = read_records(tmp_path / "logs")
    assert json.dumps(record["response"]).count("echo sure") == 1


async def test_few_checks_run_at_a_time(large, start):
    check = RunningCheck(router(), 1.0)
    async with start(large.url, check=check) as app, async_openai(app) as client:
        for _ in range(MAX_CHECKS + 1):  # the upstream does not end these streams
            stream = await client.chat.completions.create(model="x", messages=says("never"), stream=True)
            assert [chunk async for chunk in stream]
        await wait_for(lambda: len(large.requests) == MAX_CHECKS)
        assert check.counts == {"skipped": 1}


async def test_a_state_that_cannot_be_written_costs_no_request(large, start, tmp_path, caplog):
    check = RunningCheck(router(), 1.0, tmp_path / "missing" / "router.check.json")
    async with start(large.url, check=check) as app:
        await ask_checked(app, check, "sure agree", 3)
    assert len([each for each in caplog.records if "not kept over restarts" in each.message]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--check_share", "1"], []])
async def test_the_command_keeps_the_state_beside_the_router(large, tmp_path, tiny_model_dir, options):
    run = tmp_path / "run"
    shutil.copytree(tiny_model_dir, run / "model")
    (run / "run.sqlite").touch()
    file = tmp_path / "small.router.json"
    router(kept=(-50.0,)).save(file)  # calibrated by an unknown metric: checked only if asked
    command = ["serve", run, "--fallback", large.url, "--router", file, "--port", "0"]
    process = start_command(*command, *options)
    try:
        address = None
        while address is None:
            line = await asyncio.to_thread(process.stdout.readline)
            assert line, process.stderr.read()
            address = re.search(r"OPENAI_BASE_URL=(\S+)", line)
        async with httpx.AsyncClient(base_url=address[1], timeout=60) as client:
            body = {"messages": says("Where is my order?"), "max_tokens": 4}
            assert (await client.post("/chat/completions", json=body)).headers["x-reinforge-reason"] == "sure"
        if options:
            await wait_for(lambda: file.with_suffix(".check.json").exists())
            state = json.loads(file.with_suffix(".check.json").read_text())
            assert [(each["num_checked"], each["margin"]) for each in state["checks"]] == [(1, 0.02)]
        assert len(large.requests) == len(options) / 2
    finally:
        process.terminate()
        process.communicate()
    assert [line.routes for line in read_served(run)] == [{}, {"local sure": 1}]


def test_a_share_without_a_fallback_is_refused():
    done = CliRunner().invoke(main, ["serve", "bundled:tickets", "--check_share", "0.1"])
    assert done.exit_code == 2
    assert "add --fallback URL" in done.output


ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"b": 2, "a": 1}'}
BLOCK = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("responses", {"output": [{"type": "reasoning", "summary": []}, ITEM]}),
        ("messages", {"content": [{"type": "text", "text": "I call f"}, BLOCK]}),
        ("chat/completions", {"choices": [{"message": {"tool_calls": [{"function": ITEM}]} | {"role": "assistant"}}]}),
    ],
)
def test_replies_of_all_apis_are_compared(path, answer):
    assert simplify_reply(read_reply(answer, find_dialect(f"/v1/{path}"))) == json.dumps([["f", '{"a": 1, "b": 2}']])


def test_texts_of_all_apis_are_compared():
    parts = [{"type": "output_text", "text": "Yes "}, {"type": "output_text", "text": "sir"}]
    answers = {
        "responses": {"output": [{"type": "message", "role": "assistant", "content": parts}]},
        "messages": {"content": [{"type": "text", "text": "yes "}, {"type": "text", "text": "sir"}]},
        "completions": {"choices": [{"text": " yes sir"}]},
    }
    found = {simplify_reply(read_reply(answer, find_dialect(f"/v1/{path}"))) for path, answer in answers.items()}
    assert found == {"yes sir"}
