"""What the pages show while runs change: they grow, end, are killed, resumed, removed and made again."""

import asyncio
import json
import os
import re
import shutil

from reinforge.errors import StorageError
from reinforge.runs.replay import RunReplay
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.view import library as library_module
from reinforge.view.library import RunLibrary
from tests.doubles import examples
from tests.view.view_browser import Browser, begin_run


def record(journal, number):
    key = EpisodeKey("collect", 0, "0", number)
    journal.record_episode(EpisodeRecord(key, examples(1)[0], reward=0.5))
    journal.flush()


async def test_a_live_run_tells_of_every_change(tmp_path):
    journal = begin_run(tmp_path)
    record(journal, 0)
    async with Browser(tmp_path) as browser:
        page = await browser.page("/runs/r")
        assert re.search(r"Now: epoch 0 \(1/3\) collect: 1 episodes( \(.*?/(s|min)\))?, reward 0.500", page.text), (
            page.text
        )
        version = dict(page.attributes)["data-version"]
        assert json.loads(await browser.ask("/runs/r/version")) == {"version": version}
        stream = await browser.session.get(f"{browser.base}/runs/r/version/events?version={version}")
        assert stream.content_type == "text/event-stream"
        record(journal, 1)
        seen = await read_change(stream)
        assert seen != version
        assert re.search(r"2 episodes( \(.*?/(s|min)\))?, reward 0.500", (await browser.page("/runs/r")).text)
        journal.set_facts(status="completed")
        journal.end_session("completed")
        journal.close()
        await read_change(stream)
        assert "Now:" not in (await browser.page("/runs/r")).text
        stream.close()


async def read_change(stream):
    """Returns the version of the next event."""
    while not (line := (await stream.content.readline()).decode()).startswith("data: "):
        assert line, "the stream ended"
    return line.removeprefix("data: ").strip()


async def test_a_change_while_the_page_was_built_makes_another_version(tmp_path, monkeypatch):
    """The version is the one from before reading: else the page would be taken for the newest one for ever."""
    journal = begin_run(tmp_path)
    record(journal, 0)
    writing = []

    def read_slowly(folder, real=library_module.read_overview_of_any):
        overview = real(folder)
        if writing:
            record(journal, writing.pop())
        return overview

    monkeypatch.setattr(library_module, "read_overview_of_any", read_slowly)
    async with Browser(tmp_path) as browser:
        for page, version in (("/", "/version"), ("/runs/r", "/runs/r/version")):
            record(journal, 1)  # so that the page reads it again
            writing.append(2)
            shown = dict((await browser.page(page)).attributes)["data-version"]
            assert json.loads(await browser.ask(version))["version"] != shown, page
        for page, version in (("/", "/version"), ("/runs/r", "/runs/r/version")):
            shown = dict((await browser.page(page)).attributes)["data-version"]
            assert json.loads(await browser.ask(version))["version"] == shown, page
    journal.close()


async def test_a_run_that_is_resumed_is_followed_from_its_beginning(tmp_path):
    """Numbers of episodes that were removed are given again, so what was passed on must not be skipped."""
    journal = begin_run(tmp_path)
    for number in range(4):
        record(journal, number)
    async with Browser(tmp_path) as browser:
        assert "collect: 4 episodes" in (await browser.page("/runs/r")).text
        journal.rewind(-1, forget_jobs=True, forget_episodes=True)
        journal.start_session()
        record(journal, 0)
        assert "collect: 1 episodes" in (await browser.page("/runs/r")).text
    journal.close()


async def test_a_run_whose_journal_vanishes_leaves_the_others_in_the_list(made, tmp_path, monkeypatch):
    shutil.copytree(made / "plain", tmp_path / "plain")
    journal = begin_run(tmp_path)

    def fail(self):
        raise StorageError("cannot read it")

    monkeypatch.setattr(RunReplay, "update", fail)
    async with Browser(tmp_path) as browser:
        assert "improved the agent" in (await browser.page("/")).text
    journal.close()


async def test_the_list_reads_again_only_what_has_changed(made, tmp_path, monkeypatch):
    """A hundred runs, one of them running: each change would cost seconds for the configurations of the others."""
    for name in ("plain", "hostile"):
        shutil.copytree(made / name, tmp_path / name)
    read = []
    for function in ("read_config", "read_overview_of_any"):
        real = getattr(library_module, function)
        monkeypatch.setattr(
            library_module, function, lambda folder, real=real: read.append(folder.name) or real(folder)
        )
    library = RunLibrary(tmp_path)
    for expected in ({"plain", "hostile"}, set(), {"plain"}):
        for run in library.list_overviews():
            assert library.read_config(run.folder)["finetuning"]["num_epochs"] == 2
        assert set(read) == expected
        read.clear()
        if not expected:
            os.utime(tmp_path / "plain" / "config.yml", (1, 1))
    shutil.rmtree(tmp_path / "plain")
    assert [run.folder.name for run in library.list_overviews()] == ["hostile"]


async def test_a_run_that_was_removed_is_gone(made, tmp_path):
    for name in ("plain", "hostile"):
        shutil.copytree(made / name, tmp_path / name)
    async with Browser(tmp_path) as browser:
        before = await browser.ask("/runs/plain/version")
        stream = await browser.session.get(f"{browser.base}/runs/plain/version/events?{json.loads(before)}")
        shutil.rmtree(tmp_path / "plain")
        await read_change(stream)
        stream.close()
        for path in ("/runs/plain", "/runs/plain/episodes", "/runs/plain/report.html", "/runs/plain/version"):
            assert "There is no such run" in await browser.ask(path, 404)
        assert "plain" not in (await browser.page("/")).text


async def test_a_stream_ends_with_its_page(made):
    async with Browser(made) as browser:
        before = len(asyncio.all_tasks())
        streams = [await browser.session.get(f"{browser.base}/version/events") for _ in range(3)]
        assert len(asyncio.all_tasks()) > before
        for stream in streams:
            stream.close()
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0.01)
        async with browser.session.head(f"{browser.base}/version/events") as answer:
            assert answer.status == 405, "it would never end"


async def test_a_killed_process_is_noticed(tmp_path):
    """Nothing is written when a process is killed: only the lock tells."""
    journal = begin_run(tmp_path)
    async with Browser(tmp_path) as browser:
        assert "running" in (await browser.page("/")).text
        before = await browser.ask("/runs/r/version")
        journal._lock.release()
        assert await browser.ask("/runs/r/version") != before
        assert "interrupted" in (await browser.page("/")).text
    journal._writer.close()
