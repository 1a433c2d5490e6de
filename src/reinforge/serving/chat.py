"""Chats with the served models, in the dialects of OpenAI and Anthropic.

POST /v1/chat/completions   /v1/completions   /v1/responses   /v1/messages
GET  /v1/models             /v1/models/{name}
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from reinforge.rollout.handle.arguments import read_arguments
from reinforge.rollout.http.exchange import ROUTES, find_dialect
from reinforge.serving.api_error import ApiError
from reinforge.serving.caller import ModelCaller
from reinforge.serving.limits import ServerLimits
from reinforge.serving.models import ServedModels
from reinforge.serving.routes import abortable, read_json, write_json
from reinforge.serving.streaming import ReplyStream

_PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}
_REFUSED = {
    "/v1/embeddings": "the models here write text and have no embeddings; use a server with an embedding model",
    "/v1/messages/count_tokens": "tokens are not counted ahead; the usage of a reply has the count of its prompt",
}


class ChatApi:
    """The feature that answers chats.

    Args:
        models: The models.
        limits: The server's limits.
    """

    def __init__(self, models: ServedModels, limits: ServerLimits):
        self._models, self._limits = models, limits
        self.num_in_flight = 0

    def routes(self) -> list[web.RouteDef]:
        """Returns the routes of all dialects."""
        return [
            *(web.post(f"/v1/{path}", self.answer) for path in ROUTES),
            *(web.post(path, self.refuse) for path in _REFUSED),
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{name:.+}", self.show_model),
        ]

    async def start(self) -> None:
        """Does nothing: the models are loaded."""

    async def close(self) -> None:
        """Does nothing: the models belong to the server's owner."""

    @abortable
    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers one call; sampling stops if the client hangs up."""
        dialect = find_dialect(request.path)
        assert dialect is not None  # the routes are those of the dialects
        body = await read_json(request)
        with self._admit():
            call = dialect.read_request(body)
            model = self._models.find(call.model)
            caller = ModelCaller(self._models, model, self._limits, _PREFIXES.get(request.path, ""))
            messages, others = call.arguments.get("messages"), {**call.arguments, "messages": None}
            prepared = caller.prepare(messages, read_arguments(others))
            if call.stream:
                return await ReplyStream(request, dialect, call, self._limits).send(caller, prepared, model)
            return write_json(dialect.write_answer(await caller.complete(prepared), call))

    @contextmanager
    def _admit(self) -> Iterator[None]:
        """Counts a call while it is in flight.

        Raises:
            ApiError: There are too many.
        """
        limits = self._limits
        if self.num_in_flight >= limits.max_in_flight:
            message = f"the server answers {self.num_in_flight} calls already, which is its limit; try again later"
            headers = {"retry-after": str(limits.retry_after_s)}
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        """Refuses what no model here can do, by name."""
        raise ApiError(404, f"{request.path}: {_REFUSED[request.path]}", code="not_supported")

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        """Lists the models."""
        return write_json({"object": "list", "data": [model.describe() for model in self._models]})

    async def show_model(self, request: web.Request) -> web.StreamResponse:
        """Describes one model."""
        return write_json(self._models.find(request.match_info["name"]).describe())
