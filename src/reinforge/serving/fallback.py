"""Answers with a small model what it is sure of, and passes the rest on to the large one.

    a whole reply of the student, with a confidence
        at least the router's threshold    is sent                 x-reinforge-route: local
        below it                           the upstream answers    x-reinforge-route: upstream

The confidence is that of the router's signal: of the reply's log-probs, of further samples in the same batch, or the
score of an evaluator. The decision needs the whole reply, so nothing is streamed until it is made
(`x-reinforge-buffered: yes`). If the upstream is down or the day's budget is spent, the student's reply is sent all the
same, and marked.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from reinforge.dialects.chat_call import BadRequest, ChatCall
from reinforge.errors import ConfigError, ContextOverflow, EngineError, Problem
from reinforge.rollout.handle.completion import ChatCompletion
from reinforge.routing.signals import measure_confidence, simplify_reply
from reinforge.runs.journal.served import ServedCounts, ServedLog
from reinforge.serving.answers import CALL_TYPES, read_answer, read_reply
from reinforge.serving.chat import COUNT, MESSAGES, ChatApi, ModelCaller, PreparedCall, ReplyStream, get_dialect
from reinforge.serving.metrics import Counts
from reinforge.serving.models import ServedModels
from reinforge.serving.routes import ApiError, ServerLimits, abortable, read_bytes, write_json
from reinforge.serving.running_check import RunningCheck, StateFile
from reinforge.serving.upstream import ROUTE, UpstreamApi

if TYPE_CHECKING:
    from reinforge.routing.reply_evaluator import ReplyEvaluator

REASON = "x-reinforge-reason"
LOCAL, UPSTREAM = "local", "upstream"
MAX_FAILURES, OPEN_S = 5, 30.0
"""Failures in a row after which the upstream is not asked, and for how many seconds."""
DAY_S = 86400.0


class UpstreamDown(Exception):
    """The upstream did not answer, or with 429 or 5xx."""


class CircuitBreaker:
    """Says whether the upstream may be asked: not for a while after several failures, then by one request at first."""

    def __init__(self) -> None:
        self._num_failures, self._asked_again_s = 0, 0.0

    @property
    def is_closed(self) -> bool:
        return self._num_failures < MAX_FAILURES

    def allows(self) -> bool:
        now = time.monotonic()
        if self.is_closed:
            return True
        if now < self._asked_again_s:
            return False
        self._asked_again_s = now + OPEN_S  # others wait for how this request ends
        return True

    def report(self, *, failed: bool) -> None:
        self._num_failures = self._num_failures + 1 if failed else 0
        if self._num_failures == MAX_FAILURES:
            self._asked_again_s = time.monotonic() + OPEN_S


@dataclass
class DayState:
    """What a server remembers of its budget when it starts again."""

    day: int = 0  # since the Unix epoch, UTC
    num_requests: int = 0


class DayBudget:
    """Counts the requests to the upstream on one day (UTC).

    Args:
        per_day: Most requests; None: any number.
        file: Keeps the count over restarts.
    """

    def __init__(self, per_day: int | None = None, file: Path | None = None):
        self._per_day, self._file = per_day, StateFile(file if per_day is not None else None)
        self._state = self._file.load(DayState())

    @property
    def is_spent(self) -> bool:
        return self._per_day is not None and self._today().num_requests >= self._per_day

    def add(self, number: int) -> None:
        self._today().num_requests += number
        self._file.save(self._state)

    def _today(self) -> DayState:
        if (day := int(time.time() / DAY_S)) != self._state.day:
            self._state.day, self._state.num_requests = day, 0
        return self._state

    async def close(self) -> None:
        await self._file.close()


@dataclass(frozen=True, slots=True)
class LocalReply:
    call: ChatCall
    completion: ChatCompletion
    confidence: float | None  # None: not known, so that it is not sent


def _set_sampling(call: PreparedCall, **settings: Any) -> PreparedCall:
    requests = (replace(each, sampling=replace(each.sampling, **settings)) for each in call.requests)
    return replace(call, requests=tuple(requests))


class FallbackApi(ChatApi):
    """The routes of models, with an upstream behind them.

    Args:
        models: The student, which answers whatever `model` a request names.
        check: Decides which of its replies are sent.
        budget: Of requests to the upstream; None: any number.
        log: Keeps what was served; None: nothing does.
        evaluator: Of a router that decides by one.
    """

    def __init__(
        self,
        models: ServedModels,
        limits: ServerLimits,
        upstream: UpstreamApi,
        check: RunningCheck,
        budget: DayBudget | None = None,
        log: ServedLog | None = None,
        evaluator: ReplyEvaluator | None = None,
    ):
        super().__init__(models, limits)
        if check.router.signal == "entropy":
            message = "the router decides by entropy, which takes log-probs of tokens that were not sampled"
            raise ConfigError(Problem("--router", message, "calibrate it with another signal"))
        self._upstream, self._check, self._budget = upstream, check, budget or DayBudget()
        self._breaker, self._log, self._evaluator = CircuitBreaker(), log, evaluator
        self.counts: Counter[tuple[str, str]] = Counter()
        models.add_finder(lambda name: next(iter(models), None))

    def routes(self) -> list[web.RouteDef]:
        own = [route for route in super().routes() if route.path != "/v1/embeddings"]
        return [*own, *self._upstream.routes()]

    async def start(self) -> None:
        await self._upstream.start()
        if self._log is not None:
            self._log.start(self._describe_served)

    async def close(self) -> None:
        await self._check.close()
        await self._budget.close()
        await self._upstream.close()
        if self._log is not None:
            await self._log.close()

    def _describe_served(self) -> ServedCounts:
        router, recorder = self._check.router, self._upstream.recorder
        routes = {f"{route} {reason}": count for (route, reason), count in self.counts.items()}
        measured = recorder.measured if recorder is not None else {}
        checks = dict(self._check.counts)
        return ServedCounts(time.time(), router.threshold, router.margin, routes, checks, dict(measured))

    def register_metrics(self, registry: Any) -> None:
        self._upstream.register_metrics(registry)
        self._check.register_metrics(registry)
        registry.register(Counts("reinforge_routes", "Requests by who answered", ("route", "reason"), self.counts))

    @abortable
    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == f"{MESSAGES}{COUNT}":
            return await super().answer(request)
        body = await read_bytes(request)
        asked = request.headers.get(ROUTE, "")
        if asked not in ("", LOCAL, UPSTREAM):
            raise ApiError(400, f"the header {ROUTE} must be {LOCAL} or {UPSTREAM}", param=ROUTE)
        is_drawn = not asked and self._check.draws()
        with self._admit(request):
            reply, reason = None, "asked"
            if not asked and self._check.is_stopped:
                reason = "stopped"
            elif asked != UPSTREAM:
                try:
                    reply = await self._sample(request, body, is_decided=asked == LOCAL)
                except (BadRequest, ContextOverflow, EngineError, TypeError, ValueError):  # the upstream may read it
                    if asked == LOCAL:
                        raise
                reason = "not_readable" if reply is None else "not_scored" if reply.confidence is None else "unsure"
            if reply is not None and (asked == LOCAL or self._check.router.keeps(reply.confidence)):
                if is_drawn:
                    self._check.begin(self._compare(request, body, reply), reply.confidence)
                return await self._send(request, reply, "asked" if asked == LOCAL else "sure")
            obstacle = self._find_obstacle()
            if obstacle is None:
                try:
                    response = await self._pass_on(request, body, reason)
                    if is_drawn:
                        self._check.add("not_kept")
                    return response
                except UpstreamDown:
                    obstacle = "upstream_down"
            return await self._send(request, reply or await self._sample(request, body, is_decided=True), obstacle)

    async def _sample(self, request: web.Request, body: bytes, *, is_decided: bool) -> LocalReply:
        """Returns the student's reply, without a confidence if it is sent in any case."""
        call, asked = await self._read(request, body)
        model = self._models.find(call.model, asked.conversation)
        caller, router = ModelCaller(self._models, model), self._check.router
        prepared = _set_sampling(asked, temperature=0.0)  # as the router was calibrated
        if is_decided:
            return LocalReply(call, caller.finish(prepared, await caller.sample(prepared)), None)
        further = replace(asked, num_choices=router.num_samples, requests=asked.requests if router.num_samples else ())
        further = _set_sampling(further, temperature=router.temperature, top_p=1.0, top_k=0, min_p=0.0)
        found = await caller.sample(prepared, further)
        replies, samples = found[: prepared.num_replies], found[prepared.num_replies :]
        confidences = list[float | None]()
        for index, reply in enumerate(replies):
            place = index // prepared.num_choices
            own = samples[place * router.num_samples : (place + 1) * router.num_samples]
            score = None if self._evaluator is None else await self._evaluator.score(prepared.requests[place], reply)
            signals = measure_confidence(reply, [[each.message] for each in own], score)
            confidences.append(signals.get(router.signal))
        known = [each for each in confidences if each is not None]
        confidence = min(known) if len(known) == len(replies) else None
        return LocalReply(call, caller.finish(prepared, replies), confidence)

    async def _send(self, request: web.Request, reply: LocalReply, reason: str) -> web.StreamResponse:
        headers = self._describe(LOCAL, reason)
        dialect = get_dialect(request.path)
        if reply.call.stream:
            stream = ReplyStream(request, dialect, reply.call, self._limits)
            return await stream.send_whole(reply.completion, headers)
        return write_json(dialect.write_answer(reply.completion, reply.call), headers=headers)

    async def _pass_on(self, request: web.Request, body: bytes, reason: str) -> web.StreamResponse:
        """Sends the upstream's answer; raises an `UpstreamDown` before anything is sent."""
        self._budget.add(1)
        with self._upstream.record(request, body) as call:
            try:
                answer = await self._upstream.open(request, body)
            except ApiError:
                self._report_failure()
                raise UpstreamDown from None
            async with answer:
                if answer.status == 429 or answer.status >= 500:
                    if call is not None:
                        call.status = answer.status
                    self._report_failure()
                    raise UpstreamDown
                self._breaker.report(failed=False)
                return await self._upstream.pass_on(request, answer, call, self._describe(UPSTREAM, reason))

    async def _compare(self, request: web.Request, body: bytes, reply: LocalReply) -> bool:
        """Asks the upstream as well, and returns True if it says the same; raises an error if that is not known.

        A failure does not count for the circuit breaker, so checks cannot keep requests from the upstream.
        """
        if self._budget.is_spent or not self._breaker.is_closed:
            raise UpstreamDown
        self._budget.add(1)
        call_type, dialect = CALL_TYPES[request.path.removeprefix("/v1/")], get_dialect(request.path)
        fetched = await self._upstream.fetch(request, body)
        own = dialect.write_answer(reply.completion, reply.call)

        def compare() -> bool:
            answers = own, read_answer(call_type, *fetched)
            return len({simplify_reply(read_reply(each, dialect)) for each in answers}) == 1

        return await asyncio.to_thread(compare)

    def _report_failure(self) -> None:
        self._budget.add(-1)
        self._breaker.report(failed=True)

    def _find_obstacle(self) -> str | None:
        """Returns why the upstream is not asked; None: it is."""
        if self._budget.is_spent:
            return "budget_spent"
        return None if self._breaker.allows() else "upstream_down"

    def _describe(self, route: str, reason: str) -> dict[str, str]:
        self.counts[route, reason] += 1
        return {ROUTE: route, REASON: reason, "x-reinforge-buffered": "yes"}
