"""Rows of a store: which chats each use takes, as what, and that the loop trains on them."""

import json

import pytest

from reinforge.learning.export import export_rows
from reinforge.learning.store import STORE, LearningStore
from tests.learning.learning import chat, kept, learn, rate
from tests.serving.serving import async_anthropic


@pytest.fixture
async def store(tmp_path):
    """A store with six chats: up, down, both, corrected, scored, not rated."""
    folder = tmp_path / "data"
    folder.mkdir()
    async with learn(folder, lambda request: f"re {request.messages[-1]['content']}") as (client, _):
        session = {"metadata": {"session_id": "s"}}
        await rate(client, id=(await chat(client, "up", **session))["id"], thumb="up")
        await rate(client, id=(await chat(client, "down", **session))["id"], thumb="down")
        both = (await chat(client, "both"))["id"]
        await rate(client, id=both, thumb="up")
        await rate(client, id=both, thumb="down", source="agent")
        async with async_anthropic(client.app) as anthropic:
            question = [{"role": "user", "content": "corrected"}]
            answer = await anthropic.messages.create(model="m", max_tokens=99, system="Be brief.", messages=question)
        await rate(client, id=answer.id, correction="better", thumb="down")
        await rate(client, id=(await chat(client, "scored"))["id"], score=0.5)
        await chat(client, "not rated")
    return folder / STORE


def export(store, use, **more):
    output = store.parent / f"{use}.jsonl"
    export_rows(store, output, use, **more)
    return [json.loads(line) for line in output.read_text().splitlines()]


def question(row):
    return next(each["content"] for each in row.get("prompt") or row["messages"] if each["role"] == "user")


def test_each_use_takes_what_it_can_learn_from(store):
    rows = export(store, "all")
    found = {question(row): (row.get("label"), row.get("reward")) for row in rows}
    assert found == {
        "up": (True, None), "down": (False, None), "both": (None, None), "corrected": (False, None),
        "scored": (None, 0.5), "not rated": (None, None),
    }  # fmt: skip
    assert rows[0]["conversation"] == rows[1]["conversation"] != rows[2]["conversation"]
    assert {row["messages"][-1]["content"]: row["label"] for row in export(store, "kto")} == {
        "re up": True, "re down": False, "better": True, "re corrected": False,
    }  # fmt: skip
    assert [(question(row), row["messages"][-1]["content"]) for row in export(store, "sft")] == [
        ("up", "re up"), ("corrected", "better"),
    ]  # fmt: skip
    [pair] = export(store, "dpo")
    assert pair["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "corrected"}]
    assert [pair[side][0]["content"] for side in ("chosen", "rejected")] == ["better", "re corrected"]


def test_the_chats_of_a_version_are_recorded(store):
    export(store, "kto", version="m@1")
    opened = LearningStore(store)
    used = opened.run(lambda db: db.execute("SELECT version, chat FROM trainings ORDER BY rowid").fetchall())
    opened.close()
    assert used == [("m@1", each.id) for each in kept(store.parent) if len(each.labels) == 1]
