"""What the server tells of itself: `/metrics`, the same as JSON, and `/v1/status`."""

from __future__ import annotations

import asyncio

import msgspec

from engine.async_engine import AsyncEngine
from engine.entrypoints import metrics_export, metrics_json
from engine.entrypoints.asgi import HttpResponse
from engine.entrypoints.protocol import to_json
from engine.entrypoints.routes.routing import Access, Exchange, Route, RouteDoc
from engine.errors import EngineDead, EngineError
from engine.types import CoreStats

_STATS_WAIT_S = 0.5


class StatusBody(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /v1/status`."""

    phase: str
    model: str
    active_weights: str
    weights_versions: list[str]
    heartbeat_age_s: float
    requests_waiting: int
    requests_running: int
    steps: int
    device_pages_used: int
    device_pages_total: int
    host_chunks_used: int
    host_chunks_total: int
    users_resident: dict[str, int]
    copies_in_flight: dict[str, int]


class ObserveRoutes:
    """Owned by the server's event loop."""

    def __init__(self, engine: AsyncEngine, metrics: metrics_export.ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def table(self) -> list[Route]:
        return [
            Route(
                "status", "GET", "/v1/status", self._status,
                doc=RouteDoc("What waits, runs and is kept right now.", (), (StatusBody,)),
            ),
            Route(
                "metrics", "GET", "/metrics", self._metrics_page, Access.OPEN,
                RouteDoc("Metrics in the Prometheus text format.", media_type="text/plain"),
            ),
            Route(
                "metrics_json", "GET", "/v1/metrics.json", self._metrics_json, Access.OPEN,
                RouteDoc("The same metrics as JSON.", (), (list[metrics_json.JsonSample],)),
            ),
        ]  # fmt: skip

    async def _stats(self) -> CoreStats | None:
        """The core's word of now, or its last one if it does not answer in time."""
        try:
            return await asyncio.wait_for(self._engine.stats(), _STATS_WAIT_S)
        except (EngineError, TimeoutError):
            return self._engine.last_stats

    async def _status(self, exchange: Exchange) -> HttpResponse:
        info, stats = self._engine.info, await self._stats()
        if stats is None:
            raise EngineDead("the core has not reported yet")
        values = {(sample.name, sample.labels): sample.value for sample in stats.samples}

        def gauge(name: str) -> int:
            return int(values.get((name, ()), 0))

        def by_label(name: str) -> dict[str, int]:
            return {labels[0]: int(value) for (key, labels), value in values.items() if key == name}

        return HttpResponse(
            body=to_json(
                StatusBody(
                    phase=self._engine.phase.value,
                    model=info.name,
                    active_weights=info.weights_version,
                    weights_versions=list(self._engine.served.versions),
                    heartbeat_age_s=round(self._engine.heartbeat_age_s, 3),
                    requests_waiting=stats.num_waiting,
                    requests_running=stats.num_running,
                    steps=stats.num_steps,
                    device_pages_used=gauge("device_pages_used"),
                    device_pages_total=gauge("device_pages_total"),
                    host_chunks_used=gauge("host_chunks_used"),
                    host_chunks_total=gauge("host_chunks_total"),
                    users_resident=by_label("users_resident"),
                    copies_in_flight=by_label("copies_in_flight"),
                )
            )
        )

    async def _metrics_page(self, exchange: Exchange) -> HttpResponse:
        stats = await self._stats()
        body = metrics_export.render(
            () if stats is None else stats.samples,
            self._metrics.samples(self._engine.heartbeat_age_s),
        )
        return HttpResponse(body=body, content_type=metrics_export.CONTENT_TYPE)

    async def _metrics_json(self, exchange: Exchange) -> HttpResponse:
        stats = await self._stats()
        return HttpResponse(
            body=metrics_json.render(
                () if stats is None else stats.samples,
                self._metrics.samples(self._engine.heartbeat_age_s),
            )
        )
