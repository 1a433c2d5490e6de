"""A stand-in for a user's own training server: it serves one chat model over real HTTP, and trains it.

    with RemoteService() as service:
        service.url, service.chat_url     of the training API and of the chat completions
        service.submitted                 the rows of each job
        service.chats                     bodies of the chat completion requests
        service.returns_ids = True        replies come with token ids too

The model answers with one of WORDS; a job moves its preferences by the advantage of each row (REINFORCE).
"""

from __future__ import annotations

import math
import random
from typing import Any

from aiohttp import web

from tests.protocols.stand_in import Route, StandIn

WORDS = ("xyz", "bcd", "aei", "rstl", "oua", "bad")
LEARNING_RATE = 0.04


class RemoteService(StandIn):
    """The server of one model.

    Attributes:
        submitted: The rows of each job, by id.
        chats: Bodies of the chat completion requests.
        is_greedy: Always answers with the likeliest word.
        returns_ids: Replies come with the ids of prompt and reply, as a vLLM server returns them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.submitted: dict[str, list[dict[str, Any]]] = {}
        self.chats: list[dict[str, Any]] = []
        self.is_greedy = self.returns_ids = False
        self._preferences = dict.fromkeys(WORDS, 0.0)
        self._rng = random.Random(3)

    @property
    def url(self) -> str:
        return self.address

    @property
    def chat_url(self) -> str:
        """The chat completions' URL, up to /v1."""
        return f"{self.url}/v1"

    def routes(self) -> tuple[Route, ...]:
        return (
            ("GET", "/health", "health", self._answer_health),
            ("POST", "/v1/chat/completions", "chat", self._answer_chat),
            ("POST", "/jobs", "create", self._create_job),
            ("GET", "/jobs/{id}", "retrieve", self._answer_job),
        )

    async def _answer_health(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    def _logprobs(self) -> dict[str, float]:
        total = math.log(sum(map(math.exp, self._preferences.values())))
        return {word: value - total for word, value in self._preferences.items()}

    async def _answer_chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.chats.append(body)
        logprobs = self._logprobs()
        word = self._rng.choices(WORDS, weights=[math.exp(logprobs[each]) for each in WORDS])[0]
        if self.is_greedy:
            word = max(WORDS, key=logprobs.__getitem__)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice["message"] = {"role": "assistant", "content": word}
        answer: dict[str, Any] = {"id": "chat-1", "object": "chat.completion", "model": body["model"]}
        if body.get("logprobs"):
            best = sorted(WORDS, key=logprobs.__getitem__, reverse=True)[: body.get("top_logprobs", 0)]
            top = [{"token": each, "logprob": logprobs[each], "bytes": list(each.encode())} for each in best]
            token = {"token": word, "logprob": logprobs[word], "bytes": list(word.encode()), "top_logprobs": top}
            choice["logprobs"] = {"content": [token]}
        if self.returns_ids:
            choice["token_ids"] = [WORDS.index(word)]
            answer["prompt_token_ids"] = [100, 101]
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        return web.json_response({**answer, "choices": [choice], "usage": usage})

    async def _create_job(self, request: web.Request) -> web.Response:
        rows = (await request.json())["rows"]
        id_ = f"job-{len(self.submitted)}"
        self.submitted[id_] = rows
        for row in rows:
            self._preferences[row["messages"][-1]["content"]] += LEARNING_RATE * row["advantage"]
        return web.json_response({"id": id_})

    async def _answer_job(self, request: web.Request) -> web.Response:
        known = request.match_info["id"] in self.submitted
        return web.json_response(
            {"state": "succeeded"} if known else {"state": "unknown"}, status=200 if known else 404
        )
