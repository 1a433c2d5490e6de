"""Feedback on the chats of two versions promotes or stops the candidate, also after the server was killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.learning.api import LearningApi
from reinforge.routing.live_comparison import LiveScore, LiveTest
from reinforge.serving.app import ServeApp
from reinforge.serving.live_versions import LiveVersions
from reinforge.serving.models import ServedModels
from reinforge.serving.recording import RecordConfig
from reinforge.serving.version_folder import VersionFolder
from tests.learning.learning import rate
from tests.serving.serving import ScriptedLoader, http, says, wait_for
from tests.serving.test_loading import save_adapter

CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}  # a random model seldom ends its reply


def build_versions(folder, models):
    """Returns versions 1, which is promoted, and 2, which gets half of the conversations."""
    versions = VersionFolder(folder / "support")
    for model in models:
        versions.add(model, {})
    versions.try_candidate(2, 0.5)
    return versions


@pytest.fixture
def support(tmp_path):
    """Of what looks like a model to what only copies it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return build_versions(tmp_path, [tmp_path / "model"] * 2)


@pytest.fixture
def trained(tiny_model_dir, tmp_path):
    """Of adapters, for servers in processes of their own."""
    for seed in (1, 2):
        save_adapter(tiny_model_dir, tmp_path / str(seed), seed=seed)
    return build_versions(tmp_path, [tmp_path / "1", tmp_path / "2"])


@contextlib.asynccontextmanager
async def learn(support, data, **rule):
    """Yields a client of a server of the versions, once the candidate answers."""
    models = ServedModels()
    live = LiveVersions(support, models, ScriptedLoader(models), LiveTest(**rule))
    await live.open()
    learning = LearningApi(data, RecordConfig(), None, [live])
    async with ServeApp(models, [live, learning], keeper=learning.keeper) as app, http(app) as client:
        await wait_for(lambda: live.state.candidate is not None)
        client.live = live
        yield client
    await models.close()


async def chat(client, user=None, session=None, headers=None, model="support"):
    """Returns the id of an answer and the number of the version that gave it."""
    names = {"user": user, "metadata": {"session_id": session}}
    body = {"model": model, "messages": says("hi"), **{name: each for name, each in names.items() if each}, **CHOICE}
    answer = (await client.post("/v1/chat/completions", json=body, headers=headers)).json()
    return answer["id"], answer["model_version"]


async def show(client):
    [found] = (await client.get("/v1/learn")).json()["versions"]
    return found


def means(found):
    """Returns users, conversations and mean of the served version and of the candidate."""
    by_version = (found["comparison"][name] for name in ("served", "candidate"))
    return {
        number: (each["users"], each["conversations"], each["mean"]) for number, each in enumerate(by_version, start=1)
    }


async def test_the_score_of_a_conversation_is_the_mean_of_its_replies_and_follows_its_feedback(support, tmp_path):
    async with learn(support, tmp_path) as client:
        (first, version), (second, again) = [await chat(client, "ann", "s1") for _ in range(2)]
        assert version == again, "a conversation stays with its version"
        empty = means(await show(client))[3 - version]
        assert empty == (0, 0, None)

        async def score(**body):
            assert (await rate(client, **body)).status_code == 200
            return means(await show(client))[version]

        assert await score(id=first, thumb="up") == (1, 1, 1.0)
        assert await score(id=second, score=0.5) == (1, 1, 0.75)
        assert await score(id=second, score=0.25, source="agent") == (1, 1, 0.6875), "sources are averaged"
        assert await score(id=first, thumb="down") == (1, 1, 0.1875), "in place of the thumb up"
        assert await score(id=first, score=5) == (1, 1, 0.375), "5 is not from 0 to 1"
        assert await score(session_id="s1", score=1, source="boss") == (1, 1, pytest.approx((1 + 7 / 12) / 2))
        for source, id_ in (("user", second), ("agent", second), ("boss", None)):
            found = await score(**({"id": id_} if id_ else {"session_id": "s1"}), score=None, source=source)
        assert found == (0, 0, None), "everything is taken back"
        assert means(await show(client))[3 - version] == empty


async def test_only_chats_whose_version_was_drawn_for_a_known_user_count(support, tmp_path):
    async with learn(support, tmp_path) as client:
        for number in range(6):
            drawn = client.live.draw(f"s{number}")
            by_number = [await chat(client, "ann", f"s{number}", model=f"support@{each}") for each in (1, 2)]
            assert [version for _, version in by_number] == [1, 2]
            without_user = await chat(client, session=f"s{number}")
            by_header = await chat(client, "ann", "other", headers={"x-session-id": f"s{number}"})
            assert without_user[1] == by_header[1] == drawn, "a session in the header is the same one"
            for id_, _ in (*by_number, without_user):
                await rate(client, id=id_, thumb="up")
        assert [count for count, *_ in means(await show(client)).values()] == [0, 0]
        await rate(client, id=by_header[0], thumb="up")
        assert means(await show(client))[drawn] == (1, 1, 1.0)


async def test_a_deleted_user_does_not_count_and_a_restart_counts_the_others(support, tmp_path):
    async with learn(support, tmp_path) as client:
        for number in range(12):
            id_, version = await chat(client, f"user {number}")
            await rate(client, id=id_, score=number / 16, headers={"authorization": "Bearer other"})  # 404
            assert (await rate(client, id=id_, score=number / 16)).status_code == 200
        before = means(await show(client))
        assert before[1][0] + before[2][0] == 12
        await client.delete("/v1/learn/users/user 11")
        after = means(await show(client))
        assert after[version][0] == before[version][0] - 1
        assert after[3 - version] == before[3 - version]
    async with learn(support, tmp_path) as client:
        assert means(await show(client)) == after
        support.try_candidate(2, 0.5)
        seed = client.live.state.seed
        await wait_for(lambda: client.live.state.seed != seed)
        assert means(await show(client)) == {1: (0, 0, None), 2: (0, 0, None)}, "another comparison"


async def test_what_cannot_be_decided_now_loses_no_feedback(support, tmp_path, caplog):
    async with learn(support, tmp_path, min_users=10) as client:
        model = support.path(2) / "config.json"
        whole = model.read_bytes()
        model.write_bytes(whole + b"?")
        for number in range(200):
            id_, version = await chat(client, f"user {number}")
            assert (await rate(client, id=id_, score=float(version == 2))).status_code == 200
            if "is damaged" in caplog.text:
                break
        assert support.read().candidate == 2
        assert (await show(client))["comparison"]["outcome"] == "promote"
        model.write_bytes(whole)
        assert (await rate(client, id=id_, comment="as before")).status_code == 200
        await wait_for(lambda: client.live.state.promoted == 2)
        found = await show(client)
        assert (found["comparison"], found["promoted"]) == (None, 2)
        assert found["decision"]["reason"].startswith("the candidate scores higher")


class Server:
    """`reinforge serve FOLDER --learn learn.yml` in a process of its own, which `prelude` may change before it runs."""

    def __init__(self, folder, min_users, crash_at="", prelude=""):
        config, data = folder.folder.parent / "learn.yml", folder.folder.parent / "data"
        config.write_text(f"compare:\n  min_users: {min_users}\n")
        command = [sys.executable, "-c", f"{prelude}\nfrom reinforge.cli import main\nmain()"]
        options = ("--learn", config, "--data_dir", data, "--port", 0, "--device", "cpu")
        self.process = subprocess.Popen(
            [*command, "serve", *map(str, (folder.folder, *options))],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "REINFORGE_CRASH_AT": crash_at},
        )
        said = "".join(self.process.stdout.readline() for _ in range(3))
        self.client = httpx.Client(base_url=re.search(r"OPENAI_BASE_URL=(\S+)", said)[1], timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.client.close()
        self.process.kill()
        self.process.communicate()

    def show(self):
        [found] = self.client.get("/learn").json()["versions"]
        return found

    def talk(self, folder, scores, count=600):
        """Lets users chat and rate, by version, until a decision; returns how many did."""
        wait_until(lambda: self.client.get("/models/support@candidate").status_code == 200)
        for number in range(count):
            body = {"messages": says(f"hi {number}"), "user": f"user {number}", **CHOICE}
            answer = self.client.post("/chat/completions", json=body).json()
            score = scores[answer["model_version"]][number % 4]
            assert self.client.post("/feedback", json={"id": answer["id"], "score": score}).status_code == 200
            if folder.read().candidate is None:
                return number + 1
        raise AssertionError(self.show())


def wait_until(condition, seconds=20):
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


GOOD, BAD = (1, 0.5, 1, 0.75), (0, 0.5, 0.25, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scores", "promoted", "action"),
    [({1: BAD, 2: GOOD}, 2, "promote"), ({1: GOOD, 2: BAD}, 1, "stop")],
    ids=["better", "worse"],
)
def test_users_decide_on_a_candidate_while_it_is_served(trained, scores, promoted, action):
    with Server(trained, 50) as server:
        assert server.talk(trained, scores) >= 100
        event = trained.read_log()[-1]
        assert (event.action, event.version, event.by) == (action, 2, "comparison")
        assert min(event.evidence["num_users"]) >= 50
        wait_until(lambda: server.show()["promoted"] == promoted and server.show()["candidate"] is None)
        assert server.show()["decision"]["reason"] == event.reason
        body = {"messages": says("hi"), "user": "a new one", **CHOICE}
        assert server.client.post("/chat/completions", json=body).json()["model"] == f"support@{promoted}"


NO_REPLAY = """
from reinforge.learning.api import LearningApi
async def forget(self): pass
LearningApi._rate_all = forget
"""


def kill_at_decision(trained, site):
    with Server(trained, 20, crash_at=site) as server, pytest.raises(httpx.TransportError):
        server.talk(trained, {1: BAD, 2: GOOD})
    assert server.process.returncode == -signal.SIGKILL


@pytest.mark.fault
@pytest.mark.parametrize("site", ["publish.before", "publish.mid"])
def test_a_kill_between_rating_and_decision_loses_nothing_and_decides_once(trained, site):
    kill_at_decision(trained, site)
    with Server(trained, 20) as server:  # and nobody rates
        wait_until(lambda: server.show()["promoted"] == 2)
    assert [each.action for each in trained.read_log()].count("promote") == 1


@pytest.mark.fault
def test_a_server_that_forgets_scores_does_not_decide_after_a_kill(trained):
    """Mutation: the scores in the store are not counted when the server starts."""
    kill_at_decision(trained, "publish.before")
    with Server(trained, 20, prelude=NO_REPLAY) as server:
        wait_until(lambda: server.client.get("/models/support@candidate").status_code == 200)
        time.sleep(3)
        assert (server.show()["promoted"], server.show()["candidate"]) == (1, 2)


def test_a_comparison_needs_versions_to_compare(tiny_model_dir, tmp_path):
    (tmp_path / "learn.yml").write_text("compare: {}\n")
    options = ("--learn", tmp_path / "learn.yml", "--data_dir", tmp_path, "--port", 0)
    found = CliRunner().invoke(main, ["serve", str(tiny_model_dir), *map(str, options)])
    assert found.exit_code == 2
    assert "no folder of versions is served" in found.output


async def test_a_candidate_whose_replies_are_cut_is_stopped_though_nobody_rates(support, tmp_path):
    async with learn(support, tmp_path, min_users=10) as client:
        guards = None
        for number in range(80):
            cut = {"max_tokens": 1} if client.live.draw(f"user {number}") == 2 else CHOICE
            body = {"model": "support", "messages": says("hi"), "user": f"user {number}", **cut}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            found = (await show(client))["comparison"]
            if found is None or support.read().candidate is None:
                break
            guards = found["guards"]
    event = support.read_log()[-1]
    assert (event.action, event.version, event.by) == ("stop", 2, "comparison")
    assert event.reason.startswith("stopped by the guard errors: 1 of the calls failed or were cut against 0 of")
    assert (event.evidence["guards"]["errors"]["state"], event.evidence["num_users"]) == ("beyond", [0, 0])
    assert (guards["errors"]["candidate"], guards["errors"]["served"]) == (1, 0)


async def test_guards_survive_a_restart_and_forget_a_deleted_user(support, tmp_path):
    async with learn(support, tmp_path) as client:
        for number in range(24):  # one version gets all of them in one run of eight million
            await chat(client, f"user {number}")
        await chat(client)  # its user is unknown
        before = (await show(client))["comparison"]["guards"]
        assert sum(before["latency"]["num_users"]) == 24
        assert max(before["length"][name] for name in ("served", "candidate")) > 0
    async with learn(support, tmp_path) as client:
        assert (await show(client))["comparison"]["guards"] == before
        await client.delete("/v1/learn/users/user 7")
        assert sum((await show(client))["comparison"]["guards"]["latency"]["num_users"]) == 23


async def test_a_shift_pauses_promotion_and_a_person_promotes_nevertheless(support, tmp_path, caplog):
    async with learn(support, tmp_path, min_users=130) as client:
        scores = [
            LiveScore(client.live.split, f"{version} {number}", f"user {number}", version, score)
            for number, both in enumerate([(1.0, 1.0)] * 100 + [(0.0, 1.0)] * 40)
            for version, score in zip((1, 2), both, strict=True)
        ]
        for each in scores:
            await client.live.rate([each])
        found = (await show(client))["comparison"]
        assert found["paused"].startswith("the scores of the served version shifted down")
        assert found["paused"] in found["reason"]
        assert [record.message.count("promotion is paused") for record in caplog.records].count(1) == 1
        support.promote(2)
        await wait_for(lambda: client.live.state.promoted == 2)
