"""Health and metadata: is the process alive, would it take a request, and what does it serve.

Health is answered from the age of the core's heartbeat and never waits for the core.
"""

from __future__ import annotations

import msgspec

from engine.async_engine import AsyncEngine
from engine.core_client import Phase
from engine.entrypoints.asgi import HttpResponse
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.oip_metadata import model_metadata
from engine.entrypoints.protocol import to_json
from engine.entrypoints.routes.models import require_model
from engine.entrypoints.routes.routing import Access, Exchange, Route
from engine.version import __version__


class ServerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /v2`. Binary tensors are not accepted, so the extension is not listed."""

    name: str = "mtserve"
    version: str = __version__
    extensions: tuple[str, ...] = ()


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
            Route("server_metadata", "GET", "/v2", self._server_metadata),
            Route("live", "GET", "/v2/health/live", self._live, Access.OPEN),
            Route("ready", "GET", "/v2/health/ready", self._ready, Access.OPEN),
        ]
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes.append(Route("model_metadata", "GET", model, self._model))
            routes.append(
                Route("model_ready", "GET", f"{model}/ready", self._model_ready, Access.OPEN)
            )
        return routes

    async def _server_metadata(self, exchange: Exchange) -> HttpResponse:
        return HttpResponse(body=to_json(ServerMetadata()))

    def _why_not_live(self) -> str | None:
        engine = self._engine
        if engine.phase is Phase.DEAD or engine.phase is Phase.STOPPED:
            return "the core has ended"
        if engine.phase in (Phase.SERVING, Phase.DRAINING):
            age_s = engine.heartbeat_age_s
            if age_s > self._config.heartbeat_timeout_s:
                return f"the core's last heartbeat is {age_s:.1f} s old"
        return None

    async def _live(self, exchange: Exchange) -> HttpResponse:
        reason = self._why_not_live()
        if reason is None:
            return HttpResponse(body=to_json(HealthBody(live=True)))
        return HttpResponse(status=503, body=to_json(HealthBody(live=False, reason=reason)))

    async def _ready(self, exchange: Exchange) -> HttpResponse:
        reason = self._why_not_live()
        if reason is None and not self._engine.is_ready:
            reason = f"the engine is {self._engine.phase.value}"
        if reason is None:
            return HttpResponse(body=to_json(HealthBody(ready=True, name=self._engine.info.name)))
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
