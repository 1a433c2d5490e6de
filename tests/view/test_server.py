"""The pages over HTTP, as a browser asks for them."""

import json
import os
import shutil
import socket

import aiohttp
import pytest

from reinforge.errors import ConfigError
from reinforge.rollout.http.access import POLICY
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.run_folder import read_runs
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.request import ModelReply, ModelRequest
from reinforge.view import server as server_module
from reinforge.view.documents import build_run_path
from reinforge.view.server import choose_port
from tests.doubles import examples
from tests.project import call
from tests.view.view_browser import Browser

LINKS = {"href", "src", "action", "data-rows", "data-episode", "data-live"}


@pytest.mark.slow
async def test_every_link_of_every_page_leads_to_a_page(made):
    async with Browser(made) as browser:
        waiting, seen = ["/"], set()
        while waiting:
            path = waiting.pop()
            kind = path.partition("?")[0]
            if path in seen or sum(kind == other.partition("?")[0] for other in seen) >= 2:
                continue
            seen.add(path)
            page = await browser.page(path)
            found = [value for name, value in page.attributes if name in LINKS and value and value[0] == "/"]
            waiting += [link for link in found if link not in ("/compare", "/")]
        kinds = {path.partition("?")[0] for path in seen}
        statics = {f"/static/{name}" for name in server_module.STATIC} | {"/static/page.css"}
        assert {"/", "/version", *statics, "/runs/plain", "/runs/plain/episodes"} <= kinds
        assert {
            "/runs/plain/episode",
            "/runs/plain/episode.json",
            "/runs/plain/rows",
            "/runs/plain/report.html",
        } <= kinds


async def test_the_list_shows_each_run_and_can_be_searched(made):
    async with Browser(made) as browser:
        text = (await browser.page("/")).text
        assert "completed" in text
        assert "improved the agent" in text
        assert ("hostile" in text, "plain" in text) == (True, True)
        text = (await browser.page("/?search=plain")).text
        assert ("hostile" in text, "plain" in text) == (False, True)


SORTED = {
    "run": ["hostile", "plain", "unfinished"],
    "-run": ["unfinished", "plain", "hostile"],
    "-minutes": ["plain", "hostile", "unfinished"],
    "minutes": ["hostile", "plain", "unfinished"],
}


async def test_the_list_is_sorted_by_a_column_and_what_is_unknown_comes_last(made, tmp_path):
    for name, seconds in (("plain", 7260.0), ("hostile", 90.0)):
        shutil.copytree(made / name, tmp_path / name)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        (tmp_path / name / "summary.json").write_text(json.dumps(summary | {"wall_time_s": {"COLLECT": seconds}}))
    RunJournal(tmp_path / "unfinished").close()
    async with Browser(tmp_path) as browser:
        for sort, names in SORTED.items():
            page = await browser.page(f"/?sort={sort}")
            assert [value for name, value in page.attributes if name == "value" and value in names] == names
            assert ("aria-sort", "descending" if sort[0] == "-" else "ascending") in page.attributes
            other = sort.removeprefix("-") if sort[0] == "-" else f"-{sort}"
            assert ("href", f"/?search=&sort={other}") in page.attributes, "the other way round"
            assert ("1.5" in page.text, "121" in page.text) == (True, True)
        assert ("aria-sort", "descending") in (await browser.page("/?sort=nothing")).attributes, "the newest first"


async def test_tags_and_notes_are_shown_searched_and_no_damage(made, tmp_path):
    for name in ("plain", "hostile"):
        shutil.copytree(made / name, tmp_path / name)
    place = ("--output_dir", str(tmp_path))
    assert call("runs", "tag", "plain", *place).output == "plain: no tags\n"
    call("runs", "tag", "plain", "lr-sweep", "<b>", *place)
    async with Browser(tmp_path) as browser:
        version = await browser.ask("/version")
        done = call("runs", "tag", "plain", "--note", "diverged late", *place)
        assert done.output == "plain: lr-sweep, <b>; diverged late\n"
        assert await browser.ask("/version") != version, "a page that is open shows it"
        for word in ("SWEEP", "diverged"):
            text = (await browser.page(f"/?search={word}")).text
            assert ("diverged late" in text, "hostile" in text) == (True, False)
        assert "lr-sweep <b> diverged late" in (await browser.page("/runs/plain")).text
    call("runs", "verify", "plain", *place, code=0)
    assert json.loads(call("runs", "list", "--json", *place).output)["runs"][0]["tags"] == ["lr-sweep", "<b>"]
    assert call("runs", "tag", "plain", "-", "--note", "", *place).output == "plain: no tags\n"
    (tmp_path / "plain" / ".labels.json").write_text('{"tags": 5, "note": [1]}')
    assert json.loads(call("runs", "tag", "plain", "--json", *place).output) == {"tags": [], "note": ""}
    call("runs", "rm", "plain", "--yes", *place, code=0)


async def test_an_empty_folder_says_what_to_do(tmp_path):
    async with Browser(tmp_path) as browser:
        assert "`reinforge demo` trains an agent in minutes" in (await browser.page("/")).text


async def test_rows_come_in_pages(made):
    async with Browser(made) as browser:
        all_rows = json.loads(await browser.ask("/runs/plain/rows?phase=collect&order=-reward&limit=500"))
        some = json.loads(await browser.ask("/runs/plain/rows?phase=collect&order=-reward&offset=10&limit=5"))
        assert some["rows"] == all_rows["rows"][10:15]
        assert some["total"] == all_rows["total"] == len(all_rows["rows"])
        assert len(json.loads(await browser.ask("/runs/plain/rows?limit=99999"))["rows"]) <= server_module.MAX_PAGE


async def test_an_episode_is_a_chat_beside_its_group(made):
    async with Browser(made) as browser:
        [row, *_] = json.loads(await browser.ask("/runs/plain/rows?phase=collect&limit=1"))["rows"]
        page = await browser.page(f"/runs/plain/episode?phase=collect&key={row[0]}")
        assert f"{row[0]}outcome ok" in page.text
        assert "4 episodes of this example in train 0" in page.text
        assert "1 of " in page.text
        assert ("rel", "next") in page.attributes
        raw = json.loads(await browser.ask(f"/runs/plain/episode.json?key={row[0]}"))
        assert raw["calls"][0]["reply"]["content"].startswith("form 0 ")


async def test_the_list_is_searched_and_sorted_by_its_address(made):
    async with Browser(made) as browser:
        page = await browser.page("/runs/plain/episodes?text=form+2&order=-reward&phase=confirm_tuned")
        found = json.loads(await browser.ask("/runs/plain/rows?text=form+2&phase=confirm_tuned"))
        assert found["total"] > 1
        assert {(row[2][:6], row[8]) for row in found["rows"]} == {("form 2", "confirm, tuned")}
        assert f"{found['total']} of " in page.text
        assert ("aria-sort", "descending") in page.attributes
        assert ("data-rows", "/runs/plain/rows?text=form+2&phase=confirm_tuned&order=-reward") in page.attributes
        assert ("href", "/runs/plain/episodes?text=form+2&phase=confirm_tuned&order=reward") in page.attributes
        assert "noscript" in page.tags, "without JavaScript a button applies the filters"
        assert ("value", "baseline") in page.attributes


async def test_siblings_are_a_row_each_and_prompts_that_differ_are_compared(tmp_path):
    journal = RunJournal(tmp_path / "r")
    for generation, color in enumerate(("red", "red", "blue")):
        answer = ModelReply({"role": "assistant", "content": f"It is {color}."}, "stop", None, 5, 3)
        asked = ModelRequest([{"role": "user", "content": f"Is it {color} today?"}])
        call = ModelCall("c", "policy", "m", asked, answer, (), 0.0, 1.0)
        key = EpisodeKey("collect", 0, "a", generation)
        journal.record_episode(EpisodeRecord(key, examples(1)[0], calls=[call], reward=0.5))
    journal.close()
    async with Browser(tmp_path) as browser:
        text = await browser.ask("/runs/r/episode?key=collect/0/0/a/0")
        assert "<td>It is blue.</td>" in text
        assert "2 different prompts in this group" in text
        assert "user: Is it <del>red </del>today?" in text
        assert "user: Is it <ins>blue </ins>today?" in text
        assert "different prompts" in await browser.ask("/runs/r/episode?key=collect/0/0/a/2")


async def test_two_runs_are_compared_the_newer_minus_the_older(made):
    async with Browser(made) as browser:
        page = await browser.page("/compare?run=hostile&run=plain")
        assert "Compared example by example" in page.text
        assert "plain and hostile" in page.text
        assert "0 are selected. Go back" in (await browser.page("/compare", 400)).text
        assert "1 are selected. Go back" in (await browser.page("/compare?run=plain", 400)).text
        seven = "&".join(f"run=r{number}" for number in range(7))
        assert "7 are selected. Go back" in (await browser.page(f"/compare?{seven}", 400)).text
        assert "with itself" in (await browser.page("/compare?run=plain&run=plain", 404)).text


async def test_three_runs_are_compared_and_what_makes_them_incomparable_comes_first(made, tmp_path):
    for name, source in (("first", "plain"), ("second", "plain"), ("third", "hostile")):
        shutil.copytree(made / source, tmp_path / name)
    path = "/compare?run=first&run=second&run=third&run=first"
    async with Browser(tmp_path) as browser:
        page = await browser.page(path)
        assert "3 runs" in page.text
        assert "cannot simply be compared" not in page.text
        charts = [json.loads(value) for name, value in page.attributes if name == "data-chart"]
        assert [[line["name"] for line in chart] for chart in charts] == [["first", "second", "third"]]
        rows = JournalReader(tmp_path / "first").validations()
        assert charts[0][0]["points"][0] == [-1, rows[0].avg_reward, rows[0].ci_low, rows[0].ci_high]
        config = (tmp_path / "third" / "config.yml").read_text()
        (tmp_path / "third" / "config.yml").write_text(config.replace("num_epochs: 2", "num_epochs: 9"))
        journal = RunJournal.open(tmp_path / "third")
        journal.set_facts(data_sha256="0123456789")
        journal.close()
        page = await browser.page(f"{path}&metric=training+reward")
        assert "They differ in data" in page.text
        assert "01234567" in page.text
        assert ("aria-label", "training reward by epoch") in page.attributes
        ids = [value for name, value in page.attributes if name == "id" and value != "main"]
        assert ids == ["obstacles", "settings", "improvements", "curves"]
        assert "finetuning.num_epochs229" in page.text


async def test_text_of_the_model_is_shown_and_never_markup(made):
    async with Browser(made) as browser:
        [row, *_] = json.loads(await browser.ask("/runs/hostile/rows?phase=collect&limit=1"))["rows"]
        page = await browser.page(f"/runs/hostile/episode?key={row[0]}")
        assert "<script>alert(1)</script><img src=x onerror=alert(1)>\\x1b[31m\\u202e 5" in page.text
        assert not page.tags & {"img", "iframe", "object", "embed", "style"}
        assert [value for name, value in page.attributes if name == "src"] == ["/static/view.js"]
        scripts = [value for name, value in (await browser.page("/runs/hostile")).attributes if name == "src"]
        assert scripts == ["/static/view.js", "/static/vendor/uPlot.iife.min.js", "/static/charts.js"]
        assert not [name for name, _ in page.attributes if name.startswith("on") or name == "style"]
        for path in ("/", "/runs/hostile", "/runs/hostile/episodes", f"/runs/hostile/episode?key={row[0]}", "/nothing"):
            async with browser.session.get(browser.base + path) as answer:
                assert answer.headers["Content-Security-Policy"] == POLICY, path
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
        async with browser.session.get(f"{browser.base}/runs/hostile/report.html") as answer:
            assert answer.headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")
        async with browser.session.get(f"{browser.base}/runs/hostile/episode.json?key={row[0]}") as answer:
            assert answer.content_type == "application/json"


async def test_an_example_id_with_the_form_of_a_secret_or_of_an_address_can_be_opened(tmp_path):
    journal = RunJournal(tmp_path / "r")
    ids = ["sk-learn-question-12", "a/../b?c=d&e#f", "<b>%2e\x1b", "é \u202e"]
    for example in ids:
        journal.record_episode(EpisodeRecord(EpisodeKey("collect", 0, example, 0), examples(1)[0], reward=0.5))
    journal.close()
    async with Browser(tmp_path) as browser:
        page = await browser.page("/runs/r/episodes")
        links = [value for name, value in page.attributes if name == "href" and "/episode?" in value]
        assert len(links) == len(ids)
        for link in links:
            assert "reward 0.5" in (await browser.page(link)).text


async def test_nobody_reads_without_the_key(made):
    async with Browser(made) as browser, aiohttp.ClientSession() as stranger:
        for path in ("/", "/runs/plain", "/runs/plain/rows", "/static/view.js", "/?key=wrong", "/?key="):
            async with stranger.get(browser.base + path) as answer:
                assert answer.status == 401, path
                assert "plain" not in await answer.text()
        async with stranger.get(browser.server.address, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            cookie = answer.headers["Set-Cookie"]
            assert ("HttpOnly" in cookie, "SameSite=Strict" in cookie) == (True, True)
        compared = browser.server.address.replace("/?", "/compare?run=a&key=0/1&run=b&")
        async with stranger.get(compared, allow_redirects=False) as answer:
            assert answer.headers["Location"] == "/compare?run=a&key=0/1&run=b", "all but the server's own key"


async def test_a_page_of_another_site_reaches_nothing(made, monkeypatch):
    """DNS rebinding: a name of that site leads to this machine, so its cookies and origin are its own here."""
    async with Browser(made) as browser:
        headers = {"Host": f"evil.example:{browser.server.port}"}
        assert "Host header" in await browser.ask("/runs/plain", 403, headers=headers)
        assert "Host header" in await browser.ask(f"/?key={browser.server._key.value}", 403, headers=headers)
        async with browser.session.get(browser.base, headers={"Origin": "http://evil.example"}) as answer:
            assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        monkeypatch.setattr(server_module, "is_own_host", lambda host: True)  # without that safety it is served
        await browser.ask("/runs/plain", headers=headers)


async def test_it_is_read_only_and_listens_on_the_loopback(made):
    async with Browser(made) as browser:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with browser.session.request(method, f"{browser.base}/runs/plain") as answer:
                assert answer.status == 405, method
        listener = next(iter(browser.server._runner.sites))._server.sockets[0]
        assert listener.getsockname()[0] == "127.0.0.1"


async def test_only_runs_of_the_folder_are_found(made):
    async with Browser(made) as browser:
        for name in ("..%2fplain", "nothing", ".trash-1", "plain%2f..%2fplain", "%2e%2e%2f"):
            assert "There is no such run" in await browser.ask(f"/runs/{name}/version", 404)


ABSENT = ["episode?key=nothing", "episode.json?key=nothing", "/static/../server.py", "/static/nothing"]
WRONG = ["episodes?order=random", "rows?offset=-1", "rows?limit=%F0%9F%98%80"]


async def test_what_is_not_there_is_a_page_that_says_so(made):
    async with Browser(made) as browser:
        for status, paths in ((404, [*ABSENT, "/compare?run=plain&run=.."]), (400, WRONG)):
            for path in paths:
                assert "<h1>" in await browser.ask(path if path[0] == "/" else f"/runs/plain/{path}", status)


async def test_a_damaged_run_is_listed_and_its_page_says_why(made, tmp_path):
    shutil.copytree(made / "plain", tmp_path / "broken")
    (tmp_path / "broken" / "run.sqlite").write_bytes(b"no database" * 500)
    async with Browser(tmp_path) as browser:
        assert "damaged" in (await browser.page("/")).text
        assert "runs verify" in (await browser.page("/runs/broken")).text
        assert "runs verify" in (await browser.page("/runs/broken/episodes", 500)).text


@pytest.mark.parametrize("odd", [{"status": "odd"}, {"policy_versions": [{"version": 1, "num_updates": "x"}]}])
async def test_a_run_from_elsewhere_that_cannot_be_shown_leaves_the_others_in_the_list(made, tmp_path, odd):
    for name in ("plain", "odd"):
        shutil.copytree(made / "plain", tmp_path / name)
    summary = json.loads((tmp_path / "odd" / "summary.json").read_text())
    (tmp_path / "odd" / "summary.json").write_text(json.dumps(summary | {"promoted": None} | odd))
    async with Browser(tmp_path) as browser:
        text = (await browser.page("/")).text
        assert "improved the agent" in text
        assert "damaged" in text
        assert "it cannot be shown: " in text


async def test_every_name_of_a_run_can_be_opened_searched_and_compared(tmp_path):
    """A name may look like a secret, which pages hide, or like a page of its own; a folder's name may not be text."""
    names = ["sk-learn-question-1", "Runs", "Episodes", 'a"b<c>&', "é \u202e"]
    for name in names:
        journal = RunJournal(tmp_path / name)
        journal.record_episode(EpisodeRecord(EpisodeKey("validate", 0, "0", 0), examples(1)[0], reward=0.5))
        journal.close()
    shutil.copytree(tmp_path / "Runs", os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff"))
    async with Browser(tmp_path) as browser:
        page = await browser.page("/")
        assert set(names) <= {value for name, value in page.attributes if name == "value"}
        for name in names:
            trail = [value for key, value in (await browser.page(build_run_path(name))).attributes if key == "href"]
            assert {"/", build_run_path(name, "episodes")} <= set(trail)
            page = await browser.page(build_run_path(name, "episodes") + "?example=sk-learn-question-12")
            assert dict(page.attributes)["action"] == build_run_path(name, "episodes")
            assert ("value", "sk-learn-question-12") in page.attributes
        assert (await browser.page(f"/runs/{'a' * 300}", 404)).tags


async def test_a_report_that_is_a_link_is_not_served(made, tmp_path):
    shutil.copytree(made / "plain", tmp_path / "plain")
    (tmp_path / "plain" / "report.html").unlink()
    (tmp_path / "plain" / "report.html").symlink_to("/etc/passwd")
    async with Browser(tmp_path) as browser:
        await browser.ask("/runs/plain/report.html", 404)


async def test_the_pages_change_nothing_in_a_run_folder(made):
    def contents():
        files = (path for path in made.rglob("*") if path.is_file() and not path.name.startswith("run.sqlite-"))
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = contents()
    async with Browser(made) as browser:
        for path in ("/", "/runs/plain", "/runs/plain/episodes", "/compare?run=plain&run=hostile"):
            await browser.ask(path)
    assert contents() == before
    assert [run.status for run in read_runs(made)] == ["completed", "completed"]


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert choose_port(None, port) == 0
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            choose_port(port, 0)
