"""Asks a server of `reinforge view` for pages, as a browser does."""

import aiohttp

from reinforge.runs.journal.journal import RunJournal
from reinforge.view.server import ViewServer
from tests.core.runs.test_page import Page


def begin_run(folder, num_epochs=3, **facts):
    """Returns the journal of a run that has begun, named `r`."""
    journal = RunJournal(folder / "r")
    (folder / "r" / "config.yml").write_text(f"finetuning:\n  num_epochs: {num_epochs}\n")
    journal.start_session()
    journal.set_facts(status="running", reason="", **facts)
    journal.flush()
    return journal


class Browser:
    """Asks one server; keeps its cookie."""

    def __init__(self, folder, **options):
        self.server = ViewServer(folder, poll_s=0.01, **options)
        self.session = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))

    async def __aenter__(self):
        await self.server.__aenter__()
        self.base = f"http://127.0.0.1:{self.server.port}"
        assert (await self.session.get(self.server.address)).status == 200
        return self

    async def __aexit__(self, *exc_info):
        await self.session.close()
        await self.server.__aexit__(*exc_info)

    async def ask(self, path, status=200, **options):
        async with self.session.get(self.base + path, **options) as answer:
            assert answer.status == status, await answer.text()
            return await answer.text()

    async def page(self, path, status=200):
        return Page(await self.ask(path, status))
