"""Whether the server is up: `/healthz`, the one route that needs no key."""

from __future__ import annotations

from aiohttp import web

from reinforge.serving.routes import write_json


class HealthApi:
    """The feature that tells a supervisor that the server answers."""

    def routes(self) -> list[web.RouteDef]:
        """Returns `/healthz`."""
        return [web.get("/healthz", self.show)]

    async def start(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""

    async def show(self, request: web.Request) -> web.Response:
        """Says that the server answers; without a key it names no model."""
        return write_json({"status": "ok"})
