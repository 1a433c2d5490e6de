"""`reinforge serve --learn` and `reinforge learn export` as commands, and the snippets of docs/learning-server.md."""

import asyncio
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.learning.store import STORE
from tests.capture_page import SNIPPET
from tests.learning.learning import chat, kept, learn, rate
from tests.serving.serving import start_command

PAGE = (Path(__file__).parents[2] / "docs" / "learning-server.md").read_text(encoding="utf-8")
SNIPPETS = {name: text for name, _, text in SNIPPET.findall(PAGE)}


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.mark.slow
def test_chats_of_a_served_model_become_rows_although_the_server_is_killed(tiny_model_dir, tmp_path):
    (tmp_path / "learn.yml").write_text("record:\n  days: 30\n")
    data = tmp_path / "data"
    options = ("--learn", tmp_path / "learn.yml", "--data_dir", data, "--port", 0)
    process = start_command("serve", tiny_model_dir, *options)
    try:
        said = "".join(process.stdout.readline() for _ in range(6))
        [address] = re.findall(r"OPENAI_BASE_URL=(\S+)", said)
        assert re.search(rf"Keeping chats in {re.escape(str(data))}\. Rate one:\n  curl {address}/feedback", said)
        with httpx.Client(base_url=address, timeout=60) as client:
            for number in range(6):
                body = {"messages": [{"role": "user", "content": f"hi {number}"}]}
                body["structured_outputs"] = {"choice": ["yes", "no"]}  # a random model seldom ends its reply
                id_ = client.post("/chat/completions", json=body).json()["id"]
                client.post("/feedback", json={"id": id_, "thumb": number % 2})
            counts = client.get("/learn").json()
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert (counts["chats"], counts["feedback"]) == (6, 6)
    assert [each.labels for each in kept(data)] == [{False}, {True}] * 3
    for each in kept(data):
        assert len(each.tokens.logprobs) == len(each.tokens.token_ids) > 0
        assert len(each.tokens.supports.counts) == len(each.tokens.token_ids)  # a grammar restricts the reply


async def test_export_writes_rows_and_refuses_what_it_cannot_do(tmp_path):
    async with learn(tmp_path) as (client, _):
        await rate(client, id=(await chat(client))["id"], thumb="up")
    output = tmp_path / "rows.jsonl"
    found = run("learn", "export", tmp_path, "--use", "kto", "--output", output)
    assert found.exit_code == 0, found.output
    assert "next: reinforge data validate" in found.output
    [row] = map(json.loads, output.read_text().splitlines())
    assert (row["label"], row["messages"][-1]["content"]) == (True, "yes")
    assert "exists already" in run("learn", "export", tmp_path, "--output", output).output
    none = run("learn", "export", tmp_path, "--use", "dpo", "--output", output, "--overwrite")
    assert none.exit_code == 2
    assert "can be used for dpo; `--use all`" in none.output
    assert output.read_text().startswith('{"id"')
    (tmp_path / "empty").mkdir()
    assert f"no {STORE}" in run("learn", "export", tmp_path / "empty", "--output", tmp_path / "a").output


@pytest.mark.parametrize(
    ("text", "words"),
    [("share: 0.5\n", "write everything below `record:`"), ("record:\n  day: 3\n", "record.day")],
)
def test_a_wrong_learn_yml_is_refused_with_its_line(tiny_model_dir, tmp_path, text, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("learn.yml").write_text(text)
    found = run("serve", tiny_model_dir, "--learn", "learn.yml", "--port", 0)
    assert words in found.output


def test_learn_keeps_what_the_model_answers_only(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("learn.yml").write_text("record: {}\n")
    found = run("serve", "--upstream", "http://127.0.0.1:1/v1", "--learn", "learn.yml")
    assert found.exit_code == 2
    assert "--learn keeps what MODEL|RUN answers" in found.output


async def test_the_snippets_of_the_page_send_feedback(tmp_path):
    async with learn(tmp_path) as (client, _):
        answer = await chat(client)
        names = {"base_url": f"{client.app.address}/v1", "key": "any", "answer": SimpleNamespace(id=answer["id"])}
        await asyncio.to_thread(exec, SNIPPETS["python"], names)
        if node := shutil.which("node"):
            answer = await chat(client)
            head = f"const baseUrl = '{client.app.address}/v1', key = 'any', answer = {{ id: '{answer['id']}' }};\n"
            command = (node, "--input-type=module", "-e", head + SNIPPETS["javascript"])
            assert await (await asyncio.create_subprocess_exec(*command)).wait() == 0
    assert all(each.labels == {True} for each in kept(tmp_path))
