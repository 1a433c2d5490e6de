"""A small model that answers what it is sure of, and a large one behind it."""

import json

import pytest

from reinforge.errors import ConfigError
from reinforge.routing.router import Router
from reinforge.serving import fallback
from reinforge.serving.app import ServeApp
from reinforge.serving.fallback import FallbackApi
from reinforge.serving.models import ServedModels
from reinforge.serving.recording import RecordConfig, Recorder
from reinforge.serving.routes import ServerLimits
from reinforge.serving.upstream import KEY_HEADER, UpstreamApi
from reinforge.types.request import ModelReply, TokenLogprobs
from tests.doubles import ScriptedPolicy, ids_of
from tests.serving.large_model import LargeModel, read_records
from tests.serving.serving import async_openai, http, says, wait_for

CALIBRATED = {"margin": 0.02, "confidence": 0.95, "share": 0.7, "share_low": 0.6, "share_high": 0.8}
CALIBRATED |= {"num_requests": 100, "num_clusters": 100, "data_sha256": "0"}


class Student(ScriptedPolicy):
    """Is sure of its reply if the question says so."""

    async def sample(self, request):
        self.requests.append(request)
        logprob = -0.1 if "sure" in request.messages[-1]["content"] else -2.0
        ids = ids_of("small")
        tokens = TokenLogprobs((1, 2), ids, (logprob,) * len(ids), 0)
        return ModelReply({"role": "assistant", "content": "small"}, "stop", tokens, 2, len(ids))


def router(signal="mean_logprob", threshold=-0.5):
    kept = () if threshold is None else (threshold,)
    return Router(signal=signal, threshold=threshold, kept=kept, **CALIBRATED)


@pytest.fixture
async def large():
    async with LargeModel() as running:
        yield running


@pytest.fixture
def start():
    def build(url, *, per_day=None, recorder=None, **settings):
        models, limits = ServedModels(), ServerLimits()
        models.add("small", Student())
        chat = FallbackApi(models, limits, UpstreamApi(url, recorder), router(**settings), per_day)
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
    async with start(large.url, threshold=None) as app:
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


async def test_the_days_budget(large, start, monkeypatch):
    async with start(large.url, per_day=2) as app:
        assert await ask(app, "broken") == ("small", "local", "upstream_down")  # costs nothing
        assert [(await ask(app, "hm"))[2] for _ in range(3)] == ["unsure", "unsure", "budget_spent"]
        tomorrow = fallback.time.time() + fallback.DAY_S
        monkeypatch.setattr(fallback.time, "time", lambda: tomorrow)
        assert await ask(app, "hm") == ("echo hm", "upstream", "unsure")


async def test_what_the_upstream_answers_is_recorded(large, start, tmp_path):
    recorder = Recorder(tmp_path / "logs", RecordConfig())
    async with start(large.url, recorder=recorder) as app:
        await ask(app, "sure")
        await ask(app, "hm")
        await wait_for(lambda: sum(recorder.counts.values()))
    (record,) = read_records(tmp_path / "logs")
    assert json.dumps(record["response"]).count("echo hm") == 1


def test_a_signal_that_takes_several_replies_is_refused(start):
    with pytest.raises(ConfigError, match="agreement, which takes more than one reply"):
        start("http://127.0.0.1:9/v1", signal="agreement")
