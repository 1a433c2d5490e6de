"""What the server does, for Prometheus: `/metrics`.

reinforge_requests_total{method, route, status}      requests by route and status
reinforge_request_seconds{route}                     time until the response is complete
reinforge_tokens_total{model, kind}                  tokens of prompts and of replies
reinforge_calls_in_flight                            model calls that are sampled or wait
reinforge_model_version{model}                       version of the weights that new replies are sampled from
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from reinforge.errors import BackendUnavailable
from reinforge.serving.models import ServedModel, ServedModels
from reinforge.serving.routes import Feature
from reinforge.types.episode import ModelCall

INSTALL = 'pip install "reinforge[serve]"'


class MetricsApi(Feature):
    def __init__(self, models: ServedModels):
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise BackendUnavailable(f"a server needs prometheus-client, which is not installed: {INSTALL}") from None
        self._models, self._prometheus = models, prometheus
        self.registry = registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "reinforge_requests", "Requests", ["method", "route", "status"], registry=registry
        )
        self._seconds = prometheus.Histogram(
            "reinforge_request_seconds",
            "Time until the response is complete",
            ["route"],
            registry=registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )
        self._tokens = prometheus.Counter("reinforge_tokens", "Tokens", ["model", "kind"], registry=registry)
        in_flight = prometheus.Gauge("reinforge_calls_in_flight", "Model calls", registry=registry)
        in_flight.set_function(lambda: sum(model.num_in_flight for model in self._models))
        registry.register(_Versions(models))
        models.watch(self._count_tokens)

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/metrics", self.show)]

    async def show(self, request: web.Request) -> web.Response:
        text = self._prometheus.generate_latest(self.registry)
        return web.Response(body=text, headers={"content-type": self._prometheus.CONTENT_TYPE_LATEST})

    def count(self, request: web.Request, status: int, started_s: float) -> None:
        resource = request.match_info.route.resource
        route = "unknown" if resource is None else resource.canonical  # never the path itself: it may be anything
        self._requests.labels(request.method if resource is not None else "", route, str(status)).inc()
        self._seconds.labels(route).observe(time.perf_counter() - started_s)

    def _count_tokens(self, call: ModelCall, model: ServedModel) -> None:
        self._tokens.labels(model.name, "prompt").inc(call.reply.num_prompt_tokens)
        self._tokens.labels(model.name, "completion").inc(call.num_completion_tokens)


class Counts:
    """A counter whose values are kept by a part of the server: its label, or labels -> count."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, int]):
        self._name, self._text, self._labels, self._values = name, text, labels, values

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in dict(self._values).items():
            family.add_metric([labels] if isinstance(labels, str) else list(labels), count)
        yield family


class _Versions:
    def __init__(self, models: ServedModels):
        self._models = models

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily("reinforge_model_version", "Version of the weights", labels=["model"])
        for model in self._models:
            family.add_metric([model.name], model.policy.version)
        yield family
