"""Health and metadata: is the process alive, would it take a request, and what does it serve.

Health is answered from the age of the core's heartbeat and never waits for the core.
"""

from __future__ import annotations

import msgspec

from engine.async_engine import AsyncEngine
from engine.entrypoints.asgi import HttpResponse
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.oip_metadata import ModelMetadata, model_metadata
from engine.entrypoints.protocol import to_json
from engine.entrypoints.readiness import why_not_live, why_not_ready
from engine.entrypoints.routes.models import require_model
from engine.entrypoints.routes.routing import Access, Exchange, Route, RouteDoc
from engine.version import __version__

_NOT_READY = "not_ready"  # outcome in the access log of a 503, which is no error


class ServerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /v2`: the server, and the protocol's extensions that it speaks."""

    name: str = "mtserve"
    version: str = __version__
    extensions: tuple[str, ...] = ("binary_tensor_data",)


class HealthBody(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to the health routes; `reason` says why not."""

    live: bool | msgspec.UnsetType = msgspec.UNSET
    ready: bool | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET


class HealthRoutes:
    """Owned by the server's event loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config

    def table(self) -> list[Route]:
        routes = [
            Route(
                "server_metadata", "GET", "/v2", self._server_metadata,
                doc=RouteDoc("The server's name, version and extensions.", (), (ServerMetadata,)),
            ),
            Route(
                "live", "GET", "/v2/health/live", self._live, Access.OPEN,
                RouteDoc("Whether the process and its core are alive.", (), (HealthBody,), (503,)),
            ),
            Route(
                "ready", "GET", "/v2/health/ready", self._ready, Access.OPEN,
                RouteDoc("Whether a request would be taken now.", (), (HealthBody,), (503,)),
            ),
        ]  # fmt: skip
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            metadata = RouteDoc("Inputs, outputs and limits of a model.", (), (ModelMetadata,))
            ready = RouteDoc("Whether the model would take a request.", (), (HealthBody,), (503,))
            routes += [
                Route("model_metadata", "GET", model, self._model, doc=metadata),
                Route(
                    "model_ready", "GET", f"{model}/ready", self._model_ready, Access.OPEN, ready
                ),
            ]
        return routes

    async def _server_metadata(self, exchange: Exchange) -> HttpResponse:
        return HttpResponse(body=to_json(ServerMetadata()))

    async def _live(self, exchange: Exchange) -> HttpResponse:
        reason = why_not_live(self._engine, self._config.heartbeat_timeout_s)
        if reason is None:
            return HttpResponse(body=to_json(HealthBody(live=True)))
        exchange.outcome = _NOT_READY
        return HttpResponse(status=503, body=to_json(HealthBody(live=False, reason=reason)))

    async def _ready(self, exchange: Exchange) -> HttpResponse:
        reason = why_not_ready(self._engine, self._config.heartbeat_timeout_s)
        if reason is None:
            return HttpResponse(body=to_json(HealthBody(ready=True, name=self._engine.info.name)))
        exchange.outcome = _NOT_READY
        return HttpResponse(status=503, body=to_json(HealthBody(ready=False, reason=reason)))

    async def _model(self, exchange: Exchange) -> HttpResponse:
        return HttpResponse(
            body=to_json(
                model_metadata(require_model(self._engine, exchange), self._engine.served.versions)
            )
        )

    async def _model_ready(self, exchange: Exchange) -> HttpResponse:
        require_model(self._engine, exchange)
        return await self._ready(exchange)
