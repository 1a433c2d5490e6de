"""The page of a model that learns: what it counts, what the server tells of a comparison, and the way back."""

import aiohttp
import pytest
from aiohttp import web

from reinforge.learning.feedback import Feedback
from reinforge.learning.store import STORE, LearningStore, make_alias
from reinforge.serving.version_folder import Cause, VersionFolder
from reinforge.view.learning_page import LearningSource
from tests.learning.learning import rate
from tests.learning.test_live_comparison import chat as chat_with
from tests.learning.test_live_comparison import learn, support, trained  # noqa: F401  fixtures
from tests.view.view_browser import Browser, begin_run

DAY_S = 86400
KEY = "k"


@pytest.fixture
def folder(tmp_path):
    """Versions 1 and 2 of `desk`, promoted in this order; 2 comes from the run `r`, which is running."""
    journal = begin_run(tmp_path / "runs")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    versions = VersionFolder(tmp_path / "versions" / "desk")
    versions.add(model, {})
    versions.add(model, {"run": str(tmp_path / "runs" / "r"), "data": "chats of May"})
    versions.promote(2, Cause("better: +0.2 [+0.1, +0.3]", "comparison", {"difference": 0.2}))
    yield versions
    journal.close()


@pytest.fixture
def store(tmp_path):
    """Chats of two days: of version 1 by ann (3, in two conversations) and ben (1), of version 2 by ben (2).

    ann rates her replies with 1, 1 | 0, so 0.5; ben version 1 with 1, and version 2 with 0 and a comment.
    """
    store = LearningStore(tmp_path / STORE)
    chats = [
        ("a", 1, "ann", "s1", 0),
        ("b", 1, "ann", "s1", 0),
        ("c", 1, "ann", "s2", 0),
        ("d", 1, "ben", "s3", 1),
        ("e", 2, "ben", "s3", 1),
        ("f", 2, "ben", "s3", 1),
    ]
    for id_, version, user, session, day in chats:
        row = {"key": KEY, "id": id_, "user": make_alias(KEY, "user", user), "version": version, "split": None}
        row |= {"conversation": make_alias(KEY, "session", session), "model": f"desk@{version}"}
        store.add_chat(row | {"started_s": (20000.5 + day) * DAY_S}, {"secret": "a text"}, None)
    other = {"key": KEY, "id": "z", "user": None, "version": 9, "split": None, "conversation": "o", "model": "other@9"}
    store.add_chat(other | {"started_s": 0.0}, {}, None)
    for body in (
        {"session_id": "s1", "thumb": "up"},
        {"id": "c", "score": 0.0},
        {"id": "d", "thumb": "down"},
        {"id": "d", "thumb": "up"},
        {"id": "e", "thumb": "down"},
        {"id": "f", "comment": "hm"},
        {"id": "z", "thumb": "up"},
    ):
        given = Feedback(**body)
        store.add_feedback(KEY, given, given.opinion, 1e9)
    store.record_training("r", [(KEY, "a"), (KEY, "b")])
    yield store
    store.close()


def open_browser(tmp_path, server="http://127.0.0.1:9"):
    source = LearningSource(tmp_path / "versions", tmp_path, server)
    return Browser(tmp_path / "runs", learning=source)


async def test_chats_and_scores_are_counted_while_a_server_writes(folder, store, tmp_path):
    before = (tmp_path / STORE).read_bytes()
    async with open_browser(tmp_path) as browser:
        page = await browser.page("/learning")
    text = page.text
    assert "6 chats are kept; 83.3% of them are rated." in text
    assert "1970" not in text, "the chats of another model"
    assert "2024-10-05333.3%" not in text
    assert "2024-10-04" in text
    assert "2024-10-05366.7%" in text, "3 chats, 2 rated: a comment is no rating"
    assert "2024-10-043100.0%" in text
    assert "0.750 [" in text, "version 1: ann 0.5, ben 1, who changed his mind"
    assert "2promoted0.000 [0.000, 0.793]112rchats of May" in text, "1 user, 1 of 2 chats is rated"
    assert "3 rated chats that no version was trained on" in text
    assert "last decisionpromote 2, by comparison, " in text
    assert "better: +0.2 [+0.1, +0.3]" in text
    assert '"difference": 0.2' in text
    assert "a text" not in text
    assert ("href", "/runs/r") in page.attributes
    assert "newest trainingr, running" in text
    assert (tmp_path / STORE).read_bytes() == before


async def test_new_feedback_and_another_version_are_seen(folder, store, tmp_path):
    async with open_browser(tmp_path) as browser:
        source = browser.server._learning
        version = await browser.ask("/learning/desk/version")
        given = Feedback(id="f", thumb="up")
        store.add_feedback(KEY, given, given.opinion, 1e9)
        assert await browser.ask("/learning/desk/version") == version, "it looks every five seconds"
        source._due_s = 0.0
        assert await browser.ask("/learning/desk/version") != version
        assert "6 chats are kept; 100.0%" in (await browser.page("/learning/desk")).text
        version = await browser.ask("/learning/desk/version")
        folder.try_candidate(1, 0.25)
        assert await browser.ask("/learning/desk/version") != version
        text = (await browser.page("/learning/desk")).text
        assert "candidateversion 1, for 25% of the conversations" in text
        assert "http://127.0.0.1:9 does not tell how it stands" in text


async def test_a_page_without_versions_or_chats_says_what_to_do(tmp_path, folder):
    async with open_browser(tmp_path) as browser:
        assert "No chats are kept in" in (await browser.page("/learning/desk")).text
        assert "no folder of versions named" in await browser.ask("/learning/none", 404)
        assert ("href", "/learning") in (await browser.page("/")).attributes
    async with Browser(tmp_path, learning=LearningSource(tmp_path / "nowhere", tmp_path)) as browser:
        text = (await browser.page("/learning")).text
        assert "Make one, and let its server keep the chats" in text
        assert "reinforge versions NAME --add RUN" in text


async def test_the_server_tells_how_the_comparison_stands(support, tmp_path):  # noqa: F811
    async with learn(support, tmp_path, min_users=10) as client:
        for number in range(4):
            id_, _ = await chat_with(client, f"user {number}")
            assert (await rate(client, id=id_, thumb="up")).status_code == 200
        source = LearningSource(support.folder.parent, tmp_path, str(client.base_url))
        async with Browser(tmp_path, learning=source) as browser:
            text = (await browser.page("/learning/support")).text
        shares = [sum(client.live.draw(f"user {number}") == each for number in range(4)) for each in (2, 1)]
    assert "Not decided: fewer than 10 users of each version have a score" in text
    for number, count in zip((2, 1), shares, strict=True):
        assert f"{number}{count}{count}" in text


COMPARISON = {
    "outcome": "continue",
    "reason": "not decided: +0.100 [-0.100, +0.300]",
    "difference": 0.1,
    "ci_low": -0.1,
    "ci_high": 0.3,
    "candidate": {"users": 120, "conversations": 130, "mean": 0.6, "ci_low": 0.5, "ci_high": 0.7},
    "served": {"users": 110, "conversations": 140, "mean": 0.5, "ci_low": 0.4, "ci_high": 0.6},
    "paused": "the scores of version 2 fell",
    "guards": {"latency": {"limit": 1.5, "value": 1.25, "ci_low": 1.0, "ci_high": 1.6, "state": "ok"}},
}


@pytest.mark.parametrize("is_complete", [True, False])
async def test_a_pause_and_guards_are_shown_where_the_server_has_them(folder, tmp_path, is_complete):
    folder.try_candidate(1, 0.2)
    told = COMPARISON if is_complete else {**COMPARISON, "paused": None, "guards": {}}

    async def answer(request):
        assert request.headers["authorization"] == "Bearer secret"
        return web.json_response({"object": "learn", "versions": [{"name": "desk", "comparison": told}]})

    app = web.Application()
    app.add_routes([web.get("/v1/learn", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    source = LearningSource(tmp_path / "versions", tmp_path, address, "secret")
    async with Browser(tmp_path / "runs", learning=source) as browser:
        text = (await browser.page("/learning/desk")).text
    await runner.cleanup()
    assert "11201300.600 [0.500, 0.700]21101400.500 [0.400, 0.600]" in text
    assert "+0.100 [-0.100, +0.300]" in text
    assert ("Promotion is paused: the scores of version 2 fell" in text) is is_complete
    assert ("Guard latency: ok, 1.250 [1.000, 1.600]; limit 1.5" in text) is is_complete


class TestRollback:
    """A right request, and that each condition alone keeps out a wrong one."""

    @staticmethod
    async def post(browser, promoted=2, *, name="desk", query="&reason=wrong+refunds", session=None, **headers):
        headers = {"origin": browser.base, "x_reinforge": "rollback", **headers}
        headers = {key.replace("_", "-"): value for key, value in headers.items() if value is not None}
        address = f"{browser.base}/learning/{name}/rollback?promoted={promoted}{query}"
        async with (session or browser.session).post(address, headers=headers) as answer:
            return answer.status, await answer.text()

    async def test_the_button_promotes_the_version_before(self, folder, tmp_path):
        folder.try_candidate(1)
        async with open_browser(tmp_path) as browser:
            page = await browser.page("/learning/desk")
            assert ("data-post", "/learning/desk/rollback") in page.attributes
            assert "Roll back to version 1" in page.text
            assert await self.post(browser) == (200, '{"promoted": 1}')
            state, event = folder.read(), folder.read_log()[-1]
            assert (state.promoted, state.candidate) == (1, None)
            assert (event.action, event.reason, event.by[:5]) == ("rollback", "wrong refunds", "user ")
            status, text = await self.post(browser)
            assert (status, "version 1 is promoted now: reload the page" in text) == (409, True), "a second click"
            status, text = await self.post(browser, 1)
            assert (status, "is the first that was promoted" in text) == (409, True)
            assert "There is no earlier version" in (await browser.page("/learning/desk")).text
        assert folder.read().event == event

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "http://127.0.0.1:1"}, 403),
            ({"origin": "null"}, 403),
            ({"origin": None}, 403),
            ({"x_reinforge": None}, 403),
            ({"host": "evil.example", "origin": "http://evil.example"}, 403),
            ({"session": True}, 401),
            ({"name": "none"}, 409),
            ({"promoted": 1}, 409),
            ({"promoted": "x"}, 400),
        ],
    )
    async def test_every_other_request_is_refused(self, folder, tmp_path, headers, status):
        before = folder.read()
        async with open_browser(tmp_path) as browser, aiohttp.ClientSession() as stranger:
            given = headers | ({"session": stranger} if "session" in headers else {})
            assert (await self.post(browser, **given))[0] == status
            assert folder.read() == before
            async with browser.session.get(f"{browser.base}/learning/desk/rollback?promoted=2") as answer:
                assert answer.status == 405
            assert folder.read() == before
            assert (await self.post(browser))[0] == 200, "with all conditions met"
