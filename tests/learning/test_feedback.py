"""Feedback: what is taken, and the rules for repeated, contradicting and late feedback; what is deleted."""

import asyncio
import json

from reinforge.learning.capture import StoreKeeper
from tests.learning.learning import chat, kept, learn, rate
from tests.serving.serving import says

UP, DOWN = {"thumb": "up"}, {"thumb": "down"}


async def test_thumbs_labels_and_scores_are_the_same_in_all_their_forms(tmp_path):
    async with learn(tmp_path) as (client, _):
        for given in ({"thumb": "up"}, {"thumb": "👍"}, {"thumb": 1}, {"label": True}, {"thumb": True}):
            assert (await rate(client, id=(await chat(client))["id"], **given)).status_code == 200
        for given in ({"thumb": "down"}, {"thumb": 0}, {"thumb": -1}, {"label": False}):
            assert (await rate(client, id=(await chat(client))["id"], **given)).status_code == 200
        scored = await chat(client)
        assert (await rate(client, id=scored["id"], score=0.25, comment="short", source="agent")).status_code == 200
    *labeled, last = kept(tmp_path)
    assert [each.labels for each in labeled] == [{True}] * 5 + [{False}] * 4
    assert last.opinions == {"agent": {"score": 0.25, "comment": "short"}}


NO_FEEDBACK = [
    ({"thumb": "up"}, "either id"),
    ({"id": "a", "session_id": "b", "thumb": "up"}, "either id"),
    ({"id": "a"}, "expected a score"),
    ({"id": "a", "thumb": "up", "label": True}, "are the same"),
    ({"id": "a", "thumb": "sideways"}, "expected up or down"),
    ({"id": "a", "thumb": 3}, "expected up or down"),
    ({"id": "a", "score": "0.5"}, "score"),
    ({"id": "a", "score": 1e400}, "score"),
    ({"id": "a", "label": 1}, "label"),
    ({"session_id": "a", "correction": "b"}, "send its id"),
    ({"id": "a", "thumbs": "up"}, "thumbs"),
    ({"id": "a", "comment": "x" * 10_001}, "comment"),
    ({"id": "a\ud800", "thumb": "up"}, "id"),
    ({"id": "a", "thumb": "up", "source": "a\ud800"}, "source"),
    ({"id": "a", "comment": "\ud800"}, "comment"),
    ({"id": "a", "thumb": "up", "key": ""}, "key"),
]


async def test_what_is_no_feedback_is_refused_by_name(tmp_path):
    async with learn(tmp_path) as (client, _):
        for body, words in NO_FEEDBACK:
            text = json.dumps(body).replace("Infinity", "1e400")
            response = await client.post("/v1/feedback", content=text, headers={"content-type": "application/json"})
            assert response.status_code in (400, 422), response.text
            assert words in response.json()["error"]["message"]
        answer = await chat(client)  # the store still works
        assert (await rate(client, id=answer["id"], **UP)).status_code == 200


async def test_a_request_repeated_with_its_key_changes_nothing(tmp_path):
    async with learn(tmp_path) as (client, _):
        id_ = (await chat(client))["id"]
        first = (await rate(client, id=id_, key="k1", **UP)).json()
        second = (await rate(client, id=id_, headers={"idempotency-key": "k2"}, **DOWN)).json()
        again = (await rate(client, id=id_, headers={"idempotency-key": "k1"}, **UP)).json()
        assert (first["is_new"], second["is_new"], again) == (True, True, {**first, "is_new": False})
        other = await rate(client, id=id_, key="k1", score=1)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
        differ = await rate(client, id=id_, key="k1", headers={"idempotency-key": "k2"}, **UP)
        assert differ.status_code == 400
    [found] = kept(tmp_path)
    assert found.labels == {False}  # the repetition of k1 came after k2, and is no new opinion


async def test_the_newest_counts_field_by_field_and_sources_do_not_overrule_each_other(tmp_path):
    async with learn(tmp_path) as (client, _):
        id_ = (await chat(client))["id"]
        for body in (UP, {"score": 0.2}, DOWN, {"comment": "meh"}, {"score": None}):
            assert (await rate(client, id=id_, **body)).json()["is_new"]
        assert not (await rate(client, id=id_, **DOWN)).json()["is_new"]
        assert (await rate(client, id=id_, source="agent", **UP)).json()["is_new"]
    [found] = kept(tmp_path)
    assert found.opinions == {"user": {"label": False, "comment": "meh"}, "agent": {"label": True}}
    assert found.labels == {True, False}


async def test_a_session_is_rated_as_far_as_it_had_come_and_a_reply_by_itself_first(tmp_path):
    session = {"metadata": {"session_id": "s"}}
    async with learn(tmp_path) as (client, _):
        assert (await rate(client, session_id="s", **UP)).status_code == 404
        first, _ = await chat(client, "a", **session), await chat(client, "b", **session)
        assert (await rate(client, session_id="s", **UP)).status_code == 200
        await chat(client, "c", **session)
        await rate(client, id=first["id"], score=0.5, **DOWN)
    assert [each.opinions for each in kept(tmp_path)] == [
        {"user": {"label": False, "score": 0.5}},
        {"user": {"label": True}},
        {},
    ]


async def test_unknown_chats_and_those_of_another_key_are_not_found(tmp_path):
    async with learn(tmp_path) as (client, _):
        mine = await chat(client, user="ann", metadata={"session_id": "s"})
        other = {"authorization": "Bearer other"}
        for body in ({"id": mine["id"]}, {"session_id": "s"}):
            assert (await rate(client, headers=other, **body, **UP)).status_code == 404
        unknown = await rate(client, id="chatcmpl-0", **UP)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "chat_not_found")
        gone = (await client.delete("/v1/learn/users/ann", headers=other)).json()
        assert gone == {"object": "user.deleted", "chats": 0, "feedback": 0, "versions": []}
        assert (await client.get("/v1/learn", headers=other)).json()["chats"] == 0
        assert (await rate(client, id=mine["id"], **UP)).status_code == 200


async def test_without_keys_chats_of_others_could_be_rated(tmp_path, monkeypatch):
    monkeypatch.setattr(StoreKeeper, "hash_key", lambda self, request: "one for all")
    async with learn(tmp_path) as (client, _):
        mine = await chat(client)
        assert (await rate(client, headers={"authorization": "Bearer other"}, id=mine["id"], **UP)).status_code == 200


async def test_the_chat_page_and_clients_of_a_server_with_a_key_are_one_owner(tmp_path):
    token = "sk-0123456789abcdef"
    async with learn(tmp_path, token=token) as (client, _):
        answer = await chat(client)
        cookie = {"authorization": "", "cookie": f"reinforge-serve-{client.app.port}={token}"}
        page = await client.get("/", headers=cookie)
        assert "<body data-feedback>" in page.text
        assert (await rate(client, id=answer["id"], headers=cookie, **UP)).status_code == 200
        assert (await rate(client, id=answer["id"], headers={"authorization": "Bearer wrong"}, **UP)).status_code == 401


async def test_feedback_on_one_chat_is_limited(tmp_path):
    async with learn(tmp_path) as (client, _):
        id_ = (await chat(client))["id"]
        found = [(await rate(client, id=id_, score=number)).status_code for number in range(102)]
    assert found == [200] * 100 + [409] * 2


async def test_feedback_right_after_an_answer_finds_its_chat(tmp_path):
    async with learn(tmp_path) as (client, _):

        async def talk(number):
            answer = await chat(client, f"question {number}")
            return (await rate(client, id=answer["id"], score=number)).status_code

        assert await asyncio.gather(*(talk(number) for number in range(40))) == [200] * 40
    assert sorted(each.opinions["user"]["score"] for each in kept(tmp_path)) == list(range(40))


async def test_deleting_a_person_removes_whole_conversations_and_lists_the_versions(tmp_path):
    async with learn(tmp_path) as (client, learning):
        mine = await chat(client, "mine is pink", user="ann", metadata={"session_id": "s"})
        await chat(client, "pink, I said", metadata={"session_id": "s"})  # without her id
        theirs = await chat(client, "theirs", user="bob")
        for each in (mine, theirs):
            await rate(client, id=each["id"], comment="pink", **UP)
        await rate(client, session_id="s", **DOWN)
        keys = {each.id: each.key for each in kept(tmp_path)}
        learning.store.record_training("m@1", [(keys[mine["id"]], mine["id"])])
        learning.store.record_training("m@2", [(key, id_) for id_, key in keys.items()])
        learning.store.record_training("m@3", [(keys[theirs["id"]], theirs["id"])])
        gone = {"object": "user.deleted", "chats": 2, "feedback": 2, "versions": ["m@1", "m@2"]}
        assert (await client.delete("/v1/learn/users/ann")).json() == gone
        again = {**gone, "chats": 0, "feedback": 0}
        assert (await client.delete("/v1/learn/users/ann")).json() == again
        assert (await rate(client, id=mine["id"], **UP)).status_code == 404
        assert (tmp_path / "learn.sqlite-wal").stat().st_size == 0
        await chat(client, "new", user="ann")
        assert (await client.delete("/v1/learn/users/ann")).json()["versions"] == ["m@1", "m@2"]
    assert [each.id for each in kept(tmp_path)] == [theirs["id"]]
    assert says("mine is pink")[0]["content"].encode() not in (tmp_path / "learn.sqlite").read_bytes()
