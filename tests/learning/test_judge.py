"""Chats that nobody rates, scored by an evaluator in the background."""

import asyncio
import contextlib
import secrets
import time

import pytest

from reinforge.errors import ConfigError
from reinforge.learning import judge as judging
from reinforge.learning.api import LearningApi
from reinforge.learning.export import build_records, count_new
from reinforge.learning.judge import ChatJudgeConfig, Judge
from reinforge.learning.store import STORE, read_chats
from reinforge.routing.live_comparison import LiveScore
from reinforge.serving.recording import RecordConfig
from tests.doubles import ScriptedPolicy
from tests.learning.learning import chat, kept, rate
from tests.serving.serving import http, serve, wait_for

CODE = """
def by_length(item):
    assert item.input_obj[-1]["content"], "the messages before the reply"
    return len(item.output_obj) / 10

def breaks(output, expected):
    raise RuntimeError("no idea")
"""

RUN = "eval: {{evaluators: {{short: {{_type: python, function: '{}:by_length'}}}}}}\n"


def write_module(folder):
    """Returns the name of a module with these functions, which no other folder has: Python would import that one."""
    name = f"scores_{secrets.token_hex(4)}"
    (folder / f"{name}.py").write_text(CODE)
    return name


@contextlib.asynccontextmanager
async def judged(folder, monkeypatch, *, evaluator="{}:by_length", run=None, **config):
    """Yields a client of a server whose replies are the questions, and whose judge looks all the time."""
    monkeypatch.setattr(judging, "LOOK_S", 0.01)
    settings = ChatJudgeConfig(
        evaluator=evaluator.format(write_module(folder)), **{"share": 1.0, "after_minutes": 0.0, **config}
    )
    learning = LearningApi(folder, RecordConfig(), None, judge=Judge(settings, folder / "learn.yml", run, folder))
    policy = ScriptedPolicy(lambda request: request.messages[-1]["content"])
    async with (
        serve({"m": policy}, [learning], keeper=learning.keeper) as app,
        http(app, headers={"authorization": "Bearer any"}) as client,
    ):
        yield client, learning


def opinions(folder):
    return [each.opinions for each in kept(folder)]


async def count(client):
    found = (await client.get("/v1/learn")).json()
    return found["chats"], found["feedback"], found["judged"]


async def test_what_nobody_rates_is_judged_and_counted_apart(tmp_path, monkeypatch):
    async with judged(tmp_path, monkeypatch) as (client, _):
        await chat(client, "1234567")  # 7 characters: 0.7
        await chat(client, "12")
        await wait_for(lambda: [*map(len, opinions(tmp_path))] == [1, 1])
        assert opinions(tmp_path) == [
            {"judge": {"score": 0.7, "label": True}},
            {"judge": {"score": 0.2, "label": False}},
        ]
        assert await count(client) == (2, 0, 2)
        assert count_new(tmp_path / STORE, "kto") == 2
        assert count_new(tmp_path / STORE, "kto", judged=False) == 0
        [good, bad] = read_chats(tmp_path / STORE, judged=False)
        assert not list(build_records(good, "kto")) + list(build_records(bad, "sft"))


async def test_what_a_user_says_replaces_the_judge_and_is_never_judged(tmp_path, monkeypatch):
    async with judged(tmp_path, monkeypatch, after_minutes=1) as (client, _):
        rated, other = [(await chat(client, text))["id"] for text in ("1234567", "123")]
        await rate(client, id=rated, thumb="down")
        await asyncio.sleep(0.2)
        assert opinions(tmp_path) == [{"user": {"label": False}}, {}], "a minute has not passed"
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 61)
        await wait_for(lambda: opinions(tmp_path)[1])
        assert opinions(tmp_path) == [{"user": {"label": False}}, {"judge": {"score": 0.3, "label": False}}]
        await rate(client, id=other, comment="hm")
        assert opinions(tmp_path)[1].keys() == {"judge", "user"}
        await rate(client, id=other, thumb="up")
        assert opinions(tmp_path)[1] == {"user": {"comment": "hm", "label": True}}
        assert await count(client) == (2, 3, 1)


async def test_clients_cannot_speak_as_the_judge(tmp_path, monkeypatch):
    async with judged(tmp_path, monkeypatch, after_minutes=9) as (client, _):
        id_ = (await chat(client))["id"]
        found = await rate(client, id=id_, score=1, source="judge")
        assert (found.status_code, found.json()["error"]["param"]) == (400, "source")
        assert "the source 'judge' is the server's own" in found.json()["error"]["message"]
        assert await count(client) == (1, 0, 0)


@pytest.mark.parametrize(("compare", "score"), [(False, None), (True, 0.7)])
async def test_a_comparison_counts_the_judge_only_if_asked(tmp_path, monkeypatch, compare, score):
    async with judged(tmp_path, monkeypatch, compare=compare) as (client, learning):
        monkeypatch.setattr(learning._writer, "_find_split", lambda *names: (5, 1))  # as if a candidate were served
        await chat(client, "1234567", user="ann")
        await wait_for(lambda: kept(tmp_path) and all(opinions(tmp_path)))
        [found] = learning.store.read_scores()
        assert (found.score, isinstance(found, LiveScore)) == (score, True)


async def test_a_share_of_the_chats_is_judged(tmp_path, monkeypatch):
    looks, find_next = [], Judge.find_next

    def look(self, seq):
        looks.append(found := find_next(self, seq))
        return found

    monkeypatch.setattr(Judge, "find_next", look)
    async with judged(tmp_path, monkeypatch, share=0.25) as (client, _):
        for number in range(60):
            await chat(client, f"{number}")
        assert (await count(client))[0] == 60, "all are in the store"
        begun = len(looks) + 1  # the current look may have started earlier
        await wait_for(lambda: None in looks[begun:])
        assert 5 <= (await count(client))[2] <= 27  # 15 expected, within 3.6 standard deviations


async def test_an_evaluator_that_fails_leaves_the_chat_as_it_is(tmp_path, monkeypatch, caplog):
    async with judged(tmp_path, monkeypatch, evaluator="{}:breaks") as (client, _):
        await chat(client, "12")
        await wait_for(lambda: ":breaks has no score of the chat" in caplog.text)
        assert "no idea" in caplog.text
        assert (await chat(client, "34"))["choices"][0]["message"]["content"] == "34"
        await wait_for(lambda: caplog.text.count("has no score of") == 2)
        await asyncio.sleep(0.2)
        assert caplog.text.count("has no score of") == 2, "each chat is tried once"
        assert await count(client) == (2, 0, 0)


async def test_an_evaluator_of_the_run_scores_as_in_a_run(tmp_path, monkeypatch):
    run = tmp_path / "run.yml"
    run.write_text(RUN.format(write_module(tmp_path)))
    async with judged(tmp_path, monkeypatch, evaluator="short", run=run) as (client, _):
        await chat(client, "1234567890ab")  # 1.2 is neither good nor bad
        await wait_for(lambda: kept(tmp_path) and all(opinions(tmp_path)))
        assert opinions(tmp_path) == [{"judge": {"score": 1.2}}]


@pytest.mark.parametrize(
    ("evaluator", "has_run", "words"),
    [
        ("other", True, "judge.evaluator: .*run.yml has no evaluator 'other'\n.*name one of short"),
        ("short", False, "judge.evaluator: no file has an evaluator 'short'\n.*module:function"),
        ("{}:missing", False, "scores_.*missing"),
    ],
)
async def test_an_evaluator_that_does_not_exist_stops_the_start(tmp_path, evaluator, has_run, words):
    (tmp_path / "run.yml").write_text(RUN.format(write_module(tmp_path)))
    judge = Judge(
        ChatJudgeConfig(evaluator=evaluator.format(write_module(tmp_path))),
        tmp_path / "learn.yml",
        tmp_path / "run.yml" if has_run else None,
        tmp_path,
    )
    with pytest.raises(ConfigError, match=words):
        async with judge.open():
            pass
