"""A folder of versions: its changes and its log, and servers that follow it, in processes of their own."""

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import httpx
import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.errors import ConfigError
from reinforge.files import append_line
from reinforge.routing.live_comparison import LiveScore, LiveTest
from reinforge.serving.live_versions import LiveVersions
from reinforge.serving.loading import LoadSettings, ModelLoader
from reinforge.serving.models import ServedModels
from reinforge.serving.routes import ApiError
from reinforge.serving.version_folder import Cause, VersionFolder, is_version_folder
from tests.generated import DOCS
from tests.serving.serving import says, start_command, wait_for
from tests.serving.test_loading import save_adapter


@pytest.fixture
def model(tmp_path):
    """A folder that looks like a model to what only copies it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def folder(tmp_path, model):
    """Versions 1, 2 and 3, promoted in this order."""
    versions = VersionFolder(tmp_path / "support")
    for _ in range(3):
        number = versions.add(model, {"run": "runs/a", "data": "chats of May", "card": "cards/a.md"})
        versions.promote(number)
    return versions


def list_actions(folder):
    return [(each.action, each.version, each.previous) for each in folder.read_log()]


def test_versions_are_whole_copies_with_their_origin(folder, model):
    assert folder.numbers() == [1, 2, 3]
    found = folder.read_version(2)
    assert (found.run, found.data, found.card, found.model) == ("runs/a", "chats of May", "cards/a.md", str(model))
    shutil.rmtree(model)
    assert (folder.path(2) / "config.json").read_text() == "{}"
    assert is_version_folder(folder.folder)


def test_each_change_is_in_the_log_with_who_why_and_evidence(folder):
    folder.try_candidate(1, 0.2, Cause("trained on 200 chats", "learn.yml"))
    folder.promote(1, Cause("better", "comparison", {"difference": 0.1}))
    newest = folder.read_log()[-1]
    assert (newest.by, newest.reason, newest.evidence) == ("comparison", "better", {"difference": 0.1})
    added = [("add", 1, None), ("promote", 1, 1), ("add", 2, 1), ("promote", 2, 1), ("add", 3, 2), ("promote", 3, 2)]
    assert list_actions(folder) == [*added, ("try", 1, 3), ("promote", 1, 3)]
    assert [each.number for each in folder.read_log()] == list(range(1, 9))


def test_rolling_back_goes_further_back_each_time(folder):
    assert folder.rollback().promoted == 2
    assert folder.rollback().promoted == 1
    with pytest.raises(
        ConfigError, match=r"version 1 of support is the first that was promoted; pass --to N\n.*one of: 1, 2, 3"
    ):
        folder.rollback()
    assert folder.rollback(3).promoted == 3
    assert folder.find_earlier() == 2


def test_a_change_of_the_promoted_version_ends_the_comparison(folder):
    before = folder.try_candidate(2, 0.3)
    assert (before.candidate, before.share, before.promoted) == (2, 0.3, 3)
    after = folder.rollback(1)
    assert (after.candidate, after.promoted) == (None, 1)
    assert folder.promote(2, Cause(seen=before)) == after, "a decision about what no longer holds changes nothing"
    assert folder.stop_candidate(Cause(seen=before)) == after


def test_the_split_of_each_candidate_is_a_new_one(folder):
    assert folder.try_candidate(1).seed != folder.try_candidate(1).seed
    with pytest.raises(ConfigError, match="cannot be its own candidate"):
        folder.try_candidate(3)


@pytest.mark.parametrize("change", ["promote", "rollback", "try_candidate"])
def test_unknown_and_damaged_versions_are_refused(folder, change):
    with pytest.raises(ConfigError, match=r"version 9 of support does not exist\n.*choose one of: 1, 2, 3"):
        getattr(folder, change)(9)
    (folder.path(1) / "config.json").write_text('{"longer": 1}')
    with pytest.raises(ConfigError, match="version 1 of support is damaged: config.json has another size"):
        getattr(folder, change)(1)
    assert folder.read().promoted == 3


def test_a_damaged_state_is_repaired_by_promoting(folder):
    folder.state_file.write_text("{")
    with pytest.raises(ConfigError, match="delete it, and promote a version"):
        folder.read()
    folder.state_file.unlink()
    assert is_version_folder(folder.folder)
    assert folder.promote(2).event.number == 7


def test_an_event_that_a_killed_process_left_out_is_in_the_log(folder):
    """The process died after the state was replaced and before the log was written, or in the middle of its line."""
    log = folder.folder / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    for rest in ("", lines[-1][:20]):
        log.write_text("".join(lines[:-1]) + rest)
        assert list_actions(folder)[-1] == ("promote", 3, 2)
    folder.rollback()
    assert [each.number for each in folder.read_log()] == list(range(1, 8))
    append_line(log, {})  # the log is read as a whole
    with pytest.raises(TypeError):
        folder.read_log()


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_the_commands(tmp_path, model):
    place = ["--versions_dir", tmp_path / "versions"]
    assert run("versions", "support", *place).exit_code == 2
    for _ in range(3):
        done = run("versions", "support", *place, "--add", model, "--data", "chats", "--reason", "first")
        assert done.exit_code == 0, done.output
    run("versions", "support", *place, "--promote", 2, "--reason", "better on refunds")
    run("versions", "support", *place, "--candidate", 3, "--share", "0.25")
    found = run("versions", "support", *place).output
    assert re.search(r"^2 +promoted +\d{4}-.* chats$", found, re.MULTILINE)
    assert re.search(r"^3 +candidate \(25%\)", found, re.MULTILINE)
    assert re.search(r"add 1 by user \S+: first$", found, re.MULTILINE)
    assert re.search(r"promote 2 by user \S+: better on refunds$", found, re.MULTILINE)
    done = run("rollback", "support", *place, "--to", 1, "--json")
    assert (json.loads(done.output)["before"], json.loads(done.output)["promoted"]) == (2, 1)
    assert "seed" not in done.output
    shown = json.loads(run("versions", tmp_path / "versions" / "support", "--json").output)
    assert (shown["promoted"], shown["candidate"], len(shown["versions"]), len(shown["log"])) == (1, None, 3, 6)
    assert "exclude each other" in run("versions", "support", *place, "--promote", 1, "--candidate", 2).output
    assert "is not a folder of this machine" in run("versions", "support", *place, "--add", "bundled:tickets").output


@pytest.fixture(scope="module")
def trained(tiny_model_dir, tmp_path_factory):
    """The base model, and three adapters of it."""
    root = tmp_path_factory.mktemp("trained")
    for seed in (1, 2, 3):
        save_adapter(tiny_model_dir, root / str(seed), seed=seed)
    return root


@pytest.fixture
def support(trained, tmp_path):
    """Adapters as versions 1, 2 and 3; 2 is promoted, after 1."""
    folder = VersionFolder(tmp_path / "support")
    for seed in (1, 2, 3):
        folder.add(trained / str(seed), {})
    folder.promote(2)
    return folder


@pytest.fixture
async def serving(support):
    models = ServedModels()
    loader = ModelLoader(models, LoadSettings(device="cpu"))
    live = LiveVersions(support, models, loader, LiveTest(min_users=10, max_conversations=200))
    await live.open()
    await live.start()
    yield live, models
    await live.close()
    await models.close()
    assert loader._engines == {}, "every version is freed"


def draw(live, count=400):
    return [live.draw(f"s{number}") for number in range(count)]


async def test_conversations_are_split_between_the_promoted_version_and_the_candidate(serving, support):
    live, models = serving
    assert models.find("support").name == models.find("").name == "support@2"
    assert models.names[0] == "support"
    with pytest.raises(ApiError, match="no candidate now"):
        models.find("support@candidate")
    support.try_candidate(3, 0.25)
    await wait_for(lambda: live.state.candidate == 3)
    first = draw(live)
    assert 0.18 < first.count(3) / 400 < 0.32
    assert draw(live) == first, "a conversation stays with its version"
    assert models.find("support", "s0").name == f"support@{first[0]}"
    assert models.find("support@candidate").name == "support@3"
    assert live.draw("") == 2, "a conversation without a name is never the candidate's"
    support.try_candidate(3, 0.25)
    await wait_for(lambda: live.state.seed == support.read().seed)
    assert draw(live) != first, "the next comparison has another split"
    support.stop_candidate()
    await wait_for(lambda: live.state.candidate is None)
    assert set(draw(live)) == {2}


async def test_versions_that_nothing_needs_are_in_memory_only_for_their_calls(serving, support):
    live, models = serving
    await wait_for(lambda: set(live._loaded) == {1, 2})  # 1 is what a rollback would promote
    found = models.find("support@3")
    reply = await found.llm.sample(ask())
    assert reply.version == 3
    assert found.name == "support@3"
    await wait_for(lambda: set(live._loaded) == {1, 2})
    for name in ("support@4", "support@x", "support@03", "support@"):
        with pytest.raises(ApiError, match="support@1, support@2, support@3") as refused:
            models.find(name)
        assert refused.value.status == 404


def ask():
    from tests.serving.test_loading import ASK

    return ASK


async def test_a_call_in_flight_ends_with_its_version_which_is_then_freed(serving, support):
    live, models = serving
    await wait_for(lambda: set(live._loaded) == {1, 2})
    held = models.find("support")
    with held.use():
        support.rollback()
        await wait_for(lambda: models.find("support").name == "support@1")
        await asyncio.sleep(0.3)
        assert (await held.llm.sample(ask())).version == 2
    await wait_for(lambda: set(live._loaded) == {1})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["candidate", "promoted"])
async def test_what_cannot_be_loaded_is_not_served(serving, support, how, caplog):
    """Its bytes were changed without changing their number, so that only loading finds it."""
    live, models = serving
    weights = support.path(3) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    if how == "candidate":
        support.try_candidate(3, 1.0)
    else:
        support.promote(3)
    await wait_for(lambda: "SHA-256 differs" in caplog.text)
    assert set(draw(live)) == {2}
    support.promote(1)
    await wait_for(lambda: models.find("support").name == "support@1")


async def rate(live, number, version, score):
    split = live.find_split(f"s{number}", version)
    assert split is not None
    return await live.rate([LiveScore(split, f"s{number}", f"user {number}", version, score)])


async def test_scores_promote_a_candidate_and_the_log_has_the_evidence(serving, support):
    live, _ = serving
    assert live.find_split("s1", 2) is None
    assert await live.rate([LiveScore(0, "s1", "ann", 2, 1.0)]) is None, "there is nothing to compare with"
    support.try_candidate(3, 0.5)
    await wait_for(lambda: live.state.candidate == 3)
    assert (await live.rate([LiveScore(1, "s1", "ann", 2, 1.0)])).num_conversations == (0, 0), "it is of another split"
    for number in range(200):
        conversation = f"s{number}"
        version = live.draw(conversation)
        assert live.find_split(conversation, 5 - version) is None, "it was not drawn"
        found = await rate(live, number, version, float(version == 3))
        if found.outcome != "continue":
            break
    assert found.outcome == "promote"
    assert support.read().promoted == 3
    event = support.read_log()[-1]
    assert (event.action, event.by, event.evidence["served"]) == ("promote", "comparison", 2)
    assert event.evidence["ci_low"] > 0
    assert event.evidence["num_users"] == list(found.num_users)
    await wait_for(lambda: live.state.promoted == 3)


async def test_scores_stop_a_harmful_candidate(serving, support):
    live, _ = serving
    support.try_candidate(3, 0.5)
    await wait_for(lambda: live.state.candidate == 3)
    for number in range(200):
        version = live.draw(f"s{number}")
        found = await rate(live, number, version, float(version == 2))
        if found.outcome != "continue":
            break
    assert found.outcome == "harm"
    assert (support.read().promoted, support.read().candidate) == (2, None)
    assert support.read_log()[-1].action == "stop"


class Server:
    """`reinforge serve FOLDER` in a process of its own."""

    def __init__(self, folder, **settings):
        self.process = start_command("serve", folder, "--port", 0, "--device", "cpu", **settings)
        lines = [self.process.stdout.readline() for _ in range(3)]
        assert "OPENAI_BASE_URL" in lines[2], self.process.stderr.read()
        self.names = lines[1]
        self.url = re.search(r"OPENAI_BASE_URL=(\S+)/v1", lines[2])[1]

    def chat(self, model="support", session=None, **fields):
        body = {"model": model, "messages": says("the quick brown"), "max_tokens": 4, **fields}
        body |= {"metadata": {"session_id": session}} if session else {}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    def stop(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def server(support):
    started = Server(support.folder)
    yield started
    started.stop()


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "reinforge", *map(str, arguments)], capture_output=True, text=True, check=True
    )


def wait_until(condition, seconds=20):
    end_s = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_a_server_follows_a_rollback_within_a_second_and_loses_no_request(server, support):
    assert server.names.startswith("Serving support, support@")
    reply = server.chat().json()
    assert (reply["model"], reply["model_version"]) == ("support@2", 2)
    listed = [each["id"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]]
    assert listed[0] == "support"
    missing = server.chat("support@7")
    assert missing.status_code == 404
    assert "support@1, support@2, support@3" in missing.json()["error"]["message"]
    assert server.chat("support@3").json()["model"] == "support@3"
    body = {"model": "support", "messages": says("the quick"), "max_tokens": 400, "stream": True, "temperature": 0}
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        first = next(lines)
        command("rollback", support.folder)
        wait_until(lambda: server.chat().json()["model"] == "support@1")
        models = {json.loads(line[6:])["model"] for line in [first, *lines] if line.startswith("data: {")}
    assert models == {"support@2"}, "a stream ends with the version that it began with"
    times_s = []
    for _ in range(4):
        support.promote(2)
        wait_until(lambda: server.chat().json()["model"] == "support@2")
        begun_s = time.monotonic()
        support.rollback()  # in this process: the start of a command takes longer than all the rest
        wait_until(lambda: server.chat().json()["model"] == "support@1")
        times_s.append(time.monotonic() - begun_s)
    assert min(times_s) < 1, times_s  # the others may share the machine with other tests


@pytest.mark.slow
def test_a_candidate_gets_its_share_over_http(server, support):
    command("versions", support.folder, "--candidate", 3, "--share", 0.5)
    wait_until(lambda: server.chat("support@candidate").status_code == 200)
    by_session = {each: server.chat(session=each).json()["model"] for each in map(str, range(30))}
    assert set(by_session.values()) == {"support@2", "support@3"}
    assert all(server.chat(session=each).json()["model"] == model for each, model in by_session.items())
    by_user = {server.chat(user=str(each)).json()["model"] for each in range(30)}
    assert by_user == set(by_session.values())
    anthropic = {"model": "support", "max_tokens": 4, "messages": says("a"), "metadata": {"user_id": "0"}}
    answered = httpx.post(f"{server.url}/v1/messages", json=anthropic, timeout=60).json()
    assert answered["model"] == server.chat(user="0").json()["model"]


@pytest.mark.fault
@pytest.mark.parametrize(("site", "version"), [("publish.before", 2), ("publish.mid", 1)])
def test_a_server_and_a_rollback_that_were_killed_come_back_with_one_of_the_two_versions(support, site, version):
    server = Server(support.folder)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "reinforge", "rollback", str(support.folder)],
            env={**os.environ, "REINFORGE_CRASH_AT": site},
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        wait_until(lambda: server.chat().json()["model"] == f"support@{version}")
    finally:
        server.stop()
    again = Server(support.folder)
    try:
        assert again.chat().json()["model"] == f"support@{version}"
        assert support.read_log()[-1].action == ("rollback" if version == 1 else "promote")
    finally:
        again.stop()


def test_the_program_of_the_page_prints_what_stands_below_it():
    page = (DOCS / "versions.md").read_text(encoding="utf-8")
    ((program, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {})
    assert out.getvalue() == printed
