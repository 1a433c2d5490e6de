"""What a server with --learn keeps of chats: exact tokens, by conversation, as far as `record:` says."""

import asyncio
import hashlib
import time

from reinforge.learning.api import LearningApi
from reinforge.serving.recording import RecordConfig
from tests.doubles import ScriptedPolicy, ids_of
from tests.learning.learning import chat, kept, learn, rate
from tests.serving.serving import async_anthropic, async_openai, http, says, serve


async def test_chats_of_three_apis_are_kept_with_tokens_log_probs_and_version(tmp_path):
    policy = ScriptedPolicy(lambda request: "four")
    await policy.publish(7)
    async with learn(tmp_path, policy=policy) as (client, _):
        ids = [(await chat(client, "2 + 2"))["id"]]
        async with async_openai(client.app) as openai:
            ids.append((await openai.responses.create(model="m", input="2 + 2")).id)
        async with async_anthropic(client.app) as anthropic:
            ids.append((await anthropic.messages.create(model="m", max_tokens=9, messages=says("2 + 2"))).id)
        async with client.stream(
            "POST", "/v1/chat/completions", json={"model": "m", "messages": says("2 + 2"), "stream": True}
        ) as stream:
            events = [line async for line in stream.aiter_lines()]
        ids.append(events[0].split('"id":"')[1].split('"')[0])
    chats = kept(tmp_path)
    assert [each.id for each in chats] == ids
    assert [each.id[:5] for each in chats] == ["chatc", "resp_", "msg_" + ids[2][4], "chatc"]
    for each in chats:
        assert (each.model, each.version) == ("m", 7)
        assert tuple(each.tokens.prompt_token_ids) == ids_of("2 + 2")
        assert (each.tokens.token_ids, each.tokens.logprobs) == (ids_of("four"), (-0.5,) * 4)


async def test_a_server_that_keeps_nothing_takes_no_feedback():
    async with serve({"m": ScriptedPolicy()}) as app, http(app) as client:
        assert (await client.post("/v1/feedback", json={"id": "a", "thumb": "up"})).status_code == 404
        assert "<body>" in (await client.get("/")).text


async def test_chats_of_a_session_are_one_conversation_and_no_id_of_a_person_is_on_disk(tmp_path):
    async with learn(tmp_path) as (client, _):
        await chat(client, "a", metadata={"session_id": "s-secret"}, user="ann@example.org")
        await chat(client, "b", metadata={"session_id": "s-secret"}, user="ann@example.org")
        await chat(client, "c", headers={"x-session-id": "other"})
        await chat(client, "a", metadata={"session_id": "s-secret"}, headers={"authorization": "Bearer key-2"})
        first = await chat(client, "hello", user="ann@example.org")
        said = [*says("hello"), {"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
        more = {"model": "m", "messages": [*said, *says("more")], "user": "ann@example.org"}
        await client.post("/v1/chat/completions", json=more)
        await chat(client, "hello", user="bob@example.org")
    names = [each.conversation for each in kept(tmp_path)]
    assert [names.index(name) for name in names] == [0, 0, 2, 3, 4, 4, 6]
    texts = b"".join(path.read_bytes() for path in tmp_path.iterdir()) + repr(kept(tmp_path)).encode()
    assert b"secret" not in texts
    assert b"example.org" not in texts


async def test_what_is_removed_is_neither_in_the_texts_nor_in_the_tokens(tmp_path):
    script = lambda request: "call 555-1234"  # noqa: E731
    async with learn(tmp_path, script, remove=[r"\d{3}-\d{4}"]) as (client, _):
        answer = await chat(client, "who?", logprobs=True, return_token_ids=True)
        await rate(client, id=answer["id"], correction="call 555-9999", comment="not 555-1234")
    [found] = kept(tmp_path)
    assert found.tokens is None
    assert found.record["response"]["choices"][0]["message"]["content"] == "call [removed]"
    assert "555" not in repr(found)
    assert str(list(ids_of("call"))).strip("[]") not in repr(found)
    assert found.correction == "call [removed]"


async def test_without_consent_or_outside_the_share_nothing_is_kept(tmp_path):
    key = hashlib.sha256(b"agreed").hexdigest()
    async with learn(tmp_path, consent={"keys": [key]}) as (client, learning):
        await chat(client)
        assert (await chat(client, headers={"authorization": "Bearer agreed"}))["id"]
        counts = learning._recorder.counts
    assert (len(kept(tmp_path)), counts["no_consent"]) == (1, 1)
    (tmp_path / "share").mkdir()
    async with learn(tmp_path / "share", share=0) as (client, learning):
        answer = await chat(client)
        assert (await rate(client, id=answer["id"], thumb="up")).status_code == 404
    assert kept(tmp_path / "share") == []


async def test_cut_replies_several_choices_and_failed_calls_are_counted_and_not_kept(tmp_path):
    async with learn(tmp_path, lambda request: "a long reply") as (client, learning):
        await chat(client, max_tokens=2)
        await chat(client, n=2)
        assert (await client.post("/v1/chat/completions", content=b"{")).status_code == 400
        assert (
            await client.post("/v1/chat/completions", json={"model": "x", "messages": says("a")})
        ).status_code == 404
        assert (await client.get("/v1/learn")).json() == {
            "object": "learn",
            "chats": 0,
            "feedback": 0,
            "judged": 0,
            "versions": [],
        }
        assert learning._recorder.counts == {"cut": 1, "several_replies": 1}
        assert learning._recorder._taken == learning._recorder._freed


async def test_chats_older_than_the_days_are_deleted_with_their_feedback(tmp_path):
    async with learn(tmp_path) as (client, learning):
        old, new = await chat(client), await chat(client)
        for each in (old, new):
            assert (await rate(client, id=each["id"], thumb="up")).status_code == 200
        age = "UPDATE chats SET started_s = ? WHERE id = ?"
        learning.store.run(lambda db: db.execute(age, (time.time() - 3 * 86400, old["id"])))
    async with learn(tmp_path, days=3) as (client, _):
        assert (await client.get("/v1/learn")).json() == {
            "object": "learn",
            "chats": 1,
            "feedback": 1,
            "judged": 0,
            "versions": [],
        }
        assert (await rate(client, id=old["id"], thumb="up")).status_code == 404
    assert [each.id for each in kept(tmp_path)] == [new["id"]]


async def test_a_store_that_is_full_keeps_no_chats_and_the_server_answers(tmp_path, caplog):
    async with learn(tmp_path, lambda request: request.messages[0]["content"][::-1], max_mb=0.2) as (client, learning):
        first = await chat(client)
        for number in range(60):
            await chat(client, hashlib.shake_256(str(number).encode()).hexdigest(4000))
            await client.get("/v1/learn")  # returns once the chat is in the store: those that wait would all be kept
        assert learning._recorder.counts["full"] > 10
        assert learning.store.num_bytes < 0.35e6  # of 0.5
        assert (await rate(client, id=first["id"], thumb="up")).status_code in (200, 507)
    assert [record.message.count("record.max_mb") for record in caplog.records if "max_mb" in record.message] == [1]


async def test_a_store_that_cannot_be_written_stops_keeping_and_never_serving(tmp_path, caplog):
    async with learn(tmp_path) as (client, learning):
        answer = await chat(client)
        await asyncio.sleep(0.2)
        learning.store.run(lambda db: db.execute("PRAGMA max_page_count = 1"))  # as on a full disk
        for number in range(5):
            await chat(client, hashlib.shake_256(str(number).encode()).hexdigest(20_000))
            await asyncio.sleep(0.1)
        refused = await rate(client, id=answer["id"], thumb="up")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert (await chat(client, "still"))["choices"]
    assert len([each for each in caplog.records if "recording failed" in each.message]) == 1


class DrawnVersion:
    """Stands for a folder of versions `m` of which a split, with the seed 7, drew version 2 for every conversation."""

    name, split = "m", 7

    def __init__(self):
        self.calls = []

    def find_split(self, conversation, version):
        return self.split if version == 2 else None

    async def rate(self, scores, calls=(), *, are_all=False):
        self.calls = [*([] if are_all else self.calls), *calls]

    async def describe(self):
        return {}


def answer_by_text(request):
    text = request.messages[-1]["content"]
    return RuntimeError("the engine failed") if text == "fail" else ValueError("bad") if text == "bad" else "reply"


async def test_calls_that_fail_or_are_cut_are_counted_as_errors_of_their_version(tmp_path):
    live = DrawnVersion()
    learning = LearningApi(tmp_path, RecordConfig(), None, [live])
    policies = {"m@2": ScriptedPolicy(answer_by_text)}
    async with serve(policies, [learning], keeper=learning.keeper) as app, http(app) as client:
        statuses = []
        for text, more in (
            ("hi", {}),
            ("hi", {"max_tokens": 2}),
            ("fail", {}),
            ("fail", {"stream": True}),
            ("bad", {}),  # the fault of the request
            ("hi", {"stream": True}),
        ):
            body = {"messages": says(text), "user": "ann", **more}
            statuses.append((await client.post("/v1/chat/completions", json=body)).status_code)
        no_user = {"messages": says("fail")}
        assert (await client.post("/v1/chat/completions", json=no_user)).status_code == 500
        assert statuses == [200, 200, 500, 500, 400, 200]
        assert (await client.get("/v1/learn")).json()["chats"] == 2
        assert [(each.version, each.tokens, bool(each.is_error)) for each in live.calls] == [
            (2, 5, False),
            (2, 5, True),
            (2, None, True),
            (2, None, True),
            (2, 5, False),
        ]
        assert [each.seconds is None for each in live.calls] == [False, False, True, True, False]
        assert learning._recorder.counts == {"recorded": 2, "cut": 1, "failed": 3}
        await client.delete("/v1/learn/users/ann")
        assert live.calls == []
    assert b"ann" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
