"""The server of the pages: on the loopback, in one thread beside the event loop. It changes one thing: a rollback."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from xml.etree.ElementTree import Element

from aiohttp import web

from reinforge.errors import ConfigError, Problem, ReinforgeError, StorageError
from reinforge.files import read_regular_file
from reinforge.registry import REGISTRY
from reinforge.rollout.http.access import HEADERS, KEY, LOOPBACK, REPORT_POLICY, AccessKey, is_own_host
from reinforge.runs.comparison import compare_runs
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.page.chats import ChatStyle, ModelScores, TrainedTokens
from reinforge.runs.page.elements import to_html
from reinforge.runs.page.page import PAGE
from reinforge.runs.run_folder import RunOverview
from reinforge.safe_text import to_printable
from reinforge.serving.version_folder import Cause
from reinforge.view.checkpoint_page import build_checkpoint_page
from reinforge.view.comparison_page import MAX_RUNS, build_comparison
from reinforge.view.data_page import build_data_page
from reinforge.view.documents import Live, build_document, build_problem, build_run_path, build_trail
from reinforge.view.episode_pages import build_episode_list, build_episode_page
from reinforge.view.episode_table import EpisodeQuery
from reinforge.view.learning_page import LearningSource, build_learning_page
from reinforge.view.library import RunLibrary
from reinforge.view.reward_page import build_reward_page
from reinforge.view.run_list import RunQuery, build_run_list
from reinforge.view.run_page import build_run_page
from reinforge.view.serving_page import build_serving_page
from reinforge.view.stability_page import build_stability_page
from reinforge.view.token_scores import TokenScorer, find_first_model

POLL_S = 2.0  # seconds between two looks at the files of an open page's run
HEARTBEAT_POLLS = 8  # looks without a change after which a comment keeps the connection open
MAX_PAGE = 500  # maximum rows of one answer
STATIC = {
    "view.js": "text/javascript",
    "charts.js": "text/javascript",
    "view.css": "text/css",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
}
FIGURES = {
    "rewards": build_reward_page,
    "stability": build_stability_page,
    "data": build_data_page,
    "checkpoints": build_checkpoint_page,
    "serving": build_serving_page,
}
"""Pages of a run that are built from its overview and its list of episodes."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")
logger = logging.getLogger(__name__)


def choose_port(wanted: int | None, default: int) -> int:
    """Returns the wanted port, which must be free; without one `default`, or any other if that is taken."""
    port = default if wanted is None else wanted
    try:
        with socket.create_server((LOOPBACK, port)) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        if wanted is None:
            return 0
        found = f"cannot listen on {LOOPBACK}:{wanted}: {error.strerror}"
        raise ConfigError(Problem("--port", found, "leave it out to use any free port")) from None


class ViewServer:
    """Serves the runs of a folder; an async context manager.

    Args:
        port: 0: the operating system chooses.
        poll_s: Seconds between two looks at the files of an open page's run.
        learning: Folders of versions and their store; None: those in the current folder.
    """

    def __init__(self, output_dir: Path, port: int = 0, poll_s: float = POLL_S, learning: LearningSource | None = None):
        self._learning = learning or LearningSource()
        self.port, self._poll_s = port, poll_s
        self._library = RunLibrary(output_dir)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="view")
        self._models, self._scorer = ThreadPoolExecutor(1, thread_name_prefix="view-models"), TokenScorer()
        self._closing = asyncio.Event()
        self._indexing: dict[Path, asyncio.Task[None]] = {}
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> ViewServer:
        listener = socket.create_server((LOOPBACK, self.port))
        self.port = listener.getsockname()[1]
        self._key = AccessKey(self.port)
        app = web.Application(middlewares=[self._guard])
        app.add_routes(self._list_routes())
        app.on_shutdown.append(self._end_streams)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        self._warming = asyncio.ensure_future(self._read(self._prepare))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in (self._warming, *self._indexing.values()):
            task.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        self._executor.shutdown(cancel_futures=True)
        self._models.submit(self._scorer.close)
        self._models.shutdown()

    def _prepare(self) -> None:
        self._library.list_overviews()
        with contextlib.suppress(ReinforgeError):  # a component that cannot be imported costs the settings of a page
            REGISTRY.components()

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/?{KEY}={self._key.value}"

    def _list_routes(self) -> list[web.RouteDef]:
        run = "/runs/{name}"
        return [
            web.get("/", self._show_runs),
            web.get("/version", self._show_version),
            web.get("/version/events", self._send_versions, allow_head=False),
            web.get("/compare", self._show_comparison),
            web.get("/learning", self._show_learning),
            web.get("/learning/{folder}", self._show_learning),
            web.get("/learning/{folder}/version", self._show_version),
            web.get("/learning/{folder}/version/events", self._send_versions, allow_head=False),
            web.post("/learning/{folder}/rollback", self._roll_back),
            web.get("/static/{file:.+}", self._show_static),
            web.get(run, self._show_run),
            web.get(f"{run}/version", self._show_version),
            web.get(f"{run}/version/events", self._send_versions, allow_head=False),
            web.get(f"{run}/episodes", self._show_episodes),
            web.get(f"{run}/rows", self._show_rows),
            web.get(f"{run}/episode", self._show_episode),
            web.get(f"{run}/episode.json", self._show_episode_json),
            web.get(f"{run}/{PAGE}", self._show_report),
            web.get(f"{run}/{{page:{'|'.join(FIGURES)}}}", self._show_figures),
        ]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets this user's browser in, and answers every problem with a page."""
        if not is_own_host(request.headers.get("host", "")):
            return _refuse(403, "Unknown host", "The Host header must name 127.0.0.1 or localhost.")
        if (traded := self._key.trade(request)) is not None:
            return traded
        if not self._key.find_in(request.cookies):
            return _refuse(401, "The key is missing", "Open the address that `reinforge view` printed, with its key.")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _refuse(error.status, error.reason, f"{request.method} {to_printable(request.path)}")
        except ReinforgeError as error:
            return _refuse(404 if not isinstance(error, StorageError) else 500, "This cannot be shown", str(error))
        except ConnectionError:
            raise
        except Exception as error:
            logger.exception("a page could not be built")
            return _refuse(500, "This is a bug in reinforge", f"{type(error).__name__}: {error}")

    async def _read(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, functools.partial(work, *arguments))

    def _find_folder(self, request: web.Request) -> Path:
        return self._find_named(request.match_info["name"])

    def _find_named(self, name: str) -> Path:
        folder = self._library.find_folder(name)
        if folder is None:
            raise web.HTTPNotFound(reason="There is no such run")
        return folder

    async def _show_runs(self, request: web.Request) -> web.Response:
        query = RunQuery.parse(request.query)

        def build() -> Element:
            runs = self._library.list_overviews()
            live = Live("/version", self._library.get_version_of_all(runs))
            described = [(run, self._library.read_config(run.folder)) for run in runs]
            return build_run_list(self._library.output_dir, described, query, live)

        return _write_page(await self._read(build))

    async def _show_run(self, request: web.Request) -> web.Response:
        folder = self._find_folder(request)

        def build() -> Element:
            overview = self._library.read_overview(folder)
            live = self._describe_live(overview)
            if overview.record is None:
                return build_problem(f"{folder.name} is damaged", overview.reason)
            return build_run_page(overview, self._library.read_table(folder), self._library.read_activity(folder), live)

        return _write_page(await self._read(build))

    async def _show_episodes(self, request: web.Request) -> web.Response:
        folder, query, offset = self._find_folder(request), _read_query(request), _read_number(request, "offset")

        def build() -> Element:
            live = self._describe_live(self._library.read_overview(folder))
            return build_episode_list(folder.name, self._library.read_table(folder), query, offset, live)

        page = await self._read(build)
        if folder not in self._indexing:
            self._indexing[folder] = asyncio.ensure_future(self._read_excerpts(folder))
        return _write_page(page)

    async def _read_excerpts(self, folder: Path) -> None:
        """Reads what filters and orders need of all episodes, in parts between which other requests are answered."""
        with contextlib.suppress(ReinforgeError):  # the next page tells of it
            while await self._read(self._library.read_excerpts, folder):
                pass
        del self._indexing[folder]

    async def _show_figures(self, request: web.Request) -> web.Response:
        folder, page = self._find_folder(request), request.match_info["page"]

        def build() -> Element:
            overview = self._library.read_overview(folder)
            live = self._describe_live(overview)
            content = FIGURES[page](overview, self._library.read_table(folder))
            title = f"{page.capitalize()} of {folder.name}"
            return build_document(title, content, trail=build_trail(folder.name, page), live=live)

        return _write_page(await self._read(build))

    async def _show_rows(self, request: web.Request) -> web.Response:
        folder, query, offset = self._find_folder(request), _read_query(request), _read_number(request, "offset")
        limit = min(MAX_PAGE, _read_number(request, "limit", 100))

        def build() -> dict[str, Any]:
            table = self._library.read_table(folder)
            found = table.select(query)
            rows = table.build_rows(found[offset : offset + limit])
            return {"total": len(found), "offset": offset, "rows": rows}

        return _write_json(await self._read(build))

    async def _show_episode(self, request: web.Request) -> web.Response:
        folder, query, key = self._find_folder(request), _read_query(request), request.query.get("key", "")
        row = await self._read(JournalReader(folder).find_episode, key)
        models, scores = None if find_first_model(folder) is None else "", dict[str, ModelScores]()
        if row is not None and request.query.get("models"):
            loop = asyncio.get_running_loop()
            models, scores = await loop.run_in_executor(self._models, self._scorer.score, folder, row.data)

        def build() -> Element:
            table = self._library.read_table(folder)
            listed = table.find(key)
            if listed is None or row is None:
                raise web.HTTPNotFound(reason="There is no such episode")
            texts, trained = self._library.read_texts(folder), TrainedTokens.read(self._library.read_config(folder))
            style = ChatStyle(texts, trained, table.find_baseline(listed), scores)
            return build_episode_page(folder.name, listed, row, table, style, query, models)

        return _write_page(await self._read(build))

    async def _show_episode_json(self, request: web.Request) -> web.Response:
        folder, key = self._find_folder(request), request.query.get("key", "")
        row = await self._read(JournalReader(folder).find_episode, key)
        if row is None:
            raise web.HTTPNotFound(reason="There is no such episode")
        return _write_json({"key": row.key, **row.data}, indent=2)

    async def _show_comparison(self, request: web.Request) -> web.Response:
        names = request.query.getall("run", [])
        if len(names) > 2:
            names = list(dict.fromkeys(names))
        if not 2 <= len(names) <= MAX_RUNS:
            text = f"A comparison takes two to six runs, and {len(names)} are selected. Go back and choose some."
            return _refuse(400, "Select two to six runs", text)
        folders, metric = [self._find_named(name) for name in names], request.query.get("metric", "")

        def build() -> Element:
            runs = [self._library.read_overview(folder) for folder in folders]
            runs.sort(key=lambda run: run.started_s or 0.0)
            found = compare_runs(runs[0].folder, runs[1].folder) if len(runs) == 2 else None
            return build_comparison(runs, found, metric)

        return _write_page(await self._read(build))

    async def _show_learning(self, request: web.Request) -> web.Response:
        def find_run(name: str) -> RunOverview | None:
            folder = self._library.find_folder(name)
            return None if folder is None else self._library.read_overview(folder)

        name = request.match_info.get("folder", "")
        return _write_page(await self._read(build_learning_page, self._learning, name, find_run))

    async def _roll_back(self, request: web.Request) -> web.Response:
        """Rolls back, on request of a page of this server: a page of another origin cannot send the header."""
        origin, host = request.headers.get("origin", "").lower(), request.headers["host"].lower()
        if origin.partition("://")[2] != host or request.headers.get("x-reinforge") != "rollback":
            return _write_json({"error": "only the page of this server can roll back"}, status=403)
        seen, reason = _read_number(request, "promoted"), request.query.get("reason", "")
        try:
            folder = self._learning.find(request.match_info["folder"])
            promoted = folder.read().promoted
            if promoted != seen:
                raise ConfigError(f"version {promoted} is promoted now: reload the page")
            state = await asyncio.to_thread(folder.rollback, None, Cause(reason))
        except ReinforgeError as error:
            return _write_json({"error": str(error)}, status=409)
        return _write_json({"promoted": state.promoted})

    async def _show_report(self, request: web.Request) -> web.Response:
        path = self._find_folder(request) / PAGE
        try:
            body = await self._read(read_regular_file, path)
        except OSError:
            raise web.HTTPNotFound(reason=f"The run has no {PAGE}") from None
        headers = {**HEADERS, "Content-Security-Policy": REPORT_POLICY, "Content-Type": "text/html; charset=utf-8"}
        return web.Response(body=body, headers=headers)

    async def _show_static(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        if name == "page.css":
            text, kind = files("reinforge.runs.page").joinpath(name).read_text(encoding="utf-8"), "text/css"
        elif name in STATIC:
            text = files("reinforge.view").joinpath("static", name).read_text(encoding="utf-8")
            kind = STATIC[name]
        else:
            raise web.HTTPNotFound
        return web.Response(text=text, headers={**HEADERS, "Content-Type": f"{kind}; charset=utf-8"})

    def _describe_live(self, run: RunOverview) -> Live:
        return Live(build_run_path(run.folder.name, "version"), self._library.get_version(run))

    def _choose_version(self, request: web.Request) -> Callable[[], str]:
        if "folder" in request.match_info:
            return functools.partial(self._learning.read_version, request.match_info["folder"])
        if "name" not in request.match_info:
            return self._library.read_version_of_all
        return functools.partial(self._library.read_version, self._find_folder(request))

    async def _show_version(self, request: web.Request) -> web.Response:
        return _write_json({"version": await self._read(self._choose_version(request))})

    async def _send_versions(self, request: web.Request) -> web.StreamResponse:
        read, known, quiet = self._choose_version(request), request.query.get("version"), 0
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the page was closed
            while not self._closing.is_set():
                version = await self._read(read)
                quiet = quiet + 1 if version == known else 0
                if version != known:
                    await response.write(f"event: change\ndata: {version}\n\n".encode())
                    known = version
                elif quiet % HEARTBEAT_POLLS == 1:
                    await response.write(b": nothing new\n\n")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), self._poll_s)
        return response

    async def _end_streams(self, app: web.Application) -> None:
        self._closing.set()


def _read_query(request: web.Request) -> EpisodeQuery:
    try:
        return EpisodeQuery.parse(request.query)
    except ValueError as error:
        raise web.HTTPBadRequest(reason=to_printable(str(error)).replace("\n", " ")) from None


def _read_number(request: web.Request, name: str, default: int = 0) -> int:
    text = request.query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise web.HTTPBadRequest(reason=f"{name}: expected a whole number from 0")
    return int(text)


def _write_page(page: Element, status: int = 200) -> web.Response:
    body = to_html(page).encode("utf-8", "replace")  # the name of a folder may not be text
    return web.Response(body=body, status=status, headers={**HEADERS, "Content-Type": "text/html; charset=utf-8"})


def _write_json(value: Any, indent: int | None = None, status: int = 200) -> web.Response:
    text = json.dumps(value, indent=indent)
    return web.Response(text=text, status=status, headers={**HEADERS, "Content-Type": "application/json"})


def _refuse(status: int, title: str, text: str) -> web.Response:
    return _write_page(build_problem(title, text), status)
