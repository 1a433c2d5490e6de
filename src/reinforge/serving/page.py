"""The chat page at `/`: one HTML file, one script and one style sheet, which load nothing from other hosts."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

from reinforge.rollout.http.access import HEADERS
from reinforge.serving.api_error import ApiError

STATIC = {"chat.js": "text/javascript", "chat.css": "text/css"}


class ChatPage:
    """The feature with which people chat in the browser."""

    def routes(self) -> list[web.RouteDef]:
        """Returns the page and its files."""
        return [web.get("/", self.show), web.get("/static/{file}", self.show_file)]

    async def start(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""

    async def show(self, request: web.Request) -> web.Response:
        """Shows the page."""
        return _write("chat.html", "text/html")

    async def show_file(self, request: web.Request) -> web.Response:
        """Shows the script or the style sheet.

        Raises:
            ApiError: There is no such file.
        """
        name = request.match_info["file"]
        if name not in STATIC:
            raise ApiError(404, f"there is no file {name[:100]!r} here", code="not_found")
        return _write(name, STATIC[name])


def _write(name: str, kind: str) -> web.Response:
    text = files("reinforge.serving").joinpath("static", name).read_text(encoding="utf-8")
    return web.Response(text=text, headers={**HEADERS, "Content-Type": f"{kind}; charset=utf-8"})
