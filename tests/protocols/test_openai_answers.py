"""Odd answers of a service: a typed error that names endpoint, field and what was found, and an end to every list."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from reinforge.errors import BackendError, BackendUnavailable
from reinforge.limits import Limits
from reinforge.protocols import jobs as openai_jobs
from reinforge.protocols import service as openai_service
from reinforge.protocols.jobs import HostedJobs
from reinforge.protocols.openai.adapter import OpenAIAdapterConfig
from reinforge.protocols.openai.service import JOB_KEY, FineTuningService
from reinforge.rollout.models.endpoint_config import EndpointConfig
from reinforge.rollout.models.openai_client import OpenAIChat, OpenAILLMConfig
from reinforge.rollout.models.openai_http import OpenAIEndpoint, RetryableError, UnexpectedAnswer, extract_error_message
from reinforge.types.job import TrainingJobRef, TrainingStatusEnum
from reinforge.types.request import ModelRequest

URL, KEY = "http://service/v1", "sk-canary-odd-1"
FILE = {"id": "file-1", "filename": "a.jsonl", "bytes": 3, "status": "processed", "purpose": "fine-tune"}
JOB: dict[str, Any] = {
    "id": "ftjob-1",
    "status": "running",
    "fine_tuned_model": None,
    "error": {"code": "c", "message": "m", "param": None},
    "trained_tokens": 7,
    "metadata": {JOB_KEY: "k"},
}
CHAT: dict[str, Any] = {
    "model": "gpt",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "hi",
                "refusal": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            },
            "logprobs": {"content": [{"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}]},
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}


def page(*entries: Any, has_more: Any = False) -> dict[str, Any]:
    return {"object": "list", "data": list(entries), "has_more": has_more}


class ScriptedEndpoint(OpenAIEndpoint):
    def __init__(self, answer: Callable[[str, str, Any], Any], max_retries: int = 0):
        super().__init__(EndpointConfig(max_retries=max_retries), URL, SecretStr(KEY))
        self.answer, self.num_calls = answer, 0

    async def send(self, method: str, path: str, *, query: Any = None, body: Any = None, file: Any = None) -> str:
        self.num_calls += 1
        assert self.num_calls <= 5000, "the list does not end"
        answer = self.answer(method, path, query)
        return answer if isinstance(answer, str) else json.dumps(answer)


async def ask(kind: str, answer: Any) -> Any:
    """Makes the calls of one kind; every response is the same answer."""
    endpoint = ScriptedEndpoint(lambda method, path, query: answer)
    service = FineTuningService(endpoint)
    if kind == "chat":
        chat = OpenAIChat(OpenAILLMConfig(model_name="gpt"), URL, endpoint=endpoint, verify_model_name=True)
        return await chat.sample_choices(ModelRequest([{"role": "user", "content": "hello?"}]), 1)
    if kind == "upload":
        return await service.upload_once(b"new")
    if kind == "create":
        return await service.create_job_once("k", {})
    if kind == "access":
        return await service.check_access()
    return await (service.retrieve_job if kind == "retrieve" else service.cancel)("ftjob-1")


JOBS_URL, FILES_URL, CHAT_URL = f"{URL}/fine_tuning/jobs", f"{URL}/files", f"{URL}/chat/completions"


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        ("access", {"error": "boom"}, f"{JOBS_URL}: the response is not a list of jobs: data: expected a value, found"),
        ("upload", page({"filename": "x"}), f"{FILES_URL}: .* data\\[0\\].id: expected a value, found nothing"),
        ("upload", page("file-1"), 'data\\[0\\]: expected an object, found "file-1"; check base_url'),
        ("upload", {"data": {"file-1": FILE}}, "data: expected a list, found an object with file-1"),
        ("upload", page(), "the response is not a file: id: expected a value, found nothing"),  # of POST /files
        ("upload", page({**FILE, "bytes": "many"}), 'data\\[0\\].bytes: expected a whole number, found "many"'),
        ("create", page({**JOB, "metadata": "k"}), 'data\\[0\\].metadata: expected an object, found "k"'),
        ("create", page({**JOB, "has": 1, "status": None}), "data\\[0\\].status: expected a string, found null"),
        (
            "retrieve",
            {"error": "boom"},
            f"{JOBS_URL}/ftjob-1: the response is not a fine-tuning job: id: expected a value",
        ),
        ("retrieve", {**JOB, "fine_tuned_model": ["ft"]}, "fine_tuned_model: expected a string, found a list of 1"),
        ("retrieve", {**JOB, "id": ""}, 'id: expected a non-empty string, found ""'),
        ("retrieve", {**JOB, "status": "pondering"}, 'ftjob-1: unknown job status "pondering"'),
        ("chat", {"error": "boom"}, f"{CHAT_URL}: the response is not a chat completion but an error: boom"),
        ("chat", {}, "chat completion: choices: expected a value, found nothing"),
        ("chat", [CHAT], "chat completion: expected an object, found a list of 1"),
        ("chat", {"choices": None}, "choices: expected a list, found null"),
        ("chat", {"choices": ["hi"]}, 'choices\\[0\\]: expected an object, found "hi"'),
        ("chat", {"choices": [{"message": "hi"}]}, 'choices\\[0\\].message: expected an object, found "hi"'),
        ("chat", {"choices": [{"message": {"content": [1]}}]}, "message.content: expected a string, found a list of 1"),
        (
            "chat",
            {"choices": [{"message": {"tool_calls": [{"function": "f"}]}}]},
            "tool_calls\\[0\\].function: expected",
        ),
        ("chat", {**CHAT, "model": f"x {KEY}"}, "requested the model 'gpt', but 'x \\*\\*\\*' replied"),
        ("chat", {**CHAT, "model": {"a": 1}}, "requested the model 'gpt', but an object with a replied"),
        ("chat", {"choices": KEY}, 'choices: expected a list, found "\\*\\*\\*"'),
    ],
)
async def test_an_odd_answer_is_a_typed_error(kind: str, answer: Any, message: str) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        await ask(kind, answer)
    assert KEY not in str(caught.value)


async def test_what_only_informs_costs_no_answer() -> None:
    odd: list[Any] = ["boom", None, [], {"x": 1}, -1, True, 1.5, 10**30, "7"]
    for value in odd:
        (reply,) = await ask("chat", {**CHAT, "usage": value, "id": value, "system_fingerprint": value})
        assert (reply.message["content"], reply.num_prompt_tokens, reply.num_completion_tokens) == ("hi", 0, 0)
        (reply,) = await ask("chat", {**CHAT, "usage": {"prompt_tokens": value, "completion_tokens": 3}})
        assert (reply.num_prompt_tokens, reply.num_completion_tokens) == (0, 3)
        (reply,) = await ask("chat", {**CHAT, "choices": [{**CHAT["choices"][0], "logprobs": value}]})
        assert (reply.tokens, reply.message["tool_calls"][0]["function"]["name"]) == (None, "add")
        job = await ask("retrieve", {**JOB, "trained_tokens": value, "result_files": value})
        assert (job.trained_tokens, job.status) == (None, TrainingStatusEnum.RUNNING)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("boom", "boom"),
        (None, None),
        ({}, None),
        ({"code": None, "message": None}, None),
        ({"code": "c", "message": "m"}, "c: m"),
        ({"detail": "d"}, "an object with detail"),
        (["a"], "['a']"),
        (f"key {KEY}", "key ***"),
    ],
)
async def test_the_error_of_a_job_is_read_in_any_shape(error: Any, text: str | None) -> None:
    assert (await ask("retrieve", {**JOB, "error": error})).error == text


async def test_somebody_elses_odd_job_stops_no_search() -> None:
    other = {**JOB, "id": "other", "status": "pondering", "metadata": {JOB_KEY: "another"}}
    assert (await ask("create", page(other, JOB))).id == "ftjob-1"
    assert (await ask("create", page(other | {"metadata": None}, JOB))).id == "ftjob-1"


# Lists that do not end.


def repeats(method: str, path: str, query: Any) -> Any:
    """The same page whatever `after` says, as at a service that does not know it."""
    return page({**JOB, "metadata": {}, **FILE, "status": "running"}, has_more=True)


def circles(method: str, path: str, query: Any) -> Any:
    number = (int(query.get("after", "0")) + 1) % 3
    return page({**FILE, "id": str(number), "status": "running"}, has_more=True)


def counts(method: str, path: str, query: Any) -> Any:
    return page({**FILE, "id": str(int(query.get("after", "0")) + 1), "status": "running"}, has_more=True)


@pytest.mark.parametrize(("answer", "num_calls"), [(repeats, 2), (circles, 4)])
@pytest.mark.parametrize("path", ["/files", "/fine_tuning/jobs"])
async def test_a_list_ends_where_a_page_repeats(answer: Any, num_calls: int, path: str) -> None:
    endpoint = ScriptedEndpoint(answer)
    service = FineTuningService(endpoint)
    work = service.upload_once(b"x") if path == "/files" else service.create_job_once("k", {})
    expected = rf"{URL}{path}: the list does not end: the page after \S+ was sent twice, and has_more is still true"
    with pytest.raises(UnexpectedAnswer, match=expected):
        await work
    assert endpoint.num_calls == num_calls


async def test_a_list_ends_at_the_page_limit() -> None:
    endpoint = ScriptedEndpoint(counts)
    with pytest.raises(UnexpectedAnswer, match="the list does not end: there are over 1000 pages"):
        await FineTuningService(endpoint).upload_once(b"x")
    assert endpoint.num_calls == Limits().list_pages + 1


async def test_without_the_check_of_repeated_pages_the_list_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation check: with the set of pages forgotten, only the limit of the endpoint's calls ends the list."""
    monkeypatch.setattr(openai_service, "set", lambda: _Forgetful(), raising=False)

    with pytest.raises(AssertionError, match="the list does not end"):
        await FineTuningService(ScriptedEndpoint(repeats)).upload_once(b"x")


class _Forgetful(set[str]):
    def add(self, element: str) -> None:
        pass


# Polls.


async def wait_for_job(*answers: Any, max_wait_s: float = 5.0) -> Any:
    """Returns the end of a job whose polls get these answers, the last one again and again."""
    given = list(answers)
    endpoint = ScriptedEndpoint(lambda method, path, query: given.pop(0) if len(given) > 1 else given[0])
    config = OpenAIAdapterConfig(base_model="gpt", poll_interval_s=0.001, max_wait_s=max_wait_s)
    jobs = HostedJobs(FineTuningService(endpoint), config, seed=0)
    return await jobs.wait(TrainingJobRef(run_id="r", backend="openai", metadata={"job_id": "ftjob-1"}))


DONE = {**JOB, "status": "succeeded", "fine_tuned_model": "ft:gpt:1", "error": None}
ODD_POLLS: list[Any] = [{"error": "boom"}, [], "null", None, {"id": "ftjob-1"}, {**DONE, "status": None}, "<html>"]


async def test_an_odd_poll_is_a_failed_poll_not_a_failed_job(caplog: pytest.LogCaptureFixture) -> None:
    status = await wait_for_job(*ODD_POLLS, DONE)
    assert status.produced_model
    assert status.metadata["num_poll_errors"] == len(ODD_POLLS)
    assert "the last 3 polls failed, still polling; latest error: http://service/v1/fine_tuning/jobs" in caplog.text
    assert "polling job ftjob-1 works again" in caplog.text


async def test_without_that_rule_an_odd_poll_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation check: if only a lost response is a failed poll, the first odd body ends the wait."""
    monkeypatch.setattr(openai_jobs, "FAILED_POLL", (RetryableError,))
    with pytest.raises(UnexpectedAnswer, match="the response is not a fine-tuning job: id: expected a value"):
        await wait_for_job({"error": "boom"}, DONE)


async def test_an_odd_answer_is_asked_for_again() -> None:
    answers = [{"error": "boom"}, page(), JOB]
    endpoint = ScriptedEndpoint(lambda *_: answers.pop(0), max_retries=1)
    assert (await FineTuningService(endpoint).create_job_once("k", {})).id == "ftjob-1"


# Mutated answers.

ODD: list[Any] = [
    None, True, False, 0, -1, 10**30, 1.5, float("nan"), float("inf"), "", "boom", "\ud800", "\x1b[31m", KEY,
    [], [[]], [None], ["x"], {}, {"error": "boom"}, {"id": None}, {"data": None}, "7", "null", "<" * 300,
]  # fmt: skip
TEXTS = [
    "",
    "null",
    "[",
    "[" * 100_000,
    '{"a":' * 50_000,
    "9" * 5000,
    "\x00",
    '"\\ud800"',
    "<html>",
    "{}",
    "[]",
    "1e999",
]
ANSWERS = {
    "upload": page(FILE),
    "create": page({**JOB, "id": "ftjob-0", "metadata": {}}, JOB),
    "access": page(JOB),
    "retrieve": JOB,
    "cancel": JOB,
    "chat": CHAT,
}


def iterate_paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in pairs:
        yield from iterate_paths(below, (*path, key))


def mutate(answer: Any, rng: random.Random) -> Any:
    answer = copy.deepcopy(answer)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(list(iterate_paths(answer)))
        if not path:
            answer = copy.deepcopy(rng.choice([answer, *ODD]))
            continue
        parent = functools.reduce(lambda value, key: value[key], path[:-1], answer)
        if rng.random() < 0.3:
            del parent[path[-1]]
        else:
            parent[path[-1]] = copy.deepcopy(rng.choice(ODD))
    return answer


async def ask_anything(kind: str, answer: Any) -> None:
    """Makes a call; what it raises is of the `BackendError` family, and what it returns is typed."""
    allowed = (BackendError, RetryableError) if kind == "retrieve" else BackendError  # its callers catch the second
    text = ""
    try:
        async with asyncio.timeout(30):
            if kind == "wait":
                result = await wait_for_job(answer, max_wait_s=0.004)
                assert isinstance(result.status, TrainingStatusEnum)
            else:
                result = await ask(kind, answer)
    except allowed as error:
        text = str(error)
    else:
        if kind == "chat":
            assert all(isinstance(reply.message["content"], str | None) for reply in result)
            assert all(0 <= reply.num_prompt_tokens < 2**62 for reply in result)
    assert KEY not in text
    assert text.encode().decode() == text, "it can be printed"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from([*ANSWERS, "wait"]),
    seed=st.integers(0, 2**32),
    text=st.none() | st.none() | st.none() | st.sampled_from(TEXTS) | st.text(max_size=20),
)
@example(kind="upload", seed=0, text='{"data": [{"filename": "x"}]}')
@example(kind="retrieve", seed=0, text='{"error": "boom"}')
def test_no_mutated_answer_raises_anything_else(kind: str, seed: int, text: str | None) -> None:
    answer = mutate(ANSWERS.get(kind, JOB), random.Random(seed)) if text is None else text
    asyncio.run(ask_anything(kind, answer))


# Error responses.


@pytest.mark.parametrize("text", ["<" * 200_000, "<a" * 100_000, " " * 200_000 + "<b", "x" * 300_000])
def test_the_message_of_a_large_error_page_is_found_in_linear_time(text: str) -> None:
    started = time.process_time()
    assert len(extract_error_message(text)) <= 300
    assert time.process_time() - started < 0.5, "a pattern that is quadratic takes 20 s"


def test_the_message_of_an_error_can_always_be_printed() -> None:
    assert extract_error_message('{"error": {"message": "a\\ud800b"}}') == "a?b"
    assert isinstance(BackendUnavailable("x"), BackendError)
