"""From rated chats of a server to a candidate in its folder, over HTTP and in processes of their own."""

import json
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from reinforge.learning.store import STORE, read_chats
from reinforge.serving.version_folder import VersionFolder
from reinforge.tasks.help_desk.grammar import SYSTEM, Manners, count_kept_rules, write_chat
from reinforge.tasks.help_desk.starter import CarelessDeskRecipe, generate_careless_chats, make_tokenizer
from reinforge.tasks.starters import ensure_built
from tests.serving.serving import start_command

NUM_CHATS, MAX_S = 300, 1200


def ask(client, model, question, user):
    body = {"model": model, "user": user, "max_tokens": 40}
    body["messages"] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    answer = client.post("/chat/completions", json=body).raise_for_status().json()
    return answer["id"], answer["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_a_server_trains_on_its_rated_chats_and_tries_the_better_model(tmp_path):
    def run(*arguments):
        command = (sys.executable, "-m", "reinforge", *map(str, arguments))
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    model = ensure_built("help_desk", CarelessDeskRecipe(), make_tokenizer, generate_careless_chats)
    run("init", "project", "--template", "logs")
    run("versions", "support", "--add", model)
    folder = VersionFolder(tmp_path / ".reinforge" / "versions" / "support")
    (tmp_path / "learn.yml").write_text(
        f"train:\n  config: project/run.yml\n  when: {{rated: {NUM_CHATS}}}\n  share: 0.5\n"
    )
    process = start_command(
        "serve", folder.folder, "--learn", "learn.yml", "--port", 0, stderr=subprocess.STDOUT, cwd=tmp_path
    )
    try:
        line = ""
        while "OPENAI_BASE_URL" not in line:
            line = process.stdout.readline()
            assert line, "the server has exited"
        [address] = re.findall(r"OPENAI_BASE_URL=(\S+)", line)
        rng = random.Random(5)
        questions = [write_chat(rng, Manners()).question for _ in range(NUM_CHATS)]
        with httpx.Client(base_url=address, timeout=300) as client, ThreadPoolExecutor(8) as threads:

            def chat_and_rate(number):
                id_, reply = ask(client, "support", questions[number], f"user {number}")
                is_good = count_kept_rules(questions[number], reply) == 3
                client.post("/feedback", json={"id": id_, "thumb": is_good}).raise_for_status()

            list(threads.map(chat_and_rate, range(NUM_CHATS)))
            end = time.monotonic() + MAX_S
            while folder.read().candidate is None:
                assert time.monotonic() < end
                if (log := tmp_path / ".reinforge" / "serve" / "training.log").exists():
                    assert "error:" not in log.read_text(), log.read_text()
                ask(client, "support", questions[0], "user 0")  # is served meanwhile
                time.sleep(1)
            state, event = folder.read(), folder.read_log()[-1]
            assert (state.promoted, state.candidate, state.share) == (1, 2, 0.5)
            assert event.evidence["improvement"]["ci_low"] > 0
            while client.get("/models/support@candidate").status_code == 404:  # it is being loaded
                assert time.monotonic() < end
                time.sleep(0.1)
            scores = []
            for question in questions[:40]:
                _, reply = ask(client, "support@candidate", question, "judge")
                scores.append(count_kept_rules(question, reply) == 3)
            assert sum(scores) >= 30, "the untrained model keeps all rules in every second reply"
            said = []
            while "the training of support has ended" not in line:  # after its process, which adds the version first
                line = process.stdout.readline()
                assert line, "the server has exited"
                said.append(line)
    finally:
        process.terminate()
        process.communicate()
    assert "is trained on its chats: process" in "".join(said)
    assert "Version 2 of support is the candidate, for 50% of the conversations." in line
    [run_folder] = (tmp_path / ".reinforge" / "runs").iterdir()
    assert json.loads((run_folder / "summary.json").read_text())["promoted"] is True
    assert folder.read_version(2).run == str(run_folder)
    store = tmp_path / ".reinforge" / "serve" / STORE
    assert sum(each.is_trained for each in read_chats(store)) == NUM_CHATS
