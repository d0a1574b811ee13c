"""The ASGI application: from a connection's request to its one answer."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time

from engine.async_engine import AsyncEngine
from engine.core_client import Phase
from engine.entrypoints import asgi, metrics_export
from engine.entrypoints.asgi import HttpResponse, Receive, Scope, Send
from engine.entrypoints.config import ServerConfig
from engine.entrypoints.page.files import page_routes
from engine.entrypoints.protocol import ErrorBody, error_body, to_json
from engine.entrypoints.routes.health import HealthRoutes
from engine.entrypoints.routes.infer import InferRoutes
from engine.entrypoints.routes.native import NativeRoutes
from engine.entrypoints.routes.observe import ObserveRoutes
from engine.entrypoints.routes.routing import Exchange, Match, Router
from engine.entrypoints.routes.users import UserRoutes
from engine.entrypoints.routes.weights import WeightsRoutes
from engine.errors import EngineDead, EngineError, Overloaded

MAX_REQUEST_ID = 128

log = logging.getLogger(__name__)
access_log = logging.getLogger("engine.access")


class App:
    """The application. Owned by the server's event loop."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self._metrics = metrics_export.ServerMetrics()
        self._id_prefix = f"{os.getpid():x}-{int(time.time()):x}"
        self._numbers = itertools.count(1)
        self._router = Router(
            [
                *HealthRoutes(engine, config).table(),
                *InferRoutes(engine, config).table(),
                *NativeRoutes(engine, config).table(),
                *UserRoutes(engine).table(),
                *WeightsRoutes(engine, config).table(),
                *ObserveRoutes(engine, self._metrics).table(),
                *page_routes(),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request: never raises, except when its own task is cancelled."""
        if scope["type"] != "http":
            raise NotImplementedError(f"only HTTP is served, not {scope['type']}")
        exchange = Exchange(
            scope=scope,
            receive=receive,
            request_id=self._request_id(scope),
            arrival_s=time.monotonic(),
        )
        route_name = "unknown"
        self._metrics.in_flight += 1
        try:
            found = self._router.find(scope["method"], scope["raw_path"].decode("latin-1"))
            if isinstance(found, Match):
                route_name = found.route.name
                exchange.params = found.params
                response = await self._answer(found, exchange)
            else:
                response = _no_route(exchange, found)
        finally:
            self._metrics.in_flight -= 1
        self._metrics.http_requests[route_name, str(response.status)] += 1
        if self._config.access_log:
            access_log.info(
                "%s %s %s %d %.1fms %s", exchange.request_id, scope["method"], scope["path"],
                response.status, (time.monotonic() - exchange.arrival_s) * 1e3,
                " ".join(exchange.notes),
            )  # fmt: skip
        await asgi.send_response(send, response, exchange.request_id)

    async def _answer(self, found: Match, exchange: Exchange) -> HttpResponse:
        try:
            return await found.route.handler(exchange)
        except EngineError as error:
            return self._failure(error, exchange)
        except Exception as error:
            log.exception("request %s failed in the server", exchange.request_id)
            return _error_response(500, ErrorBody(
                error=f"the server failed: {type(error).__name__}", code="internal",
                request_id=exchange.request_id,
            ))  # fmt: skip

    def _failure(self, error: EngineError, exchange: Exchange) -> HttpResponse:
        exchange.notes.append(error.code)
        response = _error_response(error.status, error_body(error, exchange.request_id))
        if isinstance(error, Overloaded):
            seconds = max(1, math.ceil(error.retry_after_s))
            response.headers.append((b"retry-after", str(seconds).encode()))
        elif isinstance(error, EngineDead) and self._engine.phase is Phase.STARTING:
            response.headers.append((b"retry-after", b"1"))
        elif error.status == 413:
            # What is left of the body will not be read.
            response.headers.append((b"connection", b"close"))
        return response

    def _request_id(self, scope: Scope) -> str:
        sent = asgi.header(scope, b"x-request-id")
        if sent and len(sent) <= MAX_REQUEST_ID and sent.isascii() and sent.isprintable():
            return sent
        return f"{self._id_prefix}-{next(self._numbers)}"


def _no_route(exchange: Exchange, allowed: list[str]) -> HttpResponse:
    scope = exchange.scope
    if not allowed:
        exchange.notes.append("not_found")
        return _error_response(404, ErrorBody(
            error=f"no route {scope['path']!r}", code="not_found", request_id=exchange.request_id,
        ))  # fmt: skip
    response = _error_response(405, ErrorBody(
        error=f"{scope['method']} is not served here: use {allowed[0]}",
        code="method_not_allowed", request_id=exchange.request_id,
    ))  # fmt: skip
    response.headers.append((b"allow", ", ".join(allowed).encode()))
    return response


def _error_response(status: int, body: ErrorBody) -> HttpResponse:
    return HttpResponse(status=status, body=to_json(body))
